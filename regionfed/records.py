"""What is written down of a run: one record per round, and the summary at its end.

A trailing underscore in a field's name (``global_``) is dropped when it is written. Scores are
fractions of 1, and None where nothing was measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["finished", "stopped", "failed"]
TaskScores = Mapping[str, float | None]
"""The score of each task, and their mean under the key ``"mean"``."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Somebody's answer that did not count, and why."""

    region: str
    round: int
    reason: str
    client: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """A score over regions.

    Attributes
    ----------
    mean : float or None
        Mean over the regions that have a score.
    rrs : float or None
        Region robustness score: that of the worst region.
    worst : str or None
        Name of that region.
    """

    mean: float | None
    rrs: float | None
    worst: str | None = None


def mean_of(scores: TaskScores | None) -> float | None:
    """Return a score's mean over tasks; None where nothing was scored."""
    return scores["mean"] if scores else None


def mean_and_rrs(scores: Mapping[str, float | None]) -> Score:
    """Summarise one score per region; regions without one (None, NaN) are left out.

    >>> mean_and_rrs({"north": 0.5, "south": 0.25, "west": None})
    Score(mean=0.375, rrs=0.25, worst='south')
    """
    known = _known(scores)
    if not known:
        return Score(None, None)
    worst = min(known, key=known.__getitem__)
    return Score(math.fsum(known.values()) / len(known), known[worst], worst)


def with_mean(tasks: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the scores of the tasks and, as ``"mean"``, the mean of those that are known."""
    if "mean" in tasks:
        raise ValueError("a task cannot be called 'mean': that key holds the mean; rename the task")
    known = _known(tasks)
    return {**tasks, "mean": math.fsum(known.values()) / len(known) if known else None}


def _known(scores: Mapping[str, float | None]) -> dict[str, float]:
    return {k: float(v) for k, v in scores.items() if v is not None and math.isfinite(v)}


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """Where one region stands after a round, or at the end of the run.

    Attributes
    ----------
    examples : int or None
        Number of training examples, if the region's privacy policy lets it be known.
    conflict, alpha, rho : float or None
        Distance to the global update, weight and step of the personalisation.
    strategy, reason : str or None
        Personaliser in use, and why this one; or why the region has no result.
    epsilon : float or None
        Spent on its training examples so far, by its own ledger; None without privacy, and
        before it has told.
    rho_evaluations, rho_messages : int
        What its searches for rho have cost so far: points that a device evaluated, and messages
        that all devices were sent.
    global_, personalised : TaskScores or None
        Scores of the two models, from the last evaluation that the region answered.
    user : TaskScores or None
        Scores of its users' own models, where a panel consented to that.
    """

    examples: int | None = None
    conflict: float | None = None
    alpha: float | None = None
    rho: float | None = None
    strategy: str | None = None
    reason: str | None = None
    global_: TaskScores | None = None
    personalised: TaskScores | None = None
    epsilon: float | None = None
    rho_evaluations: int = 0
    rho_messages: int = 0
    user: TaskScores | None = None


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round: a line of ``metrics.jsonl``.

    Attributes
    ----------
    round, rounds : int
        This round, counted from 1, and how many the run plans.
    answered : Sequence[str]
        The regions whose updates were used.
    regions : Mapping[str, RegionRecord]
        Every region of the run, also those that did not answer.
    loss : float or None
        Mean over regions.
    global_, personalised : Score or None
        None in a round without evaluation.
    epsilon : float or None
        Spent since the start of the run; None without privacy.
    seconds : float
        Duration of this round.
    user : Score or None
        Of users' own models; None unless a panel consented to that, and before the last round.
    """

    round: int
    rounds: int
    answered: Sequence[str] = ()
    failures: Sequence[Failure] = ()
    loss: float | None = None
    global_: Score | None = None
    personalised: Score | None = None
    regions: Mapping[str, RegionRecord] = field(default_factory=dict)
    epsilon: float | None = None
    seconds: float = 0.0
    user: Score | None = None


@dataclass(frozen=True, slots=True)
class PrivacySummary:
    """What was promised to whom, and what it cost.

    Attributes
    ----------
    mode : str
        ``"none"`` is the only one that protects nobody.
    unit, sampling, neighbouring, accountant : str or None
        What `epsilon` and `delta` mean; an epsilon without them says nothing.
    events : Sequence[Mapping[str, object]]
        One mapping per kind of release in the ledger, for people to read.
    statement : str
        All of it in a sentence.
    target_epsilon : float or None
        What the noise was planned for.
    noise_seeded : bool
        The noise could be drawn again by whoever knows the seed: a test, no protection.
    simulated_cohort : bool
        The noise was scaled to a larger cohort than took part.
    units : Mapping[str, float]
        Epsilon by what it protects, where there is more than one thing to protect.
    """

    mode: str
    epsilon: float | None = None
    delta: float | None = None
    unit: str | None = None
    sampling: str | None = None
    neighbouring: str | None = None
    accountant: str | None = None
    noise_multiplier: float | None = None
    clip_norm: float | None = None
    events: Sequence[Mapping[str, object]] = ()
    statement: str = ""
    target_epsilon: float | None = None
    noise_seeded: bool = False
    simulated_cohort: bool = False
    units: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """How the scores were released: under noise, from a consenting panel, or not at all.

    Attributes
    ----------
    epsilon, delta : float or None
        Spent on the held-out examples, apart from what training spent; only when noised.
    """

    release: Literal["noised", "panel", "off"]
    epsilon: float | None = None
    delta: float | None = None
    statement: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole run: ``summary.json``.

    Attributes
    ----------
    status : Status
        How it ended.
    reason : str
        Why, where and what to do; empty when it finished.
    rounds : int
        Rounds that were completed.
    user : Score or None
        Of users' own models; None where they stay on the devices.
    """

    status: Status
    reason: str
    rounds: int
    seed: int
    config: Mapping[str, object]
    versions: Mapping[str, str]
    global_: Score
    personalised: Score
    regions: Mapping[str, RegionRecord]
    privacy: PrivacySummary
    evaluation: EvaluationSummary
    failures: Sequence[Failure]
    seconds: float
    paths: Mapping[str, str]
    user: Score | None = None
