"""The conformance kit: sound apps pass, and each fault is found and explained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.clientapp import ClientApp

from client_app import app as ours
from client_app.conformance import Candidate, findings
from client_app.datasets.dataset import ClientData, DataConfig
from regionfed.contract import GradientReply, GradientRequest, decode, encode
from regionfed.errors import ConfigurationError
from regionfed.vector import Layout
from server_app.cli import check
from server_app.cli.main import main
from tests.conftest import ToyTask, tiny_config, toy_example

HERE = "tests.unit.server_app.cli.test_check"


class Rows:
    """Numbers on one device."""

    regions = ("North",)
    tasks = ("toy",)

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
    config = tiny_config(task=f"{HERE}:{task}", dataset=f"{HERE}:rows", user_steps=1, **settings)
    made = check.candidate_of(check.OURS, config, None, 0, folder)
    return made if app is None else Candidate(**{**vars(made), "app": app})


def problems(made: Candidate) -> dict[str, str]:
    return {f.name: f.problem for f in findings(made) if f.problem}


def changed(**handlers: Any) -> ClientApp:
    """Return our app with some handlers in place of its own."""
    app = ClientApp()
    app.train("gradient")(handlers.get("gradient", ours.gradient))
    app.train("adapt")(handlers.get("adapt", ours.adapt))
    app.evaluate("loss")(handlers.get("loss", ours.loss))
    app.evaluate("metrics")(handlers.get("metrics", ours.metrics))
    app.query("profile")(handlers.get("profile", ours.profile))
    return app


def asked(message: Any, **fields: Any) -> Any:
    """Return the message with a request that was changed on the way in."""
    request = decode(GradientRequest, message.content, {})
    message.content = encode(GradientRequest(**{**vars(request), **fields}))
    return message


def answered(message: Any, context: Any, change: Any) -> Any:
    """Return our reply with its sum changed."""
    reply = ours.gradient(message, context)
    found = decode(GradientReply, reply.content, {})
    reply.content = encode(GradientReply(change(found.total), found.sketch, found.loss))
    return reply


def test_ours_passes(tmp_path: Path) -> None:
    """Every check, on a task of known gradients."""
    assert problems(candidate(tmp_path)) == {}


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
