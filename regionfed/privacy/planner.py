"""Epsilon, noise, rounds and sampling: give all but one, get that one, for each unit protected.

The question that comes before any run: one Gaussian release a round, nothing else. What a run
releases besides (its size, votes, scores) is planned by `regionfed.privacy.plan`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from regionfed.errors import PrivacyError
from regionfed.privacy.accountant import epsilon, least_noise
from regionfed.privacy.unit import NEIGHBOURING
from regionfed.privacy.units import ZERO_OUT

MOST_ROUNDS = 100_000
_RATE_STEP = 1e-3  # relative precision of a sampling rate that is searched for

# Measured on the default job: noise of this std on each weight costs 2 to 5 points, the other
# leaves nothing of the model.
FAINT, DROWNED = 0.03, 0.1
REPLACE = "replace-one"


@dataclass(frozen=True)
class Protection:
    """Somebody who is protected, and by how much of the noise.

    Attributes
    ----------
    unit : str
        ``"example"``, ``"client"`` or ``"region"``: neighbours differ in one.
    who : str
        In words, with where the clip stands.
    sensitivity : float
        What one unit changes in the released sum, in units of the clip norm C.
    sampled : bool
        Whether units are drawn by Poisson sampling; else each is in every round.
    neighbouring : str
        How neighbours differ in it.
    """

    unit: str
    who: str
    sensitivity: float
    sampled: bool
    neighbouring: str = NEIGHBOURING


PROTECTIONS: tuple[Protection, ...] = (
    Protection("example", "an example that is clipped by itself", 1.0, True),
    Protection("example", "an example in a regional mean that is clipped", 2.0, True),
    Protection("client", "a client whose update is clipped by itself", 1.0, True),
    Protection("client", "a client in a regional mean that is clipped", 2.0, True),
    Protection("region", "whether a region has data, its mean clipped", 1.0, False, ZERO_OUT),
    Protection("region", "which data a region has, its mean clipped", 2.0, False, REPLACE),
)
"""A mean that is clipped may turn from one end of the ball of radius C to the other: 2 C."""

UNITS = tuple(dict.fromkeys(p.unit for p in PROTECTIONS))


@dataclass(frozen=True)
class Plan:
    """One release a round, T times; what is not given is None.

    Attributes
    ----------
    epsilon : float or None
    noise_multiplier : float or None
        Standard deviation of the noise over the clip norm C (not over the sensitivity).
    rounds : int or None
    sampling_rate : float or None
        Chance of a unit to be in a round; nobody needs it where all are in every round.
    delta : float
    """

    epsilon: float | None
    noise_multiplier: float | None
    rounds: int | None
    sampling_rate: float | None
    delta: float


def complete(plan: Plan, protection: Protection) -> Plan:
    """Return the plan with what it lacks.

    Epsilon is the one by PLD; a noise multiplier is the least (to 1e-3), rounds the most, a
    sampling rate the largest (to 1e-3) at which epsilon is not above the given one.

    Raises
    ------
    PrivacyError
        If nothing, or more than one thing, is missing, or no value will do; names the remedy.
    """
    if not protection.sampled:
        plan = replace(plan, sampling_rate=1.0)
    given = {
        "--target-epsilon": plan.epsilon,
        "--noise-multiplier": plan.noise_multiplier,
        "--rounds": plan.rounds,
        "--sampling-rate": plan.sampling_rate,
    }
    missing = [option for option, value in given.items() if value is None]
    if len(missing) != 1:
        raise PrivacyError(_advice(protection, missing))
    return _SOLVE[missing[0]](plan, protection)


def _advice(protection: Protection, missing: list[str]) -> str:
    wanted = f"for {protection.who} one is computed from the others"
    if not missing:
        rate = "" if protection.sampled else " (it has no sampling rate: all are in every round)"
        return f"nothing is left to compute: {wanted}{rate}. Leave --target-epsilon out."
    return (
        f"{', '.join(missing)} are not given: {wanted}. Give all but one of them, for example "
        f"--noise-multiplier 4 --sampling-rate 0.1 --rounds 50."
    )


def _spent(plan: Plan, protection: Protection, **changed: float) -> float:
    values = {
        "z": plan.noise_multiplier,
        "q": plan.sampling_rate,
        "rounds": plan.rounds,
        **changed,
    }
    z, q, rounds = (values[k] or 0.0 for k in ("z", "q", "rounds"))
    return epsilon((((z / protection.sensitivity, q), int(rounds)),), plan.delta)


def _solve_epsilon(plan: Plan, protection: Protection) -> Plan:
    return replace(plan, epsilon=_spent(plan, protection))


def _solve_noise(plan: Plan, protection: Protection) -> Plan:
    target = plan.epsilon or 0.0
    z = least_noise(
        lambda z: _spent(plan, protection, z=z),
        target,
        f"no noise brings {plan.rounds} rounds to epsilon {target:g} at delta {plan.delta:g}: "
        f"raise --target-epsilon, or lower --rounds or --sampling-rate.",
    )
    return replace(plan, noise_multiplier=z)


def _solve_rounds(plan: Plan, protection: Protection) -> Plan:
    target = plan.epsilon or 0.0

    def fits(rounds: int) -> bool:
        return _spent(plan, protection, rounds=rounds) <= target

    if not fits(1):
        raise PrivacyError(_too_dear(plan, protection, "not even one round"))
    low, high = 1, 2
    while high <= MOST_ROUNDS and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_ROUNDS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return replace(plan, rounds=low)


def _solve_rate(plan: Plan, protection: Protection) -> Plan:
    target = plan.epsilon or 0.0

    def fits(rate: float) -> bool:
        return _spent(plan, protection, q=rate) <= target

    if fits(1.0):
        return replace(plan, sampling_rate=1.0)
    low, high = 0.0, 1.0
    while high - low > _RATE_STEP * high:
        middle = 0.5 * (low + high)
        if high < 1e-6:
            raise PrivacyError(_too_dear(plan, protection, "no useful sampling rate"))
        low, high = (middle, high) if fits(middle) else (low, middle)
    return replace(plan, sampling_rate=low)


def _too_dear(plan: Plan, protection: Protection, what: str) -> str:
    return (
        f"for {protection.who}, {what} fits into epsilon {plan.epsilon:g} at delta "
        f"{plan.delta:g} with noise multiplier {plan.noise_multiplier:g}: raise --target-epsilon "
        f"or --noise-multiplier."
    )


_SOLVE: dict[str, Callable[[Plan, Protection], Plan]] = {
    "--target-epsilon": _solve_epsilon,
    "--noise-multiplier": _solve_noise,
    "--rounds": _solve_rounds,
    "--sampling-rate": _solve_rate,
}


@dataclass(frozen=True)
class Job:
    """What noise is weighed against.

    Attributes
    ----------
    server_lr, clip_norm : float
    units : float
        Examples (or clients) of a region; one round sums an expected ``q * units`` of them.
    regions : int
        Regions whose updates are averaged.
    parameters : int
        Weights that are trained.
    noise_limit : float
        Steps are cut where noise would exceed this on a weight.
    """

    server_lr: float
    clip_norm: float
    units: float
    regions: int
    parameters: int
    noise_limit: float


@dataclass(frozen=True)
class Forecast:
    """What noise will do to the global model.

    Attributes
    ----------
    noise_per_weight : float
        ``s z C sqrt(T / R) / m``, m = q n the expected batch: std on each weight after T rounds of
        full steps.
    step_factor : float
        What steps are cut to so that noise stays within the limit; 1 for full steps.
    noise_to_signal : float
        Norm of the noise on the mean update, ``z C sqrt(p / R) / m``, over C, the most that the
        update can have.
    verdict : str
        ``"clear"``, ``"faint"`` (2 to 5 points lost) or ``"drowned"``.
    units_needed : float
        Units a region needs for a clear verdict, all else equal.
    """

    noise_per_weight: float
    step_factor: float
    noise_to_signal: float
    verdict: str
    units_needed: float


def forecast(plan: Plan, job: Job) -> Forecast:
    """Foresee the noise of a completed plan of units that are clipped by themselves.

    Raises
    ------
    PrivacyError
        If the plan is not complete.
    """
    z, rounds, rate = plan.noise_multiplier, plan.rounds, plan.sampling_rate
    if z is None or rounds is None or rate is None:
        raise PrivacyError("a forecast needs noise, rounds and sampling: complete the plan first.")
    batch = rate * job.units
    mean_std = z * job.clip_norm / batch / math.sqrt(job.regions)
    noise = job.server_lr * mean_std * math.sqrt(rounds)
    verdict = "drowned" if noise > DROWNED else "faint" if noise > FAINT else "clear"
    return Forecast(
        noise_per_weight=noise,
        step_factor=min(1.0, job.noise_limit / noise) if noise else 1.0,
        noise_to_signal=mean_std * math.sqrt(job.parameters) / job.clip_norm,
        verdict=verdict,
        units_needed=job.units * noise / FAINT,
    )
