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
    DeltaRequest,
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
from regionfed.privacy.units import UNCLIPPED, UNITS
from regionfed.vector import Layout

R = TypeVar("R")

_SKETCH = 16
_CAP = 8.0
# So low that any example's loss is above it.
_SPECK = 1e-6
# So rare that no example of any device is drawn.
_NEVER = 1e-12
_ROUNDING = 1e-4
# What an example's neighbours in a batch may change of its own part.
_BATCHING = 1e-2
# Rounds in which samples are looked at, and the examples that they are drawn from: few enough to be
# quick, and enough that a true sample passes for a false one in less than one of 10,000 checks.
_DRAWS = 16
_FEW = 8


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
    labels : int
        How many labels the dataset states.
    """

    app: ClientApp
    config: Config
    layout: Layout
    point: torch.Tensor
    tasks: tuple[str, ...]
    region: str
    index: int
    folder: Path
    labels: int = 0

    @property
    def as_one(self) -> bool:
        """Whether the unit of privacy has a device answer as one."""
        return UNITS[self.config.unit].as_one

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
        if not isinstance(answer, Message):
            raise Failed(f"it returns a {type(answer).__name__}, not a flwr.app.Message")
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

    def update(self, **changed: Any) -> GradientReply:
        """Ask for the gradient, or the steps, of all examples, unclipped, unless told otherwise."""
        return self.ask(self.update_request(**changed), GradientReply)

    def update_request(self, **changed: Any) -> GradientRequest | DeltaRequest:
        """Return that question, as a round puts it where the unit is this one."""
        config = self.config
        asked = {
            "round": 1,
            "layout": self.layout.fingerprint,
            "clip_norm": UNCLIPPED,
            "loss_cap": _CAP,
            "sketch_seed": 0,
            "sketch_size": _SKETCH,
            "point": self.point,
        }
        if not self.as_one:
            return GradientRequest(**{**asked, "sampling_rate": 1.0, **changed})
        steps = {
            "steps": config.client_steps,
            "learning_rate": config.client_lr,
            "optimiser": config.client_optimiser,
        }
        return DeltaRequest(**{**asked, **steps, **changed})

    def losses(self, direction: torch.Tensor, steps: list[float], **changed: Any) -> list[float]:
        """Ask for losses along a direction, less that at its start: of all examples, unclipped."""
        request = LossRequest(
            round=1,
            layout=self.layout.fingerprint,
            sampling_rate=1.0,
            clip_norm=UNCLIPPED,
            steps=steps,
            base=self.point,
            direction=direction,
            as_one=self.as_one,
        )
        return self.ask(replace(request, **changed), LossReply).differences

    def scores(self, *, with_user: bool = False) -> list[float]:
        """Ask for scores of the model, twice."""
        request = ScoreRequest(
            1, self.layout.fingerprint, with_user, self.point, self.point, self.as_one
        )
        return self.ask(request, ScoreReply).scores

    def profile(self, most: int = 0) -> ProfileReply:
        """Ask how many training examples there are, of which labels if the dataset states any."""
        return self.ask(
            ProfileRequest(self.layout.fingerprint, labels=self.labels, most=most), ProfileReply
        )

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
    reply = candidate.profile()
    if reply.examples < 1:
        raise Failed(
            f"device {candidate.index} of {candidate.region} says it has {reply.examples} examples"
        )
    _labels_within(reply, reply.examples)


def _labels_within(reply: ProfileReply, bound: float) -> None:
    total = sum(reply.histogram)
    if total > bound * (1.0 + _ROUNDING) or any(count < 0.0 for count in reply.histogram):
        raise Failed(f"its labels count for {total:g} examples; at most {bound:g}, none below 0")


def _gradient(candidate: Candidate) -> None:
    _direction(candidate)


def _direction(candidate: Candidate) -> torch.Tensor:
    """Return the direction of what it answers with all examples."""
    total = candidate.update().total
    if not bool(total.any()):
        raise Failed("what it answers with all examples is zero")
    return total / float(total.double().norm())


def _deterministic(candidate: Candidate) -> None:
    one, other = candidate.update(), candidate.update()
    if not torch.equal(one.total, other.total):
        gap = float((one.total - other.total).norm() / one.total.norm().clamp(min=1e-12))
        raise Failed(f"two equal questions got vectors that differ by {gap:.2g} of their norm")
    if candidate.losses(one.total, [1e-3]) != candidate.losses(one.total, [1e-3]):
        raise Failed("two equal questions got different losses")


def _finite_differences(candidate: Candidate) -> None:
    direction = _direction(candidate)
    norm = float(candidate.update().total.double().norm())
    slopes = _slopes(candidate, direction)
    nearest = min(slopes.values(), key=lambda slope: abs(slope - norm))
    if abs(nearest - norm) > 0.05 * norm:
        found = ", ".join(f"{slope:.4g} (step {step:g})" for step, slope in slopes.items())
        raise Failed(
            f"along the gradient the loss should rise by {norm:.4g} a unit; it does {found}"
        )


def _slopes(candidate: Candidate, direction: torch.Tensor) -> dict[float, float]:
    """Return how its loss rises along a direction, by the step that it is measured with.

    A step that is too long sees curvature, one that is too short rounding.
    """
    slopes = {}
    for step in (1e-1, 1e-2, 1e-3):
        ahead, behind = candidate.losses(direction, [step, -step])
        slopes[step] = (ahead - behind) / (2.0 * step)
    return slopes


def _goes_down(candidate: Candidate) -> None:
    slopes = _slopes(candidate, _direction(candidate))
    if max(slopes.values()) <= 0.0:
        raise Failed(
            "start minus end of its steps should point up its loss, which falls that way: by "
            f"{-max(slopes.values()):.4g} a unit at least"
        )


def _bounded(what: str, vector: torch.Tensor, bound: float, slack: float = _ROUNDING) -> None:
    norm = float(vector.double().norm())
    if norm > bound * (1.0 + slack):
        raise Failed(f"{what} has norm {norm:.3g}; at most {bound:.3g}")


@dataclass(frozen=True)
class Sums:
    """What a device says under tight bounds, all of it."""

    total: torch.Tensor
    sketch: torch.Tensor
    votes: torch.Tensor
    loss: torch.Tensor

    @classmethod
    def of(
        cls, candidate: Candidate, direction: torch.Tensor, bound: float, **changed: Any
    ) -> "Sums":
        """Ask for it."""
        reply = candidate.update(clip_norm=bound, loss_cap=_SPECK, **changed)
        if reply.loss < 0.0:
            raise Failed(f"the loss is {reply.loss:g}")
        votes = candidate.losses(direction, [0.1, 1.0], clip_norm=bound)
        return cls(reply.total, reply.sketch, torch.tensor(votes), torch.tensor([reply.loss]))

    def within(self, what: str, bound: float, cap: float, slack: float = _ROUNDING) -> None:
        """Refuse vectors beyond the bound, or a loss beyond the cap."""
        _bounded(f"the gradient of {what}", self.total, bound, slack)
        _bounded(f"the sketch of {what}", self.sketch, bound, slack)
        _bounded(f"the vector of loss differences of {what}", self.votes, bound, slack)
        _bounded(f"the loss of {what}", self.loss, cap, slack)

    def less(self, other: "Sums") -> "Sums":
        """Return what is said beyond another."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Sums(*(mine - others for mine, others in pairs))


