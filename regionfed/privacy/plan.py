"""Noise planned from a target epsilon, before anything is released.

All releases of a run are known in advance, so their joint epsilon is: the plan finds the least
noise multiplier of the update for which everything that the run will release stays in budget.
"""

import math
from dataclasses import dataclass

from regionfed.config import Config
from regionfed.errors import ConfigurationError
from regionfed.privacy.accountant import count_releases, epsilon, least_noise
from regionfed.privacy.banded import carried
from regionfed.privacy.mechanism import GaussianSum
from regionfed.privacy.unit import Unit
from regionfed.privacy.units import UNITS

TRAIN = "train"
HELD_OUT = "held-out"

# A device's loss is cut here: what is released of it needs a bound. A model that guesses among
# a thousand tokens has a loss near 7.
LOSS_CAP = 8.0
# Bound on one unit's vector of loss differences in a search of rho.
VOTE_BOUND = 1.0
# A noised size says something when it is this many standard deviations from none.
SURE = 3.0
# An example counts once, with two scores in [0, 1]; so does a device's or a region's mean of them.
SCORE_BOUND = 3**0.5


@dataclass(frozen=True)
class PrivacyPlan:
    """The mechanisms of a run; the same object noises, charges and reports.

    Attributes
    ----------
    unit : Unit
        What all of them protect.
    update : GaussianSum
        Each round: update, loss and, where conflict is measured by it, sketch.
    vote : GaussianSum
        Losses along the line, in the rounds that search for rho.
    query : GaussianSum
        One gradient that a personaliser asks for.
    size : GaussianSum
        The region's number of examples and, where asked for, its histogram of labels, once.
    sizes : bool
        Whether these are released at all, or sizes are those that are declared.
    scores : GaussianSum
        Held-out scores, in the rounds that evaluate.
    votes : bool
        Whether the run searches for rho at all.
    anew : bool
        Whether theta_r is built anew, so that rho is searched wherever it is.
    sketch_size : int
        Dimensions of the sketch that updates carry; 0 for none.
    queries : int
        The most gradients that one personalise step may ask for.
    labels : int
        Length of the histogram of labels; 0 for none.
    budgets : dict of str to float
        Population to epsilon; inf where nothing is promised.
    """

    unit: Unit
    update: GaussianSum
    vote: GaussianSum
    query: GaussianSum
    size: GaussianSum
    sizes: bool
    scores: GaussianSum
    votes: bool
    anew: bool
    sketch_size: int
    queries: int
    labels: int
    budgets: dict[str, float]


def searches_rho(config: Config, round_: int, *, anew: bool) -> bool:
    """Say whether a round searches for rho: every n-th, and wherever theta_r is built anew.

    A direction that was built anew is another one, about which the last rho says nothing.
    """
    return config.rho_every > 0 and (
        personalises(config, round_) if anew else round_ % config.rho_every == 0
    )


def evaluates(config: Config, round_: int) -> bool:
    """Say whether a round evaluates: every n-th, and always the last."""
    if config.evaluation_privacy == "off":
        return False
    return round_ % config.evaluate_every == 0 or round_ == config.rounds


def personalises(config: Config, round_: int) -> bool:
    """Say whether a round needs theta_r anew: rho is due, it evaluates, or it is the last.

    Only then a personaliser that builds theta_r from scratch does so, and pays for it.
    """
    due = config.rho_every > 0 and round_ % config.rho_every == 0
    return due or evaluates(config, round_) or round_ == config.rounds


def adapts(config: Config, round_: int) -> bool:
    """Say whether devices make their users' own models in a round: once, on the last one."""
    return config.user_steps > 0 and round_ == config.rounds


def score_columns(config: Config, round_: int) -> int:
    """Return the numbers that a round's scores have per task.

    Three (count, global, personalised), and the user's as a fourth where a panel consented to it.
    It never leaves under noise: a training example may change every score of its user, so noise
    that hides a held-out example, which enters three numbers, would not hide it.
    """
    return 4 if adapts(config, round_) and config.user_scores == "panel" else 3


