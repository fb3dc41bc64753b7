"""The conformance kit: sound apps pass, and each fault is found and explained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.func import functional_call

from client_app import app as ours
from client_app.conformance import CHECKS, Candidate, findings
from client_app.datasets.dataset import ClientData, DataConfig, Example
from regionfed.contract import (
    DeltaRequest,
    GradientReply,
    GradientRequest,
    LossRequest,
    ProfileReply,
    ProfileRequest,
    ScoreRequest,
    decode,
    encode,
)
from regionfed.errors import ConfigurationError
from regionfed.privacy.unit import clip
from regionfed.vector import Layout
from server_app.cli import check
from server_app.cli.main import main
from tests.conftest import ToyTask, tiny_config, toy_example

HERE = "tests.unit.server_app.cli.test_check"
CLIPS = "clips every example: no example counts for more than clip_norm"
SAMPLES = "draws a Poisson sample of sampling_rate"
AS_ONE = "answers as one: all its examples together count for no more than the bounds"


class Rows:
    """Numbers on one device."""

    regions = ("North",)
    tasks = ("toy",)
    labels = ("odd", "even")

    def label(self, example: Example) -> str:
        return self.labels[len(example.source) % 2]

    def clients(self, region: str) -> int:
        return 1

    def client(self, region: str, index: int) -> ClientData:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(12, 4, generator=generator).tolist()
        examples = tuple(toy_example(row[:3], row[3]) for row in rows)
        return ClientData(examples[:8], examples[8:])


def rows(config: DataConfig) -> Rows:
    return Rows()


def make_task(config: Any) -> ToyTask:
    return ToyTask(3)


class Dropout(ToyTask):
    """A task that left dropout on."""

    def losses(self, weights: Any, batch: Any) -> torch.Tensor:
        keep = (torch.rand(3) > 0.5).float()
        return super().losses(weights, {**batch, "x": batch["x"] * keep})


def candidate(
    folder: Path, app: ClientApp | None = None, task: str = "make_task", **settings: Any
) -> Candidate:
    settings = {"user_steps": 1, **settings}
    config = tiny_config(task=f"{HERE}:{task}", dataset=f"{HERE}:rows", **settings)
    made = check.candidate_of(check.OURS, config, None, 0, folder)
    return made if app is None else Candidate(**{**vars(made), "app": app})


def problems(made: Candidate) -> dict[str, str]:
    return {f.name: f.problem for f in findings(made) if f.problem}


def changed(**handlers: Any) -> ClientApp:
    """Return our app with some handlers in place of its own."""
    app = ClientApp()
    app.train("gradient")(handlers.get("gradient", ours.gradient))
    app.train("delta")(handlers.get("delta", ours.delta))
    app.train("adapt")(handlers.get("adapt", ours.adapt))
    app.evaluate("loss")(handlers.get("loss", ours.loss))
    app.evaluate("metrics")(handlers.get("metrics", ours.metrics))
    app.query("profile")(handlers.get("profile", ours.profile))
    return app


def asked(message: Any, kind: type = GradientRequest, **fields: Any) -> Any:
    """Return the message with a request that was changed on the way in."""
    request = decode(kind, message.content, {})
    message.content = encode(kind(**{**vars(request), **fields}))
    return message


def as_client(folder: Path, **handlers: Any) -> dict[str, str]:
    """Return what is found of an app where the unit is the client."""
    return problems(candidate(folder, changed(**handlers), unit="client", user_steps=0))


def answered(message: Any, context: Any, change: Any) -> Any:
    """Return our reply with its sum changed."""
    reply = ours.gradient(message, context)
    found = decode(GradientReply, reply.content, {})
    reply.content = encode(GradientReply(change(found.total), found.sketch, found.loss))
    return reply


@pytest.mark.parametrize("unit", ["example", "client"])
def test_ours_passes(tmp_path: Path, unit: str) -> None:
    """Every check, on a task of known gradients; each unit is asked what it asks in a run."""
    made = candidate(tmp_path, unit=unit, user_steps=int(unit == "example"))
    found = list(findings(made))
    assert [f for f in found if f.problem] == []
    names = {f.name for f in found}
    assert ("draws a Poisson sample of sampling_rate" in names) == (unit == "example")
    assert names <= {check.name for check in CHECKS}


def test_what_is_checked_is_what_masks_would_cover(tmp_path: Path) -> None:
    """Settings under which a device answers nobody in the open are no fault of its app's."""
    assert problems(candidate(tmp_path, secure_aggregation="pairwise")) == {}