def _tight(candidate: Candidate) -> float:
    """Return a clip norm far below any example's own, so that clipping has to act."""
    count = max(candidate.profile().examples, 1)
    return 1e-4 * float(candidate.update().total.double().norm()) / count or _SPECK


def _clipped(candidate: Candidate) -> None:
    direction, bound = _direction(candidate), _tight(candidate)
    count = candidate.profile().examples
    Sums.of(candidate, direction, bound).within(
        f"{count} examples with clip_norm {bound:.3g} and loss_cap {_SPECK:g}",
        count * bound,
        count * _SPECK,
    )
    one, two = (Sums.of(candidate.with_examples(count), direction, bound) for count in (1, 2))
    one.within("one example", bound, _SPECK)
    two.less(one).within("a second example", bound, _SPECK, _BATCHING)


def _sampled(candidate: Candidate) -> None:
    direction = _direction(candidate)
    none = candidate.update(sampling_rate=_NEVER)
    if bool(none.total.any()) or bool(none.sketch.any()) or none.loss:
        raise Failed("with a sampling rate of next to nothing, its gradient is not zero")
    if any(candidate.losses(direction, [0.1], sampling_rate=_NEVER)):
        raise Failed("with a sampling rate of next to nothing, it has loss differences")
    few = candidate.with_examples(_FEW)
    everyone = _drawn(few.update(loss_cap=_SPECK))
    half = {"sampling_rate": 0.5}
    rounds = range(1, _DRAWS + 1)
    replies = [few.update(round=number, loss_cap=_SPECK, **half) for number in rounds]
    _poisson(everyone, replies)
    votes = [few.losses(direction, [0.1], round=number, **half) for number in rounds]
    if all(vote == votes[0] for vote in votes):
        raise Failed(f"loss differences of {_DRAWS} rounds, each of half of the examples, are one")