def plan_privacy(
    config: Config,
    *,
    sketch: bool,
    votes: bool,
    anew: bool = False,
    queries: int = 0,
    labels: int = 0,
) -> PrivacyPlan:
    """Plan every release of a run, from a target epsilon or at the noise that is set.

    Where a unit holds training and held-out examples, what is said of either adds up: scores
    then count as training data, under the target epsilon, at the noise of the auxiliary parts.

    Parameters
    ----------
    config : Config
    sketch : bool
        Whether updates carry a sketch.
    votes : bool
        Whether the personaliser searches for rho.
    anew : bool
        Whether it builds theta_r anew, instead of accumulating it.
    queries : int
        The most gradients that one step of the personaliser asks for.
    labels : int
        Length of the histogram of labels that it needs; 0 for none.

    Raises
    ------
    PrivacyError
        If no noise reaches the target, naming what to change.
    ConfigurationError
        If a personaliser accumulates and asks for gradients: it would ask in every round.
    """
    if queries and not anew:
        raise ConfigurationError(
            f"personaliser='{config.personaliser}' accumulates and asks for {queries} gradients a "
            f"step, which would be paid for in every round: set accumulates=False or queries=0."
        )
    unit = UNITS[config.unit]
    if unit.sampling(config.sampling_rate).period and anew and votes:
        raise ConfigurationError(
            f"unit='{config.unit}' makes noise that is good for sums over rounds, and "
            f"personaliser='{config.personaliser}' uses single ones: set personaliser='residual'."
        )
    ratio = config.auxiliary_noise_ratio
    off = config.privacy_mode == "none"
    noised_scores = config.evaluation_privacy == "noised"
    size_bound = unit.size_bound(config.examples_per_client)
    if labels and not size_bound:
        raise ConfigurationError(
            f"personaliser='{config.personaliser}' compares sizes and labels of regions, which "
            f"unit='{config.unit}' cannot release: choose another personaliser."
        )
    declared = config.clients_per_region * config.examples_per_client
    noise = 0.0 if off else config.size_noise_multiplier * size_bound
    if labels and unit.declared and declared < SURE * noise:
        raise ConfigurationError(
            f"personaliser='{config.personaliser}' compares sizes and labels of regions, which "
            f"noise drowns: of {config.clients_per_region} devices each may change them by "
            f"{size_bound:g}. Lower size-noise-multiplier, or choose another personaliser."
        )

    def mechanisms(z: float, z_scores: float, budget: float = float("inf")) -> PrivacyPlan:
        auxiliary = 0.0 if off else ratio * z
        z_size = 0.0 if off else config.size_noise_multiplier
        update = [
            unit.part("update", config.clip_norm, z),
            unit.part("loss", LOSS_CAP, auxiliary),
        ]
        if sketch:
            update.append(unit.part("sketch", config.clip_norm, auxiliary))
        size = [unit.part("size", size_bound, z_size)]
        if labels:
            # An example has one label: it counts once here too.
            size.append(unit.part("labels", size_bound, z_size))
        if unit.holds_both and noised_scores:
            z_scores = auxiliary
        rate = config.sampling_rate
        return PrivacyPlan(
            unit=unit,
            update=GaussianSum(
                "+".join(part.name for part in update),
                TRAIN,
                unit,
                rate,
                tuple(update),
                bands=unit.sampling(rate).period or 1,
            ),
            vote=GaussianSum(
                "rho vote", TRAIN, unit, rate, (unit.part("vote", VOTE_BOUND, auxiliary),)
            ),
            query=GaussianSum(
                "personal gradient",
                TRAIN,
                unit,
                rate,
                (unit.part("gradient", config.clip_norm, z),),
            ),
            size=GaussianSum(
                "region size and labels" if labels else "region size",
                TRAIN,
                unit,
                1.0,
                tuple(size),
            ),
            sizes=not unit.declared or labels > 0,
            scores=GaussianSum(
                "held-out scores",
                TRAIN if unit.holds_both and noised_scores else HELD_OUT,
                unit,
                1.0,
                (unit.part("scores", SCORE_BOUND, z_scores),),
            ),
            votes=votes,
            anew=anew,
            sketch_size=config.sketch_size if sketch else 0,
            queries=queries,
            labels=labels,
            budgets={
                TRAIN: float("inf") if off else budget,
                HELD_OUT: config.evaluation_epsilon if noised_scores else float("inf"),
            },
        )

    def spent(population: str, plan: PrivacyPlan) -> float:
        return spent_on(population, uses(config, plan, config.rounds), config.delta)

    z = z_scores = 0.0
    budget = config.target_epsilon
    if not off and config.noise_multiplier > 0.0:
        z = config.noise_multiplier
        budget = spent(TRAIN, mechanisms(z, 1.0))
    elif not off:
        z = least_noise(
            lambda z: spent(TRAIN, mechanisms(z, 1.0)),
            budget,
            _unreachable("target-epsilon", budget),
        )
    if noised_scores and any(evaluates(config, r) for r in range(1, config.rounds + 1)):
        target = config.evaluation_epsilon
        z_scores = least_noise(
            lambda z_scores: spent(HELD_OUT, mechanisms(1.0, z_scores)),
            target,
            _unreachable("evaluation-epsilon", target),
        )
    return mechanisms(z, z_scores, budget)


