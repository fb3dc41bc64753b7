"""Does a ClientApp keep the contract? Checks that ask it what a coordinator asks, and more.

The app is a black box: it gets messages and its replies are looked at, as in a run. Each check that
fails says what is wrong and how to mend it.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.datasets.few import few
from regionfed.config import Config
from regionfed.contract import (
    AdaptReply,
    AdaptRequest,
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    ProfileReply,
    ProfileRequest,
    ScoreReply,
    ScoreRequest,
    decode,
    encode,
    message_type,
)
from regionfed.errors import ContractError, RegionFedError
from regionfed.flower import delivered, ensure_identity
from regionfed.privacy.units import UNCLIPPED
from regionfed.vector import Layout

R = TypeVar("R")

_SKETCH = 16
_CAP = 8.0
# So rare that no example of any device is drawn.
_NEVER = 1e-12
_ROUNDING = 1e-4


class Failed(Exception):  # noqa: N818 - what a check finds, not an error of this program
    """What is wrong with an app."""


@dataclass(frozen=True)
class Check:
    """One thing that is asked of an app.

    Attributes
    ----------
    name : str
        What holds if it passes.
    remedy : str
        What to do if it does not.
    run : callable
        Raises `Failed`, or whatever the app's reply raises.
    """

    name: str
    remedy: str
    run: Callable[["Candidate"], None]


@dataclass(frozen=True)
class Finding:
    """What came of a check: its problem is empty if it passed."""

    name: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Candidate:
    """An app at one device, and what the coordinator knows of its model.

    Attributes
    ----------
    app : ClientApp
    config : Config
        Its noise is seeded, so that two equal questions can have equal answers.
    layout, point : Layout, torch.Tensor
        Of the server's model, (p,).
    tasks : tuple of str
    region, index : str, int
        The device.
    folder : Path
        Where it may keep its user's model.
    """

    app: ClientApp
    config: Config
    layout: Layout
    point: torch.Tensor
    tasks: tuple[str, ...]
    region: str
    index: int
    folder: Path

    def ask(self, request: object, reply: type[R]) -> R:
        """Return the app's reply, read as a coordinator would read it.

        Raises
        ------
        Failed
            If it answers with an error, or raises.
        ContractError
            If the reply does not keep the contract.
        """
        return decode(reply, self.answer(request), self._lengths(request))

    def answer(self, request: object) -> RecordDict:
        """Return the records that the app replies with."""
        ensure_identity(1)
        message = Message(encode(request), dst_node_id=1, message_type=message_type(request))
        context = Context(
            run_id=1,
            node_id=1,
            node_config={
                "region": self.region,
                "partition-id": self.index,
                "state-folder": str(self.folder),
            },
            state=RecordDict(),
            run_config=dict(self.config.to_run_config()),
        )
        try:
            answer = self.app(delivered(message), context)
        except Exception as error:  # whatever it raises is what is wrong
            raise Failed(f"it raises {type(error).__name__}: {error}") from error
        if answer.has_error():
            raise Failed(f"it answers with an error: {answer.error.reason}")
        return answer.content

    def _lengths(self, request: object) -> dict[str, int]:
        steps = getattr(request, "steps", None)
        columns = 4 if getattr(request, "with_user", False) else 3
        return {
            "p": self.layout.size,
            "k": getattr(request, "sketch_size", 0),
            "steps": len(steps) if isinstance(steps, list) else 0,
            "labels": getattr(request, "labels", 0),
            "columns*tasks": columns * len(self.tasks),
        }

    def gradient(self, **changed: Any) -> GradientReply:
        """Ask for the gradient of all examples, unclipped, unless told otherwise."""
        return self.ask(self.gradient_request(**changed), GradientReply)

    def gradient_request(self, **changed: Any) -> GradientRequest:
        """Return that question."""
        request = GradientRequest(
            round=1,
            layout=self.layout.fingerprint,
            sampling_rate=1.0,
            clip_norm=UNCLIPPED,
            loss_cap=_CAP,
            sketch_seed=0,
            sketch_size=_SKETCH,
            point=self.point,
        )
        return replace(request, **changed)

    def losses(self, direction: torch.Tensor, steps: list[float]) -> list[float]:
        """Ask for summed losses along a direction, less that at its start."""
        request = LossRequest(
            round=1,
            layout=self.layout.fingerprint,
            sampling_rate=1.0,
            clip_norm=UNCLIPPED,
            steps=steps,
            base=self.point,
            direction=direction,
        )
        return self.ask(request, LossReply).differences

    def scores(self, *, with_user: bool = False) -> list[float]:
        """Ask for scores of the model, twice."""
        request = ScoreRequest(1, self.layout.fingerprint, with_user, self.point, self.point)
        return self.ask(request, ScoreReply).scores

    def examples(self) -> int:
        """Ask how many training examples there are."""
        return self.ask(ProfileRequest(self.layout.fingerprint), ProfileReply).examples

    def adapt(self) -> RecordDict:
        """Let it make its user's own part."""
        return self.answer(
            AdaptRequest(
                round=1,
                layout=self.layout.fingerprint,
                steps=2,
                learning_rate=1e-3,
                clip_norm=1.0,
                alpha_min=0.5,
                alpha_gain=1.0,
                update_noise_std=0.1,
                personalised=self.point,
                update=torch.zeros(self.layout.size),
            )
        )

    def with_examples(self, count: int) -> "Candidate":
        """Return the same device with at most this many examples."""
        return replace(self, config=replace(self.config, dataset=few(count, self.config.dataset)))