def _drawn(reply: GradientReply) -> int:
    """Return how many examples an answer is of: each has a loss of just the cap."""
    return round(reply.loss / _SPECK)


def _poisson(everyone: int, replies: list[GradientReply]) -> None:
    """Refuse samples at a rate of a half that independent coins would not draw."""
    counts = [_drawn(reply) for reply in replies]
    said = f"at a rate of 0.5 it drew {counts} of {everyone} examples"
    if len(set(counts)) == 1:
        raise Failed(f"{said}: always as many, which no Poisson sample does")
    mean = len(counts) * everyone / 2.0
    if abs(sum(counts) - mean) > 6.0 * (mean / 2.0) ** 0.5:
        raise Failed(f"{said}: not a half of them")
    if everyone > 1 and set(counts) <= {0, everyone}:
        raise Failed(f"{said}: one coin for all, where each has its own")
    # Of four there are several samples of most sizes: they cannot be one for each size.
    samples = {reply.total.numpy().tobytes() for reply in replies}
    if everyone >= 4 and len(samples) <= len(set(counts)):
        raise Failed(f"{said}: always the same ones for a number")


def _as_one(candidate: Candidate) -> None:
    direction, bound = _direction(candidate), _tight(candidate)
    for optimiser in ("sgd", "adamw"):
        Sums.of(candidate, direction, bound, optimiser=optimiser).within(
            f"all examples by {optimiser}, with clip_norm {bound:.3g} and loss_cap {_SPECK:g},",
            bound,
            _SPECK,
        )
    if (held := sum(candidate.scores()[0::3])) > 1.0 + _ROUNDING:
        raise Failed(f"with as_one its held-out examples count for {held:g}; at most 1")
    if (reply := candidate.profile(most=1)).examples > 1:
        raise Failed(f"told to count for one example at most, it says {reply.examples}")
    _labels_within(reply, 1.0)


def _scored(candidate: Candidate) -> None:
    rows = candidate.scores()
    for task, count, global_, own in zip(
        candidate.tasks, rows[0::3], rows[1::3], rows[2::3], strict=True
    ):
        if not all(0.0 <= score <= count * (1.0 + _ROUNDING) for score in (global_, own)):
            raise Failed(f"{task}: sums {global_:g} and {own:g} of {count:g} scores in [0, 1]")
        if global_ != own:
            raise Failed(f"{task}: one model scored twice has {global_:g} and {own:g}")


def _layout(candidate: Candidate) -> None:
    with suppress(Failed):
        candidate.answer(candidate.update_request(layout="another model"))
        raise ContractError("it took a vector of another model's layout for its own")