@pytest.mark.parametrize(
    ("gradient", "name"),
    [
        (lambda m, c: answered(m, c, lambda g: -g), "its gradient is that of its loss"),
        (lambda m, c: answered(m, c, lambda g: g / 8.0), "its gradient is that of its loss"),
        (lambda m, c: answered(m, c, lambda g: g[:-1]), "its gradient has the model's shape"),
        (lambda m, c: answered(m, c, torch.zeros_like), "its gradient has the model's shape"),
        (lambda m, c: ours.gradient(asked(m, clip_norm=1e30), c), "clips every example"),
        (lambda m, c: ours.gradient(asked(m, sampling_rate=1.0), c), "draws a Poisson sample"),
        (
            lambda m, c: ours.gradient(
                asked(m, layout=Layout.of(torch.nn.Linear(3, 1)).fingerprint), c
            ),
            "refuses a vector of another model",
        ),
    ],
)
def test_a_wrong_gradient_is_found(tmp_path: Path, gradient: Any, name: str) -> None:
    """A sign, a mean, a length, zeros; no clip, no sample, another model's vector."""
    found = problems(candidate(tmp_path, changed(gradient=gradient)))
    assert any(said.startswith(name) for said in found), found


def sum_is_clipped(message: Any, context: Any) -> Any:
    """Clip the sum to as much as its examples may have together."""
    request = decode(GradientRequest, message.content, {})
    count = len(ours.Device.of(context).data.train)
    reply = ours.gradient(asked(message, clip_norm=1e30), context)
    found = decode(GradientReply, reply.content, {})
    bound = count * request.clip_norm
    total, sketch = (clip(vector, bound) for vector in (found.total, found.sketch))
    reply.content = encode(GradientReply(total, sketch, found.loss))
    return reply


def test_a_sum_that_is_clipped_instead_of_examples_is_found(tmp_path: Path) -> None:
    """Its norm is that of clipped examples; what a second example changes is not."""
    found = problems(candidate(tmp_path, changed(gradient=sum_is_clipped)))
    assert "a second example has norm" in found[CLIPS]


def fixed(message: Any, context: Any) -> Any:
    """Draw the same examples in each round."""
    return ours.gradient(asked(message, round=1), context)


def batch_of_four(message: Any, context: Any) -> Any:
    """Draw half of the examples, always as many."""
    request = decode(GradientRequest, message.content, {})
    task = ours.Device.of(context)
    if not 0.1 < request.sampling_rate < 1.0:
        return ours.gradient(message, context)
    half = len(task.data.train) // 2
    few = {**context.run_config, "dataset": f"client_app.datasets.few:{half}:{HERE}:rows"}
    context.run_config = few
    return ours.gradient(asked(message, sampling_rate=1.0), context)


@pytest.mark.parametrize(
    ("gradient", "said"),
    [
        (fixed, "always as many"),
        (batch_of_four, "always as many"),
        (lambda m, c: ours.gradient(asked_often(m), c), "not a half of them"),
        (lambda m, c: ours.gradient(one_coin(m), c), "one coin for all"),
    ],
)
def test_a_sample_that_is_no_poisson_sample_is_found(
    tmp_path: Path, gradient: Any, said: str
) -> None:
    """A fixed part, a fixed number, another rate, one coin for all."""
    assert said in problems(candidate(tmp_path, changed(gradient=gradient)))[SAMPLES]


def asked_often(message: Any) -> Any:
    """Draw nine of ten where a half is asked for."""
    rate = decode(GradientRequest, message.content, {}).sampling_rate
    return asked(message, sampling_rate=0.9 if rate == 0.5 else rate)