# The checks ---------------------------------------------------------------------------------


def _size(candidate: Candidate) -> None:
    if (count := candidate.examples()) < 1:
        raise Failed(f"device {candidate.index} of {candidate.region} says it has {count} examples")


def _gradient(candidate: Candidate) -> None:
    reply = candidate.gradient()
    if not bool(reply.total.any()):
        raise Failed("the gradient of all examples is zero")
    if reply.loss < 0.0:
        raise Failed(f"the summed loss is {reply.loss:g}")


def _deterministic(candidate: Candidate) -> None:
    one, other = candidate.gradient(), candidate.gradient()
    if not torch.equal(one.total, other.total):
        gap = float((one.total - other.total).norm() / one.total.norm().clamp(min=1e-12))
        raise Failed(f"two equal questions got gradients that differ by {gap:.2g} of their norm")
    if candidate.losses(one.total, [1e-3]) != candidate.losses(one.total, [1e-3]):
        raise Failed("two equal questions got different losses")


def _finite_differences(candidate: Candidate) -> None:
    total = candidate.gradient().total
    norm = float(total.double().norm())
    direction = total / norm
    slopes = {}
    # A step that is too long sees curvature, one that is too short rounding: the best of three.
    for step in (1e-1, 1e-2, 1e-3):
        ahead, behind = candidate.losses(direction, [step, -step])
        slopes[step] = (ahead - behind) / (2.0 * step)
    nearest = min(slopes.values(), key=lambda slope: abs(slope - norm))
    if abs(nearest - norm) > 0.05 * norm:
        found = ", ".join(f"{slope:.4g} (step {step:g})" for step, slope in slopes.items())
        raise Failed(
            f"along the gradient the loss should rise by {norm:.4g} a unit; it does {found}"
        )


def _clipped(candidate: Candidate) -> None:
    count = candidate.examples()
    # Far below any example's own norm, so that clipping has to act.
    bound = 1e-4 * float(candidate.gradient().total.norm()) / count
    reply = candidate.gradient(clip_norm=bound)
    for name, vector in (("total", reply.total), ("sketch", reply.sketch)):
        if float(vector.double().norm()) > count * bound * (1.0 + _ROUNDING):
            raise Failed(
                f"with clip_norm {bound:.3g} the {name} of {count} examples has norm "
                f"{float(vector.norm()):.3g}; at most {count * bound:.3g}"
            )


def _sampled(candidate: Candidate) -> None:
    reply = candidate.gradient(sampling_rate=_NEVER)
    if bool(reply.total.any()) or bool(reply.sketch.any()) or reply.loss:
        raise Failed("with a sampling rate of next to nothing, its gradient is not zero")


def _scored(candidate: Candidate) -> None:
    rows = candidate.scores()
    for task, count, global_, own in zip(
        candidate.tasks, rows[0::3], rows[1::3], rows[2::3], strict=True
    ):
        if not all(0.0 <= score <= count for score in (global_, own)):
            raise Failed(f"{task}: sums {global_:g} and {own:g} of {count:g} scores in [0, 1]")
        if global_ != own:
            raise Failed(f"{task}: one model scored twice has {global_:g} and {own:g}")


def _layout(candidate: Candidate) -> None:
    with suppress(Failed):
        candidate.answer(candidate.gradient_request(layout="another model"))
        raise ContractError("it took a vector of another model's layout for its own")