def _user_stays(candidate: Candidate) -> None:
    before = candidate.update()
    scores = candidate.scores()
    decode(AdaptReply, candidate.adapt(), {})
    after = candidate.update()
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
    if (count := (reply := one.profile()).examples) > 1:
        raise Failed(f"its dataset has one example; it says {count}")
    _labels_within(reply, 1.0)
    one.update(clip_norm=1e-3)
    one.scores()
    decode(AdaptReply, one.adapt(), {})


def _no_example(candidate: Candidate) -> None:
    empty = candidate.with_examples(0)
    if (count := empty.profile().examples) != 0:
        raise Failed(f"its dataset has no example; it says {count}")
    reply = empty.update()
    if bool(reply.total.any()) or reply.loss:
        raise Failed("without an example its gradient is not zero")
    if any(empty.losses(torch.ones(empty.layout.size), [0.1])) or any(empty.scores()):
        raise Failed("without an example it has losses or scores")
    decode(AdaptReply, empty.adapt(), {})


ALWAYS: tuple[Check, ...] = (
    Check(
        "says how many training examples it has",
        "answer `query.profile` with ProfileReply(len(train)), and with a histogram of `labels` "
        "numbers if asked: each example once at most.",
        _size,
    ),
    Check(
        "equal questions have equal answers",
        "put the model into eval mode (dropout, batch statistics), and draw nothing from global "
        "random state.",
        _deterministic,
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
"""Whatever the unit of privacy."""

OF_EXAMPLES: tuple[Check, ...] = (
    Check(
        "its gradient has the model's shape, and is finite",
        "answer `train.gradient` with GradientReply: the sum over examples as a float32 vector in "
        "the order of regionfed.vector.Layout.of(model), and a sketch of `sketch_size`.",
        _gradient,
    ),
    Check(
        "its gradient is that of its loss",
        "`train.gradient` sums gradients, `evaluate.loss` losses, of the same examples: neither a "
        "mean, nor the opposite sign (a gradient points up the loss), nor another loss.",
        _finite_differences,
    ),
    Check(
        "clips every example: no example counts for more than clip_norm",
        "clip each example's whole gradient to clip_norm before summing, its sketch again, its "
        "loss to [0, loss_cap] (client_app.gradients.clipped_sums does all three), and its loss "
        "differences to clip_norm (loss_differences). Without this there is no privacy. (A "
        "ClientApp must read the setting `dataset` for this check.)",
        _clipped,
    ),
    Check(
        "draws a Poisson sample of sampling_rate",
        "take each example with chance `sampling_rate`, by coins of its own "
        "(regionfed.randomness.randomness_source), anew in each round: epsilon counts on it. (A "
        "ClientApp must read the setting `dataset` for this check.)",
        _sampled,
    ),
)
"""Where a device sums what each of its examples says."""

AS_ONE: tuple[Check, ...] = (
    Check(
        "its steps have the model's shape, and go down its loss",
        "answer `train.delta` with GradientReply: start minus end of K steps on all examples, a "
        "float32 vector in the order of regionfed.vector.Layout.of(model), and its sketch.",
        _goes_down,
    ),
    Check(
        "answers as one: all its examples together count for no more than the bounds",
        "clip the whole change to clip_norm, its sketch again, and its mean loss to loss_cap "
        "(client_app.local_steps.clipped_delta does all three); where a request says `as_one` "
        "answer with means, and count for `most` examples at most. Without this there is no "
        "privacy.",
        _as_one,
    ),
)
"""Where a device answers as one."""

CHECKS = (*ALWAYS, *OF_EXAMPLES, *AS_ONE)


def findings(candidate: Candidate) -> Iterator[Finding]:
    """Run every check of the unit of privacy and yield what came of it."""
    for check in (*ALWAYS, *(AS_ONE if candidate.as_one else OF_EXAMPLES)):
        yield Finding(check.name, _problem(check, candidate), check.remedy)


def _problem(check: Check, candidate: Candidate) -> str:
    try:
        check.run(candidate)
    except Failed as failed:
        return str(failed)
    except RegionFedError as error:
        return str(error)
    return ""