def one_coin(message: Any) -> Any:
    """Draw all examples or none."""
    request = decode(GradientRequest, message.content, {})
    rate = {0.5: float(request.round % 2)}.get(request.sampling_rate, request.sampling_rate)
    return asked(message, sampling_rate=rate or 1e-12)


def test_the_first_examples_are_no_sample(tmp_path: Path) -> None:
    """Their number varies as a sample's does; who they are depends on it alone."""

    def first(message: Any, context: Any) -> Any:
        if decode(GradientRequest, message.content, {}).sampling_rate == 0.5:
            device = ours.Device.of(context)
            count = len(device.poisson_sample(0.5, request_round(message), "count"))
            context.run_config = {
                **context.run_config, "dataset": f"client_app.datasets.few:{count}:{HERE}:rows"
            }  # fmt: skip
            message = asked(message, sampling_rate=1.0)
        return ours.gradient(message, context)

    def request_round(message: Any) -> int:
        return decode(GradientRequest, message.content, {}).round

    found = problems(candidate(tmp_path, changed(gradient=first)))
    assert "always the same ones" in found[SAMPLES]


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"clip_norm": 1e30}, CLIPS, "loss differences"),
        ({"sampling_rate": 1.0}, SAMPLES, "next to nothing, it has loss differences"),
        ({"round": 1}, SAMPLES, "loss differences of 16 rounds"),
    ],
)
def test_wrong_loss_differences_are_found(
    tmp_path: Path, fields: dict[str, Any], name: str, said: str
) -> None:
    """Neither clipped, nor sampled, nor sampled anew."""
    app = changed(loss=lambda m, c: ours.loss(asked(m, LossRequest, **fields), c))
    assert said in problems(candidate(tmp_path, app))[name]


def test_a_loss_beyond_its_cap_is_found(tmp_path: Path) -> None:
    """The loss is a release like others."""
    app = changed(gradient=lambda m, c: ours.gradient(asked(m, loss_cap=8.0), c))
    assert "the loss of 8 examples" in problems(candidate(tmp_path, app))[CLIPS]


@pytest.mark.parametrize(
    ("handler", "kind", "fields", "said"),
    [
        ("delta", DeltaRequest, {"clip_norm": 1e30}, "the gradient of all examples"),
        ("delta", DeltaRequest, {"loss_cap": 8.0}, "the loss of all examples"),
        ("loss", LossRequest, {"clip_norm": 1e30}, "loss differences of all examples"),
        ("metrics", ScoreRequest, {"as_one": False}, "its held-out examples count for 4"),
        ("profile", ProfileRequest, {"most": 0}, "told to count for one example"),
    ],
)
def test_a_device_that_does_not_answer_as_one_is_found(
    tmp_path: Path, handler: str, kind: type, fields: dict[str, Any], said: str
) -> None:
    """Where the unit is the client: no bound holds for all of its examples together."""
    answer = getattr(ours, handler)
    found = as_client(tmp_path, **{handler: lambda m, c: answer(asked(m, kind, **fields), c)})
    assert said in found[AS_ONE]


def test_steps_that_point_down_the_loss_are_found(tmp_path: Path) -> None:
    """End minus start: the other sign."""

    def delta(message: Any, context: Any) -> Any:
        reply = ours.delta(message, context)
        found = decode(GradientReply, reply.content, {})
        reply.content = encode(GradientReply(-found.total, found.sketch, found.loss))
        return reply

    found = as_client(tmp_path, delta=delta)
    assert (
        "should point up its loss"
        in found["its steps have the model's shape, and go down its loss"]
    )


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (ProfileReply(0, [0.0, 0.0]), "it has 0 examples"),
        (ProfileReply(8, [8.0, 8.0]), "its labels count for 16 examples; at most 8"),
        (ProfileReply(8, [9.0, -1.0]), "none below 0"),
        (ProfileReply(8), "expected 2 numbers"),
    ],
)
def test_a_wrong_profile_is_found(tmp_path: Path, reply: ProfileReply, said: str) -> None:
    """No example, labels that count twice or that were not told: a finding, no traceback."""

    def profile(message: Any, context: Any) -> Any:
        return Message(encode(reply), reply_to=message)

    found = problems(candidate(tmp_path, changed(profile=profile)))
    assert said in found["says how many training examples it has"]