def _user_stays(candidate: Candidate) -> None:
    before = candidate.gradient()
    scores = candidate.scores()
    decode(AdaptReply, candidate.adapt(), {})
    after = candidate.gradient()
    if not torch.equal(before.total, after.total) or candidate.scores() != scores:
        raise Failed("what it answers to others has changed with its user's own model")
    if candidate.config.user_scores == "device":
        with suppress(Failed):
            candidate.answer(
                ScoreRequest(
                    1, candidate.layout.fingerprint, True, candidate.point, candidate.point
                )
            )
            raise ContractError("asked for its user's own scores, it told them")


def _one_example(candidate: Candidate) -> None:
    one = candidate.with_examples(1)
    if (count := one.examples()) > 1:
        raise Failed(f"its dataset has one example; it says {count}")
    bound = 1e-3
    norm = float(one.gradient(clip_norm=bound).total.double().norm())
    if norm > bound * (1.0 + _ROUNDING):
        raise Failed(f"one example with clip_norm {bound:g} has a gradient of norm {norm:.3g}")
    one.scores()
    decode(AdaptReply, one.adapt(), {})


def _no_example(candidate: Candidate) -> None:
    empty = candidate.with_examples(0)
    if (count := empty.examples()) != 0:
        raise Failed(f"its dataset has no example; it says {count}")
    reply = empty.gradient()
    if bool(reply.total.any()) or reply.loss:
        raise Failed("without an example its gradient is not zero")
    if any(empty.losses(torch.ones(empty.layout.size), [0.1])) or any(empty.scores()):
        raise Failed("without an example it has losses or scores")
    decode(AdaptReply, empty.adapt(), {})


CHECKS: tuple[Check, ...] = (
    Check(
        "says how many training examples it has",
        "answer `query.profile` with ProfileReply(len(train)).",
        _size,
    ),
    Check(
        "its gradient has the model's shape, and is finite",
        "answer `train.gradient` with GradientReply: the sum over examples as a float32 vector in "
        "the order of regionfed.vector.Layout.of(model), and a sketch of `sketch_size`.",
        _gradient,
    ),
    Check(
        "equal questions have equal answers",
        "put the model into eval mode (dropout, batch statistics), and draw nothing from global "
        "random state.",
        _deterministic,
    ),
    Check(
        "its gradient is that of its loss",
        "`train.gradient` sums gradients, `evaluate.loss` losses, of the same examples: neither a "
        "mean, nor the opposite sign (a gradient points up the loss), nor another loss.",
        _finite_differences,
    ),
    Check(
        "clips every example: no example counts for more than clip_norm",
        "clip each example's whole gradient to clip_norm before summing, and its sketch again "
        "(client_app.gradients.clipped_sums does both). Without this there is no privacy.",
        _clipped,
    ),
    Check(
        "draws a Poisson sample of sampling_rate",
        "take each example with chance `sampling_rate`, by coins of its own "
        "(regionfed.randomness.randomness_source): epsilon counts on it.",
        _sampled,
    ),
    Check(
        "scores both models on held-out examples",
        "answer `evaluate.metrics` with count, global sum, personalised sum for each task; an "
        "example's score is in [0, 1].",
        _scored,
    ),
    Check(
        "refuses a vector of another model",
        "compare the request's `layout` with your Layout.fingerprint, and raise ContractError.",
        _layout,
    ),
    Check(
        "nothing of its user's own model leaves",
        "answer `train.adapt` with an empty AdaptReply, keep the part on the device, and never "
        "add it to the model that others ask about; refuse `with_user`.",
        _user_stays,
    ),
    Check(
        "bears a device with one example",
        "every sum is right for one example, too: no variance of one, no split of it. (A ClientApp "
        "must read the setting `dataset` for this check.)",
        _one_example,
    ),
    Check(
        "bears a device with no example",
        "all sums are zero, of the right length; divide by nothing. (A ClientApp must read the "
        "setting `dataset` for this check.)",
        _no_example,
    ),
)


def findings(candidate: Candidate) -> Iterator[Finding]:
    """Run every check and yield what came of it."""
    for check in CHECKS:
        yield Finding(check.name, _problem(check, candidate), check.remedy)


def _problem(check: Check, candidate: Candidate) -> str:
    try:
        check.run(candidate)
    except Failed as failed:
        return str(failed)
    except RegionFedError as error:
        return str(error)
    return ""
