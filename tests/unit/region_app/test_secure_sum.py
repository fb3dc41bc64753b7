"""A region under secure aggregation: coordinator, mod and ledger together, in one process."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from scipy import stats

from client_app.secure_aggregation import SUMMED, secure_aggregation
from region_app.coordinator import Coordinator
from region_app.secure_sum import SecureSum
from region_app.summation import CentralSum, Devices, Question
from regionfed.config import Config
from regionfed.contract import (
    GradientReply,
    LossReply,
    ProfileReply,
    ProfileRequest,
    ScoreReply,
    encode,
)
from regionfed.errors import ConfigurationError, RunError
from regionfed.personaliser import PERSONALISERS
from regionfed.privacy.ledger import Ledger
from regionfed.privacy.plan import PrivacyPlan, plan_privacy
from regionfed.secure_aggregation.terms import Terms
from server_app.in_process_grid import InProcessGrid, Node
from tests.conftest import (
    REGION,
    RUN_ID,
    TASKS,
    Script,
    context_of,
    coordinator_of,
    personalise_request,
    tiny_config,
    train_request,
)

P = 6
THETA = torch.zeros(P)
DEVICES = 4
LEVEL = 1e-3


def config_of(**settings: Any) -> Config:
    """Return settings of a region of four devices of which one may drop out."""
    values = {"secure_aggregation": "pairwise", "privacy_mode": "none", "rho_every": 1}
    return tiny_config(**{**values, **settings})


def script_of(i: int) -> Script:
    """Return a device whose every answer is its own."""
    return Script(
        gradient=lambda r: GradientReply(
            torch.linspace(-1.0, float(i), len(r.point)), torch.full((r.sketch_size,), 0.1 * i), i
        ),
        loss=lambda r: LossReply([0.25 * i] * len(r.steps)),
        metrics=lambda _: ScoreReply([float(i), 0.5, 0.25] * len(TASKS)),
        profile=lambda _: ProfileReply(5 + i),
    )


Mod = Callable[[Message, Context, ClientAppCallable], Message]


class Region:
    """Scripted devices behind the mod, and a grid that sees what they send."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        *,
        devices: int = DEVICES,
        fault: Mod | None = None,
        node_config: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self.scripts = [script_of(i) for i in range(devices)]
        self.sent: list[tuple[str, Message]] = []
        self.plan = self._plan()
        mods = [self._watch, *([fault] if fault else []), secure_aggregation]
        nodes = {}
        for i, script in enumerate(self.scripts):
            app = script.app()
            covered = ClientApp(mods=mods)
            for kind, category in (
                ("gradient", covered.train),
                ("loss", covered.evaluate),
                ("metrics", covered.evaluate),
                ("profile", covered.query),
            ):
                category(kind)(app)
            own = {
                "region": REGION,
                "partition-id": i,
                "state-folder": str(folder / "devices" / str(i)),
                **(node_config or {}),
            }
            nodes[i + 1] = Node(covered, context_of(i + 1, own, config))
        self.nodes = nodes
        self.coordinator = self.restarted()

    def restarted(self) -> Coordinator:
        person = PERSONALISERS.load(self.config.personaliser)(self.config)
        return Coordinator(
            region=REGION,
            grid=InProcessGrid(self.nodes, RUN_ID),
            devices=len(self.scripts),
            config=self.config,
            plan=self.plan,
            personaliser=person,
            tasks=TASKS,
            folder=self.folder / "region",
        )

    def _plan(self) -> PrivacyPlan:
        person = PERSONALISERS.load(self.config.personaliser)(self.config)
        return plan_privacy(
            self.config, sketch=True, votes=person.searches_rho, queries=person.queries
        )

    def _watch(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        step = next((name for name in message.content if name.startswith("secure.")), "open")
        reply = call_next(message, context)
        self.sent.append((step, reply))
        return reply

    def ledger(self) -> list[dict[str, Any]]:
        path = self.folder / "region" / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fails_at(step: str, devices: set[int], kind: str = "train.gradient") -> Mod:
    """Return a mod that makes devices vanish at a step of one exchange."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        late = context.node_config["partition-id"] in devices
        if late and step in message.content and message.metadata.message_type == kind:
            raise ConnectionError("gone")
        return call_next(message, context)

    return mod


STEPS = ["advertise", "share", "mask", "agree", "unmask"]


def test_a_round_is_that_of_the_plain_run_up_to_the_grid(tmp_path: Path) -> None:
    """Size, update, votes, scores and what follows from them; without noise, so exactly."""
    secure = Region(tmp_path / "secure", config_of())
    plain = coordinator_of(
        tmp_path / "plain",
        [script_of(i) for i in range(DEVICES)],
        config_of(secure_aggregation="off"),
    )
    one, other = secure.coordinator.train(train_request(THETA)), plain.train(train_request(THETA))
    assert one.examples == pytest.approx(other.examples, abs=1e-5)
    assert torch.allclose(one.update, other.update, atol=1e-6)
    assert torch.allclose(one.sketch, other.sketch, atol=1e-6)
    assert one.loss == pytest.approx(other.loss, abs=1e-5)
    request = personalise_request(THETA, torch.full((P,), 0.5))
    told, expected = secure.coordinator.personalise(request), plain.personalise(request)
    assert (told.rho, told.strategy, told.alpha) == pytest.approx(
        (expected.rho, expected.strategy, expected.alpha)
    )
    assert np.allclose(told.scores, expected.scores, atol=1e-5)
    assert {step for step, _ in secure.sent} == {f"secure.{step}" for step in STEPS}
    again = secure.coordinator.train(train_request(THETA))
    assert torch.equal(again.update, one.update)  # D10: kept, not asked for again


def test_nothing_of_a_device_is_in_what_it_sends(tmp_path: Path) -> None:
    """No record of an answer, no bytes of its vector; two runs of one device look unlike."""
    region = Region(tmp_path, config_of())
    region.coordinator.train(train_request(THETA))
    masked = [reply for step, reply in region.sent if step == "secure.mask"]
    assert len(masked) == 2 * DEVICES  # size and update
    for reply in masked:
        assert set(reply.content) == {"arrays", "config"}
        assert set(reply.content.array_records["arrays"]) == {"masked/0"}
    for i, (_, reply) in enumerate(region.sent):
        wire = b"".join(
            array.data for r in reply.content.array_records.values() for array in r.values()
        )
        value = torch.linspace(-1.0, float(i % DEVICES), P).numpy()
        assert value.tobytes() not in wire and not reply.content.metric_records


@pytest.mark.parametrize("step", STEPS)
def test_a_device_that_vanishes_at_any_step_costs_itself_alone(tmp_path: Path, step: str) -> None:
    """One of four may; its answer counts only if it came before it vanished."""
    region = Region(tmp_path, config_of(), fault=fails_at(f"secure.{step}", {2}))
    update = region.coordinator.train(train_request(THETA))
    left = [i for i in range(DEVICES) if i != 2 or step in {"agree", "unmask"}]
    total = sum(torch.linspace(-1.0, float(i), P) for i in left)
    assert torch.allclose(update.update * 0.5 * update.examples, torch.as_tensor(total), atol=1e-4)


@pytest.mark.parametrize("step", STEPS)
def test_one_more_and_the_region_sits_the_round_out(tmp_path: Path, step: str) -> None:
    """The error says so, and nothing is charged but what may have been opened."""
    region = Region(tmp_path, config_of(), fault=fails_at(f"secure.{step}", {1, 2}))
    with pytest.raises(RunError, match=r"2 of 4 devices are left.*needs 3.*tolerated-dropouts"):
        region.coordinator.train(train_request(THETA))
    charged = [event["release"] for event in region.ledger()]
    assert charged[0] == "region size"
    assert len(charged) == (2 if step == "unmask" else 1)


def test_a_round_that_was_not_opened_may_be_asked_again_and_an_opened_one_not(
    tmp_path: Path,
) -> None:
    """D10: a second sum of one round would be a second release; devices see to it themselves."""
    gone = {1, 2}

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if "secure.agree" in message.content and message.metadata.message_type == "train.gradient":
            return fails_at("secure.agree", gone)(message, context, call_next)
        return call_next(message, context)

    region = Region(tmp_path, config_of(), fault=mod)
    with pytest.raises(RunError, match="2 of 4 devices are left"):
        region.coordinator.train(train_request(THETA))
    gone.clear()
    region.coordinator.train(train_request(THETA))
    (tmp_path / "region" / "release-update.safetensors").unlink()
    with pytest.raises(RunError, match="0 of 4 devices are left"):
        region.restarted().train(train_request(THETA))
    with pytest.raises(RunError, match="0 of 4"):
        # A device forgets its session with its process, not what it has opened.
        for node in region.nodes.values():
            node.context.state.clear()
        region.restarted().train(train_request(THETA))


def test_noise_is_there_and_charged_as_the_least_that_may_be(tmp_path: Path) -> None:
    """The ledger's event: who drew it, the sensitivity of rounded sums, the planned multiplier."""
    config = config_of(privacy_mode="dp", rho_every=0, examples_per_client=2000)
    region = Region(tmp_path, config)
    for script in region.scripts:
        script.profile = lambda _: ProfileReply(1000)
    update = region.coordinator.train(train_request(THETA))
    size, event = region.ledger()
    said = "4 of 4 devices drew their shares; at most 1 may drop out and 0 collude"
    assert size["drawn"] == event["drawn"] == f"distributed noise: {said}"
    mechanism = region.plan.update
    assert event["noise_multiplier"] == mechanism.noise_multiplier > 0.0
    for part in mechanism.parts:
        assert part.bound < event["sensitivity"][part.name] < 1.05 * part.bound
    z = mechanism.parts[0].noise_multiplier
    most = z * event["sensitivity"]["update"] * math.sqrt(4 / 3)
    assert update.update_noise_std == pytest.approx(most / (0.5 * update.examples), rel=1e-6)
    total = sum(torch.linspace(-1.0, float(i), P) for i in range(DEVICES))
    noise = update.update * 0.5 * update.examples - torch.as_tensor(total)
    assert 0.05 * most < float(noise.std()) < 5.0 * most


@pytest.mark.parametrize(
    ("step", "gone"),
    [("mask", 0), ("mask", 1), ("mask", 2), ("mask", 3), ("agree", 3), ("unmask", 3)],
)
def test_drop_outs_leave_at_least_the_noise_that_is_accounted(
    tmp_path: Path, step: str, gone: int
) -> None:
    """D4: up to D = 3 of ten, at any step, in what is released: chi-square.

    The ledger counts on n - D - K = 6 shares of the noise; so many more are there as came.
    """
    p = 20_000
    config = config_of(
        privacy_mode="dp",
        noise_multiplier=2.0,
        target_epsilon=4.0,
        rho_every=0,
        examples_per_client=2000,
    )
    fault = fails_at(f"secure.{step}", set(range(gone)))
    region = Region(tmp_path, config, devices=10, fault=fault)
    zeros = GradientReply(torch.zeros(p), torch.zeros(8), 0.0)
    for script in region.scripts:
        script.profile = lambda _: ProfileReply(1000)
        script.gradient = lambda _: zeros
    update = region.coordinator.train(train_request(torch.zeros(p)))
    event = region.ledger()[-1]
    assert event["noise_multiplier"] == region.plan.update.noise_multiplier
    accounted = event["noise"]["update"] * event["sensitivity"]["update"]
    squares = float((update.update.double() * 0.5 * update.examples / accounted).square().sum())
    shares = 10 - (gone if step == "mask" else 0)
    low, high = stats.chi2.interval(1.0 - LEVEL, p)
    assert low < squares / (shares / 6) < high
    assert squares > stats.chi2.ppf(1.0 - LEVEL, p)  # more than what is accounted, for certain


def test_a_device_answers_in_the_open_no_more(tmp_path: Path) -> None:
    """Neither where the run asks for masks, nor where the device's own settings do."""
    reasons: list[str] = []
    for run, own in (("pairwise", "off"), ("off", "pairwise")):
        config = config_of(secure_aggregation=run)
        region = Region(tmp_path / run, config, node_config={"secure-aggregation": own})
        ledger = Ledger(tmp_path / run / "ledger.jsonl", config.delta, region.plan.budgets)
        grid = InProcessGrid(region.nodes, RUN_ID)
        curious = CentralSum(
            Devices(REGION, grid, DEVICES, ledger, reasons.append, tmp_path), config
        )
        question = Question(
            request=ProfileRequest(layout="layout"),
            reply=ProfileReply,
            dimensions={"labels": 0},
            mechanism=region.plan.size,
            parts={"examples": "size"},
            round=1,
            charged_to=0,
            must_answer=True,
        )
        with pytest.raises(RunError, match="none of its devices answered"):
            curious.released(list(region.nodes), question)
        assert all("only under secure aggregation" in reason for reason in reasons)
        assert not any(script.asked for script in region.scripts)


def test_every_exchange_that_is_summed_is_covered() -> None:
    gradients = {"train.gradient", "train.delta"}
    assert set(SUMMED) == {*gradients, "evaluate.loss", "evaluate.metrics", "query.profile"}


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("train.gradient", {"clip_norm": 1e9}),
        ("train.gradient", {"loss_cap": 1e9}),
        ("train.gradient", {"sampling_rate": 1.0}),
        ("train.gradient", {"round": 2}),
        ("evaluate.loss", {"clip_norm": 1e9}),
        ("evaluate.loss", {"as_one": True}),
        ("evaluate.metrics", {"as_one": True}),
    ],
    ids=str,
)
def test_a_request_for_more_than_was_agreed_is_refused(
    tmp_path: Path, kind: str, changed: dict[str, Any]
) -> None:
    """As a lying coordinator would ask: then one example moves a sum by more than its bound."""

    def lie(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if "secure.mask" in message.content and message.metadata.message_type == kind:
            message.content.config_records["config"].update(changed)
        return call_next(message, context)

    region = Region(tmp_path, config_of(evaluate_every=1), fault=lie)
    with pytest.raises(RunError, match="0 of 4 devices are left"):
        region.coordinator.train(train_request(THETA))
        region.coordinator.personalise(personalise_request(THETA, torch.full((P,), 0.5)))


@pytest.mark.parametrize("field", range(3), ids=["total", "loss", "sketch"])
def test_terms_with_less_noise_than_a_bound_needs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: int
) -> None:
    """Noise is as large as the bound that terms state: it has to be the one that is clipped to."""
    honest = SecureSum._terms

    def dishonest(self: SecureSum, question: Question) -> Terms:
        terms = honest(self, question)
        if question.reply is GradientReply:
            terms.bounds[field] *= 0.5
        return terms

    monkeypatch.setattr(SecureSum, "_terms", dishonest)
    with pytest.raises(RunError, match="0 of 4 devices are left"):
        Region(tmp_path, config_of()).coordinator.train(train_request(THETA))