def uses(config: Config, plan: PrivacyPlan, rounds: int) -> list[tuple[GaussianSum, int]]:
    """Return how often each mechanism is used in the first rounds, at most."""
    done = range(1, rounds + 1)
    return [
        (plan.size, int(plan.sizes and rounds > 0)),
        (plan.update, plan.update.charges(rounds)),
        (
            plan.vote,
            sum(plan.votes and searches_rho(config, r, anew=plan.anew) for r in done),
        ),
        # What a region asks for depends on its way; this is the most that any does.
        (plan.query, plan.queries * sum(personalises(config, r) for r in done)),
        (plan.scores, sum(evaluates(config, r) for r in done)),
    ]


def spent_on(population: str, used: list[tuple[GaussianSum, int]], delta: float) -> float:
    """Return the epsilon of uses on one population."""
    return epsilon(
        count_releases(
            (mechanism.noise_multiplier, mechanism.sampling_rate)
            for mechanism, count in used
            if mechanism.population == population
            for _ in range(count)
        ),
        delta,
    )


def other_epsilons(config: Config, plan: PrivacyPlan, rounds: int) -> dict[str, float]:
    """Return who else is protected by all that was released in the first rounds, and by how much.

    An example or another relation of the same clipped mean: `Unit.also`.
    """
    return {
        name: epsilon(
            count_releases(
                (mechanism.noise_multiplier / turn, rate if mechanism.rate < 1.0 else 1.0)
                for mechanism, count in uses(config, plan, rounds)
                if mechanism.population == TRAIN
                for _ in range(count)
            ),
            config.delta,
        )
        for name, (turn, rate) in plan.unit.also(config.sampling_rate).items()
    }


@dataclass(frozen=True)
class RegionEpsilon:
    """What the updates and gradients of a region-mean release say of the region as a whole.

    Attributes
    ----------
    emptied : float
        Epsilon of whether its mean is of data or zero (sensitivity C). That the region takes part
        is known: its updates bear its name.
    replaced : float
        Epsilon of which data it has (replaced by any other: sensitivity 2 C).
    """

    emptied: float
    replaced: float


def region_epsilon(config: Config, plan: PrivacyPlan, rounds: int) -> RegionEpsilon:
    """Return the region-level epsilon of the first rounds' updates and personal gradients alone.

    Every region is in every round, so that nothing is amplified. Loss, size, votes and scores
    are bounded per example and promise a region nothing.
    """
    steps = sum(personalises(config, r) for r in range(1, rounds + 1))
    count = rounds + plan.queries * steps
    z = plan.query.parts[0].noise
    both = (epsilon(count_releases([(z_, 1.0)] * count), config.delta) for z_ in (z, z / 2.0))
    return RegionEpsilon(*both)


def predicted_noise(
    config: Config,
    plan: PrivacyPlan,
    *,
    regions: int,
    examples: float,
    devices: int = 1,
    excess: float = 1.0,
) -> float:
    """Return the std that noise on each weight of the global model would have at the end.

    ``s tau sqrt(T / R)``: T uncut steps of size s along the mean of R updates with noise of std tau
    on each coordinate; where that is correlated, what their sum carries of it. Above
    `noise_limit`, steps are cut to the limit.

    Parameters
    ----------
    config : Config
    plan : PrivacyPlan
    regions : int
        R.
    examples : float
        Expected examples of a region.
    devices : int
        Its devices.
    excess : float
        Noise over what is accounted, where devices draw it.
    """
    batch = plan.update.sampling.share * plan.unit.population(examples, devices)
    update = plan.update.part("update")
    tau = excess * update.noise_std / update.divisor(batch)
    tau *= carried(config.rounds, plan.update.bands)
    return float(config.server_lr * tau * math.sqrt(config.rounds / regions))


def damped_step(step: float, noise_std: float, rounds: int, limit: float) -> float:
    """Return a step, cut where the noise that it puts on a weight would exceed a limit.

    After T rounds of steps ``s`` along updates with noise of std tau, a weight carries noise of
    std ``s tau sqrt(T)``, known in advance. Small regions and small epsilons have a large tau: an
    undamped step would drown what the model knows.
    """
    per_step = noise_std * rounds**0.5
    return min(step, limit / per_step) if per_step > 0.0 else step


def _unreachable(key: str, target: float) -> str:
    return (
        f"{key}={target:g} cannot be reached by any noise on the updates: raise it, raise "
        f"size-noise-multiplier, or lower rounds or sampling-rate."
    )