@pytest.mark.parametrize("handler", ["gradient", "loss", "metrics", "profile", "adapt"])
def test_a_handler_that_returns_no_message_is_found(tmp_path: Path, handler: str) -> None:
    """None, for one that forgot to reply."""
    found = problems(candidate(tmp_path, changed(**{handler: lambda message, context: None})))
    assert any("NoneType, not a flwr.app.Message" in said for said in found.values()), found


def test_a_user_s_scores_that_leave_are_found(tmp_path: Path) -> None:
    """A device that answers with_user although its settings forbid that."""

    def metrics(message: Any, context: Any) -> Any:
        context.run_config = {
            **context.run_config, "user-scores": "panel", "evaluation-privacy": "panel"
        }  # fmt: skip
        return ours.metrics(message, context)

    found = problems(candidate(tmp_path, changed(metrics=metrics)))
    assert "it told them" in found["nothing of its user's own model leaves"]


def test_an_adaptation_that_tells_something_is_found(tmp_path: Path) -> None:
    """The reply to `train.adapt` is empty."""

    def adapt(message: Any, context: Any) -> Any:
        reply = ours.adapt(message, context)
        reply.content = encode(GradientReply(torch.ones(4), torch.zeros(0), 0.0))
        return reply

    assert "nothing of its user's own model leaves" in problems(
        candidate(tmp_path, changed(adapt=adapt))
    )


def test_a_task_that_draws_lots_is_found(tmp_path: Path) -> None:
    """Dropout that was left on."""
    found = problems(candidate(tmp_path, task="make_broken"))
    assert "equal questions have equal answers" in found


def test_the_command_explains_a_failure_and_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was found, and how to mend it."""
    settings = f'dataset="{HERE}:rows" user-steps=1 trainable=""'
    assert main(["check", f"{HERE}:make_task", "--run-config", settings]) == 0
    assert capsys.readouterr().out.endswith("keeps the contract\n")
    assert main(["check", f"{HERE}:make_broken", "--run-config", settings]) == 1
    said = capsys.readouterr().out
    assert "FAILED equal questions have equal answers" in said and "dropout" in said


class Aside(nn.Linear):
    """A block that leaves part of what it says in itself, as a router does its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aside = y.square().sum(-1)
        return y


class LosesGradient(ToyTask):
    """A loss of which a part takes another way than through what its block returns."""

    def __init__(self) -> None:
        super().__init__(3, module=nn.ModuleList([Aside(3, 1)]))

    def losses(self, weights: Any, batch: Any) -> torch.Tensor:
        module = _Called(self.module)
        named = {f"blocks.{name}": weight for name, weight in weights.items()}
        found: torch.Tensor = functional_call(module, named, (batch["x"],))
        return found


class _Called(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks: Any = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor = self.blocks[0](x)[:, 0].square()
        return said + 3.0 * self.blocks[0].aside


def make_aside(config: Any) -> LosesGradient:
    return LosesGradient()


@pytest.mark.parametrize("on", [False, True])
def test_a_block_that_cannot_be_recomputed_is_found(tmp_path: Path, on: bool) -> None:
    """A tensor that its block does not return has no gradient where blocks recompute."""
    found = problems(candidate(tmp_path, task="make_aside", gradient_checkpointing=on))
    assert ("its gradient is that of its loss" in found) == on


def make_broken(config: Any) -> Dropout:
    return Dropout(3)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "package.module:attribute"),
        ("no.such.module:app", "cannot be loaded"),
        (f"{HERE}:HERE", "is a str"),
    ],
)
def test_what_cannot_be_checked_is_refused(target: str, said: str) -> None:
    """The error says what to give."""
    with pytest.raises(ConfigurationError, match=said):
        check._subject(target, tiny_config())