def test_a_device_may_state_the_least_noise_that_it_answers_under(tmp_path: Path) -> None:
    config = config_of(privacy_mode="dp", rho_every=0)
    region = Region(tmp_path, config, node_config={"least-noise-multiplier": 1000.0})
    with pytest.raises(RunError, match="0 of 4 devices are left"):
        region.coordinator.train(train_request(THETA))


def test_a_registry_of_keys_admits_those_in_it_alone(tmp_path: Path) -> None:
    """And without one the keys that were seen first are kept."""
    seen = Region(tmp_path / "seen", config_of())
    seen.coordinator.train(train_request(THETA))
    peers = tmp_path / "seen" / "devices" / "0" / "peers.json"
    assert sorted(json.loads(peers.read_bytes())) == ["0", "1", "2", "3"]
    strangers = Region(tmp_path / "other", config_of(), node_config={"peer-keys": str(peers)})
    with pytest.raises(RunError, match="0 of 4 devices are left"):
        strangers.coordinator.train(train_request(THETA))
    assert not (tmp_path / "other" / "devices" / "0" / "peers.json").exists()


def test_a_device_that_is_replaced_is_left_out(tmp_path: Path) -> None:
    """Its new identity is not the pinned one: with one of four gone the region goes on."""
    region = Region(tmp_path, config_of())
    region.coordinator.train(train_request(THETA))
    (tmp_path / "devices" / "3" / "identity.key").unlink()
    update = region.coordinator.train(train_request(THETA, 2))
    total = sum(torch.linspace(-1.0, float(i), P) for i in range(3))
    assert torch.allclose(update.update * 0.5 * update.examples, torch.as_tensor(total), atol=1e-4)


