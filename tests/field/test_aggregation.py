"""Field cases A1 to A9: what is added up, and what must never be."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.gradients import clipped_sums
from region_app import exchange as exchange_module
from region_app.coordinator import Coordinator
from region_app.exchange import exchange
from regionfed.contract import (
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    ProfileReply,
    decode,
    encode,
)
from regionfed.errors import RunError
from regionfed.personaliser import PERSONALISERS
from regionfed.privacy.plan import plan_privacy
from regionfed.sketch import sketch_signs
from regionfed.vector import Layout
from server_app.in_process_grid import InProcessGrid, Node
from tests.conftest import (
    RUN_ID,
    Mixed,
    Script,
    ToyTask,
    context_of,
    coordinator_of,
    linear_loss,
    part,
    run_rounds,
    scripted_world,
    steady,
    tiny_config,
    toy_example,
    train_request,
)

P = 4
THETA = torch.linspace(-1.0, 1.0, P)


def ones(scale: float = 1.0) -> torch.Tensor:
    return torch.full((P,), scale)


def nobody() -> Script:
    """Return a device without examples."""
    return steady(torch.zeros(P), profile=lambda _: ProfileReply(0))


def somebody(scale: float) -> Script:
    return steady(ones(scale), profile=lambda _: ProfileReply(100))


# ----------------------------------------------------------------------------------------- A1
def test_a1_when_no_client_has_examples_theta_is_kept(tmp_path: Path) -> None:
    """A1.

    Every client of a round replies num-examples = 0 (still a ZeroDivisionError in Flower's
    aggregation). -> the region sits the round out, theta is kept, the report says "no data".
    """
    config = tiny_config(privacy_mode="none", max_failed_rounds=9, rounds=2)
    scripts = {"North": [nobody(), nobody()], "South": [nobody()]}
    run = run_rounds(*scripted_world(tmp_path, scripts, config), config, THETA)
    assert all(torch.equal(state.theta, THETA) for state in run.states)
    for record in run.records:
        assert list(record.answered) == []
        assert {f.region for f in record.failures} == {"North", "South"}
        assert all("no data" in f.reason for f in record.failures)


def test_a1_a_region_without_examples_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """A1.

    -> the region sits the round out; the mean is that of the others.
    """
    config = tiny_config(privacy_mode="none", rounds=1)
    scripts = {"North": [nobody()], "South": [somebody(100.0)]}
    run = run_rounds(*scripted_world(tmp_path, scripts, config), config, THETA)
    assert torch.allclose(run.states[0].theta, THETA - 100.0 / (0.5 * 100))
    assert list(run.records[0].answered) == ["South"]


@pytest.mark.parametrize("noise_seed", range(4))
def test_a1_a_region_without_examples_sits_out_under_noise_too(
    tmp_path: Path, noise_seed: int
) -> None:
    """A1.

    -> the region sits the round out, also where its size is known with noise only: noise alone
    must not pass for data, or theta takes a step of pure noise over a batch of almost nobody.
    """
    config = tiny_config(noise_seed=noise_seed)
    coordinator = coordinator_of(tmp_path, [nobody(), nobody()], config)
    with pytest.raises(RunError, match="no data"):
        coordinator.train(train_request(THETA))


# ----------------------------------------------------------------------------------------- A2
def test_a2_a_zero_gradient_stays_zero_under_clipping() -> None:
    """A2.

    A zero update under clipping (frozen model, zero local steps; still divides by zero in
    Flower). -> scale = min(1, C / max(norm, tiny)); zero stays zero.
    """
    task = ToyTask(3, linear_loss)
    layout = Layout.of(task.module)
    sums = clipped_sums(
        task,
        layout,
        layout.read(task.module),
        [toy_example([0.0, 0.0, 0.0])],
        clip_norm=1.0,
        loss_cap=1.0,
        signs=sketch_signs(layout, 4, 0),
        microbatch=4,
    )
    assert torch.equal(sums.total, torch.zeros(4)) and torch.equal(sums.sketch, torch.zeros(4))


def test_a2_a_round_of_zero_updates_changes_nothing(tmp_path: Path) -> None:
    """A2.

    -> zero stays zero, through mean, conflict, weight and personalisation.
    """
    config = tiny_config(privacy_mode="none", rounds=2, rho_every=1)
    scripts = {"North": [somebody(0.0)], "South": [somebody(0.0)]}
    run = run_rounds(*scripted_world(tmp_path, scripts, config), config, THETA)
    for record, state in zip(run.records, run.states, strict=True):
        assert torch.equal(state.theta, THETA)
        assert not record.failures
        assert {r.conflict for r in record.regions.values()} == {0.0}
        assert {r.alpha for r in record.regions.values()} == {0.75}


# ----------------------------------------------------------------------------------------- A3
def test_a3_buffers_are_neither_sent_nor_averaged_and_keep_their_type() -> None:
    """A3.

    Integer or boolean buffers (BatchNorm's num_batches_tracked) in what is aggregated (still
    crashes Flower's clipping; averaging turns int64 into float64). -> buffers never go through
    clip, noise or averaging by accident; dtype and 0-d shape are restored per key.
    """
    model = Mixed()
    model.norm(torch.randn(4, 2))
    layout = Layout.of(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mean = layout.read(model) * 0.5 + 0.25
    sent = encode(GradientReply(mean, torch.zeros(0), 0.0))
    back = decode(GradientReply, sent, {"p": layout.size}).total
    layout.write(back, model)
    after = model.state_dict()
    trained = {*layout.names, "head.weight"}
    assert "norm.num_batches_tracked" not in trained
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and after[name].shape == tensor.shape
        if name not in trained:
            assert torch.equal(after[name], tensor), name
    assert after["scale"].shape == () and after["scale"].item() == 1.25


# ----------------------------------------------------------------------------------------- A4
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", ["total", "sketch", "loss"])
def test_a4_one_client_that_sends_no_number_is_quarantined(
    tmp_path: Path, value: float, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A4.

    One client sends NaN or inf. -> that reply is quarantined with its reason; the mean is
    untouched; a metric says so.
    """

    def poison(request: GradientRequest) -> RecordDict:
        records = encode(GradientReply(ones(50.0), torch.zeros(request.sketch_size), 1.0))
        if key == "loss":
            part(records, "metrics")["loss"] = value
        else:
            size = P if key == "total" else request.sketch_size
            vector = np.array([value] + [0.0] * (size - 1), dtype=np.float32)
            part(records, "arrays")[f"{key}/0"] = Array(vector)
        return records

    scripts = [somebody(1.0), steady(ones(), gradient=poison, profile=lambda _: ProfileReply(100))]
    config = tiny_config(privacy_mode="none")
    with caplog.at_level(logging.WARNING):
        update = coordinator_of(tmp_path, scripts, config).train(train_request(THETA))
    assert torch.allclose(update.update, ones(1.0 / 100))
    assert any("node 2" in m and key in m for m in caplog.messages)


# ----------------------------------------------------------------------------------------- A5
@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"total": torch.zeros(1, 2)}, r"'total': expected float32 of one axis.*\(1, 2\)"),
        ({"total": torch.zeros(2, 2)}, r"'total': expected float32 of one axis.*\(2, 2\)"),
        ({"total": torch.zeros(1)}, "'total': expected 4 elements, got 1"),
        ({"total": torch.zeros(5)}, "'total': expected 4 elements, got 5"),
        ({"bias": torch.zeros(4)}, r"lacks \[\] and has unknown \['bias'\]"),
        ({"total": None}, r"lacks \['total'\]"),
    ],
)
def test_a5_replies_that_do_not_fit_are_refused_by_name(
    tmp_path: Path,
    arrays: dict[str, torch.Tensor | None],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A5.

    Replies with different key sets, or shapes that broadcast ((2,2) and (1,2)); both still
    averaged silently. -> refused, naming client, key, expected and got.
    """

    def other(request: GradientRequest) -> RecordDict:
        records = encode(GradientReply(ones(9.0), torch.zeros(request.sketch_size), 0.0))
        for name, value in arrays.items():
            if value is None:
                del part(records, "arrays")[f"{name}/0"]
            else:
                part(records, "arrays")[f"{name}/0"] = Array(value.numpy())
        return records

    scripts = [somebody(1.0), steady(ones(), gradient=other, profile=lambda _: ProfileReply(100))]
    config = tiny_config(privacy_mode="none")
    with caplog.at_level(logging.WARNING):
        update = coordinator_of(tmp_path, scripts, config).train(train_request(THETA))
    assert torch.allclose(update.update, ones(1.0 / 100))
    (message,) = caplog.messages
    assert "node 2" in message
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(message)


# ----------------------------------------------------------------------------------------- A6
def test_a6_bf16_crosses_and_is_bf16_again() -> None:
    """A6.

    bf16 tensors (ArrayRecord refuses them with a TypeError). -> cast and restore by a recorded
    dtype.
    """
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    layout = Layout.of(model)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert flat.dtype == torch.bfloat16
    back = decode(GradientReply, encode(GradientReply(flat, flat[:0], 0.0)), {"p": 8, "k": 0})
    tensors = layout.tensors(back.total)
    for name, parameter in model.named_parameters():
        assert tensors[name].dtype == torch.bfloat16 and torch.equal(tensors[name], parameter)


@pytest.mark.parametrize(
    ("loss", "examples"),
    [
        (np.float32(1.5), np.int64(3)),
        (np.float64(1.5), np.int32(3)),
        (torch.tensor(1.5), torch.tensor(3)),
        (torch.tensor(1.5, dtype=torch.bfloat16), np.array(3)),
    ],
)
def test_a6_numpy_and_torch_scalars_are_coerced_in_one_place(loss: Any, examples: Any) -> None:
    """A6.

    np.float32 / np.int64 / bool / None / torch scalars in metrics (refused too). -> metrics are
    coerced in one place.
    """
    sent = encode(GradientReply(ones(), torch.zeros(0), loss))
    assert decode(GradientReply, sent, {}).loss == 1.5
    assert decode(ProfileReply, encode(ProfileReply(examples)), {}).examples == 3


# ----------------------------------------------------------------------------------------- A7
def test_a7_what_one_client_does_to_its_message_stays_with_it() -> None:
    """A7.

    One shared config object mutated per client leaks to all. -> a message is built per receiver.
    """
    seen: list[tuple[int, list[float]]] = []

    def app() -> ClientApp:
        app = ClientApp()

        @app.evaluate("loss")
        def loss(message: Message, context: Context) -> Message:
            config = part(message.content, "config")
            seen.append((config["round"], list(config["steps"])))
            config["round"] = 99
            config["steps"].append(99.0)
            part(message.content, "arrays")["base/0"] = Array(np.zeros(1, dtype=np.float32))
            return Message(encode(LossReply([0.0, 0.0])), reply_to=message)

        return app

    grid = InProcessGrid({i: Node(app(), context_of(i)) for i in (1, 2, 3)}, RUN_ID)
    request = LossRequest(1, "layout", 0.5, 1.0, [0.5, 1.0], ones(), ones())
    reasons: list[str] = []
    replies = exchange(
        grid, [1, 2, 3], request, LossReply, {"steps": 2}, timeout=9.0, quarantine=reasons.append
    )
    assert len(list(replies)) == 3 and reasons == []
    assert seen == [(1, [0.5, 1.0])] * 3
    assert request.steps == [0.5, 1.0]


# ------------------------------------------------------------------------------------- A8, A9
class Clock:
    """Time that passes only when somebody sleeps."""

    now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of whoever waits for nodes."""
    clock = Clock()
    fake = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
    monkeypatch.setattr(exchange_module, "time", fake)
    return clock


class Joining(InProcessGrid):
    """A grid whose nodes join one by one, `every` seconds apart."""

    def __init__(self, scripts: list[Script], clock: Clock, every: float) -> None:
        nodes = {i: Node(s.app(), context_of(i)) for i, s in enumerate(scripts, 1)}
        super().__init__(nodes, RUN_ID)
        self.clock, self.every = clock, every

    def get_node_ids(self) -> list[int]:
        joined = int(self.clock.now / self.every) + 1
        return super().get_node_ids()[:joined]


def joining_region(folder: Path, scripts: list[Script], clock: Clock, every: float) -> Coordinator:
    config = tiny_config(join_timeout=60.0)
    return Coordinator(
        region="North",
        grid=Joining(scripts, clock, every),
        devices=len(scripts),
        config=config,
        plan=plan_privacy(config, sketch=True, votes=True),
        personaliser=PERSONALISERS.load("residual")(1.0),
        tasks=("toy",),
        folder=folder,
    )


def test_a8_no_round_starts_before_the_declared_population_is_there(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A8.

    Sampling starts before the nodes have joined: round 1 trained on 2 of 80 nodes, so the q that
    was accounted was false. -> wait, with a bound and progress, for the declared population;
    account for what really took part.
    """
    scripts = [somebody(1.0) for _ in range(4)]
    coordinator = joining_region(tmp_path, scripts, clock, every=10.0)
    coordinator.train(train_request(THETA))
    assert 30.0 <= clock.now < 60.0
    assert caplog.messages == [
        f"region North: waiting: {n} of 4 declared nodes have joined" for n in (1, 2, 3)
    ]
    for script in scripts:
        assert sum(isinstance(r, GradientRequest) for r in script.asked) == 1
    events = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [(e["release"], e["sampling_rate"]) for e in events] == [
        ("region size", 1.0),
        ("update+loss+sketch", 0.5),
    ]


def test_a9_waiting_ends_and_names_who_is_missing(tmp_path: Path, clock: Clock) -> None:
    """A9.

    Fewer nodes than the minimum: waiting without bound. -> bounded wait, then an error that names
    who is missing.
    """
    scripts = [somebody(1.0) for _ in range(4)]
    coordinator = joining_region(tmp_path, scripts, clock, every=50.0)
    with pytest.raises(RunError, match=r"region North: 2 of 4 declared nodes.*60 s; 2 are missing"):
        coordinator.train(train_request(THETA))
    assert 60.0 <= clock.now < 61.0
    assert all(script.asked == [] for script in scripts)
    assert not (tmp_path / "ledger.jsonl").exists()
    # The late ones arrive; the next round finds everybody.
    clock.now += 100.0
    coordinator.train(train_request(THETA))


def test_a9_nobody_is_asked_twice_about_who_is_there(clock: Clock, tmp_path: Path) -> None:
    """A9.

    -> once the population is complete no round waits again.
    """
    scripts = [somebody(1.0) for _ in range(4)]
    coordinator = joining_region(tmp_path, scripts, clock, every=1.0)
    coordinator.train(train_request(THETA, 1))
    waited = clock.now
    coordinator.train(train_request(THETA, 2))
    assert clock.now == waited