def test_a_device_whose_reply_is_not_finite_costs_itself_alone(tmp_path: Path) -> None:
    """A4: the coordinator could not tell; the device's own check does."""
    region = Region(tmp_path, config_of())
    region.scripts[1].loss = lambda r: LossReply([0.0] * len(r.steps))
    records = encode(GradientReply(torch.zeros(P), torch.zeros(8), 0.0))
    bad = dict(records.metric_records["metrics"])
    records["metrics"] = type(records.metric_records["metrics"])({**bad, "loss": math.nan})
    region.scripts[1].gradient = lambda _: records
    update = region.coordinator.train(train_request(THETA))
    total = sum(torch.linspace(-1.0, float(i), P) for i in (0, 2, 3))
    assert torch.allclose(update.update * 0.5 * update.examples, torch.as_tensor(total), atol=1e-4)


def malformed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Send half of a masked vector."""
    reply = call_next(message, context)
    if context.node_config["partition-id"] == 0 and "arrays" in reply.content:
        from regionfed.secure_aggregation.messages import MaskReply

        half = np.zeros(3, np.uint32)
        return Message(encode(MaskReply(half)), reply_to=message)
    return reply


def test_a_malformed_masked_reply_costs_one_device(tmp_path: Path) -> None:
    region = Region(tmp_path, config_of(), fault=malformed)
    update = region.coordinator.train(train_request(THETA))
    assert update.examples == pytest.approx(6 + 7 + 8, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"unit": "client"}, "draw devices or clip a mean.*set unit='example'"),
        ({"unit": "region"}, "draw devices or clip a mean.*secure-aggregation='off'"),
        ({"unit": "example-in-mean", "conflict": "raw"}, "draw devices or clip a mean"),
        ({"tolerated_dropouts": 0.45, "tolerated_colluders": 0.2}, "must be less than 1"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        config_of(**settings)
