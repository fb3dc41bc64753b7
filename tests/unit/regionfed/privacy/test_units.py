"""Units: where the clip stands decides sensitivity, sampling, denominator and ledger event."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from regionfed.config import Config
from regionfed.errors import ConfigurationError
from regionfed.privacy.mechanism import GaussianSum
from regionfed.privacy.plan import (
    HELD_OUT,
    LOSS_CAP,
    SCORE_BOUND,
    TRAIN,
    VOTE_BOUND,
    other_epsilons,
    plan_privacy,
    predicted_noise,
    spent_on,
    uses,
)
from regionfed.privacy.unit import Part, clip
from regionfed.privacy.units import UNITS, ZERO_OUT, neighbouring_of
from regionfed.randomness import PrivateRandomness, SeededRandomness
from tests.conftest import tiny_config

LEVEL = 1e-3
KEY = bytes(range(32))


def config_of(unit: str, **settings: Any) -> Config:
    conflict = "sketch" if UNITS[unit].sketches else "raw"
    return tiny_config(**{"unit": unit, "conflict": conflict, "rho_every": 2, **settings})


def mechanism_of(unit: str, rate: float = 0.3, C: float = 0.5, z: float = 2.0) -> GaussianSum:
    one = UNITS[unit]
    return GaussianSum("update", TRAIN, one, rate, (one.part("update", C, z),))


# ----------------------------------------------------------------------------- where the clip is
@pytest.mark.parametrize(
    ("unit", "protects", "sensitivity", "rate", "relation"),
    [
        ("example", "example", 0.5, 0.3, "add-or-remove-one"),
        ("example-in-mean", "example", 1.0, 0.3, "add-or-remove-one"),
        ("client", "client", 0.5, 0.3, "add-or-remove-one"),
        ("region", "region", 0.5, 1.0, ZERO_OUT),
    ],
)
def test_d3_the_event_follows_from_where_the_clip_stands(
    unit: str, protects: str, sensitivity: float, rate: float, relation: str
) -> None:
    """D3: the same C, z and rate are another event under another clip."""
    mechanism = mechanism_of(unit)
    event = mechanism.event("North", 1)
    assert (event.unit, event.sampling_rate) == (protects, rate)
    assert event.sensitivity == {"update": sensitivity}
    assert event.noise_multiplier == mechanism.parts[0].noise_std / sensitivity
    assert mechanism.parts[0].noise_std == 1.0
    assert UNITS[unit].neighbouring == neighbouring_of(protects) == relation


def test_there_is_no_other_unit() -> None:
    """A mechanism is not a plug-in, and an unknown unit has no relation."""
    with pytest.raises(ConfigurationError, match="unit='clients'; did you mean 'client'"):
        Config.from_run_config({"unit": "clients"})
    assert neighbouring_of("household") == "unknown"


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bound", [0.25, 4.0])
def test_d3_moving_the_clip_moves_noise_and_sensitivity_alike(unit: str, bound: float) -> None:
    """The multiplier, hence epsilon, stays; what the ledger calls sensitivity does not."""
    one, moved = mechanism_of(unit), mechanism_of(unit, C=bound)
    assert moved.noise_multiplier == one.noise_multiplier
    assert moved.parts[0].noise_std == 2.0 * bound
    ratio = moved.event("r", 1).sensitivity["update"] / one.event("r", 1).sensitivity["update"]
    assert ratio == bound / 0.5


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20),
    st.floats(1e-3, 1e3),
)
def test_a_clipped_vector_is_short_and_points_the_same_way(
    values: list[float], bound: float
) -> None:
    """Norm at most C for any finite input, zero stays zero, a short one is kept (A2)."""
    vector = torch.tensor(values)
    out = clip(vector, bound)
    assert float(out.double().norm()) <= bound * (1 + 1e-5)
    if float(vector.norm()) <= bound:
        assert torch.equal(out, vector)
    assert bool((out * vector.sign() >= 0.0).all())


# -------------------------------------------------------------------------------------- sampling
def test_clients_are_drawn_by_poisson_sampling() -> None:
    """Each with chance q (binomial interval), cohorts of all sizes, independent over rounds."""
    mechanism, rounds, devices, q = mechanism_of("client"), 2000, list(range(40)), 0.3
    source = SeededRandomness(5)
    drawn = torch.zeros(rounds, len(devices))
    for round_ in range(rounds):
        for device in mechanism.cohort(devices, source("cohort", round_)):
            drawn[round_, device] = 1.0
    low, high = stats.binom.interval(1.0 - LEVEL / len(devices), rounds, q)
    counts = drawn.sum(0)
    assert low <= float(counts.min()) and float(counts.max()) <= high
    # The size of a cohort is binomial too: no fixed size, no stratification.
    sizes = drawn.sum(1)
    spread = len(devices) * q * (1 - q)
    low, high = stats.chi2.interval(1.0 - LEVEL, rounds - 1)
    assert low * 0.9 < float(sizes.var()) / spread * (rounds - 1) < high * 1.1
    # Neither over devices nor over rounds does one coin tell of another.
    together = torch.corrcoef(drawn.T) - torch.eye(len(devices))
    assert float(together.abs().max()) < 5.0 / math.sqrt(rounds)
    centred = drawn - q
    after = (centred[:-1] * centred[1:]).mean(0) / (q * (1 - q))
    assert float(after.abs().max()) < 5.0 / math.sqrt(rounds)


@pytest.mark.parametrize("unit", ["example", "example-in-mean", "region"])
def test_all_devices_are_asked_where_examples_are_drawn(unit: str) -> None:
    """Devices draw by themselves, with the rate of the mechanism."""
    mechanism = mechanism_of(unit)
    assert mechanism.cohort([3, 1, 2], PrivateRandomness(KEY)) == [3, 1, 2]
    assert (mechanism.sampling.devices, mechanism.sampling.examples) == (1.0, 0.3)


def test_a_drawn_client_answers_with_all_it_has() -> None:
    """And a release of everybody asks everybody."""
    assert mechanism_of("client").sampling.examples == 1.0
    everyone = mechanism_of("client", rate=1.0)
    assert everyone.cohort([2, 1], PrivateRandomness(KEY)) == [2, 1]
    assert everyone.sampling_rate == 1.0


# ------------------------------------------------------------------------- sums and denominators
@pytest.mark.parametrize("unit", ["example", "client"])
def test_a_sum_of_clipped_contributions_is_noised_as_it_is(unit: str) -> None:
    """And divided by a batch that is fixed beforehand."""
    part = UNITS[unit].part("update", 0.5, 1.0)
    total = torch.full((3,), 9.0)
    assert torch.equal(part.gathered(total, 7.0), total) and part.divisor(7.0) == 7.0


@pytest.mark.parametrize("name", ["update", "loss", "sketch", "vote", "scores"])
def test_everything_of_a_region_is_a_clipped_mean(name: str) -> None:
    """Its norm is at most C whatever came in; it is divided by nothing more."""
    part = UNITS["region"].part(name, 0.5, 1.0)
    assert part.of_mean and part.divisor(7.0) == 1.0
    gathered = part.gathered(torch.full((4,), 1e6), 7.0)
    assert float(gathered.norm()) == pytest.approx(0.5)
    assert not bool(part.gathered(torch.zeros(4), 7.0).any())


def test_the_cohort_of_clients_is_the_declared_one() -> None:
    """Of examples it is the released size."""
    assert UNITS["client"].population(6000.0, 10) == 10.0
    assert UNITS["example"].population(6000.0, 10) == 6000.0
    assert UNITS["client"].declared and UNITS["region"].declared
    assert not UNITS["example"].declared


# -------------------------------------------------------------------------------------- the plan
def epsilon_anew(events: list[tuple[float, float]], delta: float) -> float:
    """Count releases (z, q) with dp-accounting alone."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for z, q in events:
        gaussian = dp_event.GaussianDpEvent(z)
        accountant.compose(gaussian if q == 1.0 else dp_event.PoissonSampledDpEvent(q, gaussian))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("unit", ["client", "region"])
def test_one_budget_where_a_unit_holds_training_and_held_out_examples(unit: str) -> None:
    """Scores are charged to the same target as everything else; no size is released."""
    config = config_of(unit, evaluation_privacy="noised", target_epsilon=4.0)
    plan = plan_privacy(config, sketch=True, votes=True)
    used = uses(config, plan, config.rounds)
    assert [m.release for m, n in used if n] == [
        "update+loss+sketch",
        "rho vote",
        "held-out scores",
    ]
    assert {m.population for m, n in used if n} == {TRAIN}
    events = [(m.noise_multiplier, m.sampling_rate) for m, n in used for _ in range(n)]
    total = epsilon_anew(events, config.delta)
    assert 0.97 * 4.0 < total <= 4.0
    assert spent_on(TRAIN, used, config.delta) == pytest.approx(total, abs=5e-3)
    assert spent_on(HELD_OUT, used, config.delta) == 0.0


def test_every_release_of_a_client_is_bounded_as_a_whole() -> None:
    """Loss, sketch, votes, sizes, labels and scores, all at unit client."""
    config = config_of(
        "client", evaluation_privacy="noised", personaliser="dynamic", clients_per_region=100
    )
    plan = plan_privacy(config, sketch=True, votes=True, anew=True, queries=2, labels=3)
    bounds = {
        part.name: part.bound
        for m in (plan.update, plan.vote, plan.query, plan.size, plan.scores)
        for part in m.parts
    }
    assert bounds == {
        "update": config.clip_norm,
        "gradient": config.clip_norm,
        "sketch": config.clip_norm,
        "loss": LOSS_CAP,
        "vote": VOTE_BOUND,
        "size": float(config.examples_per_client),
        "labels": float(config.examples_per_client),
        "scores": SCORE_BOUND,
    }
    assert plan.sizes and plan.size.event("r", 0).unit == "client"


def test_sizes_that_noise_drowns_are_no_reason_to_route_by() -> None:
    """Twenty devices' worth of noise on ten of them says nothing."""
    config = config_of("client", personaliser="dynamic", clients_per_region=10)
    with pytest.raises(ConfigurationError, match=r"noise drowns.*Lower size-noise-multiplier"):
        plan_privacy(config, sketch=True, votes=True, anew=True, queries=2, labels=3)


def test_a_region_s_sizes_are_never_released() -> None:
    """Nothing bounds them: routing by them is refused."""
    config = config_of("region", personaliser="dynamic")
    with pytest.raises(ConfigurationError, match=r"unit='region' cannot release"):
        plan_privacy(config, sketch=True, votes=True, anew=True, queries=2, labels=3)


def test_a_region_s_plan_says_what_it_gives_to_others() -> None:
    """Replaced data: twice the sensitivity; an example: that, amplified by sampling."""
    config = config_of("region", noise_multiplier=4.0, target_epsilon=4.0, rho_every=0)
    plan = plan_privacy(config, sketch=True, votes=False)
    z = plan.update.noise_multiplier
    others = other_epsilons(config, plan, config.rounds)
    replaced = epsilon_anew([(z / 2.0, 1.0)] * config.rounds, config.delta)
    example = epsilon_anew([(z / 2.0, config.sampling_rate)] * config.rounds, config.delta)
    assert others["region replaced"] == pytest.approx(replaced, abs=5e-3)
    assert others["example"] == pytest.approx(example, abs=5e-3)
    assert example < plan.budgets[TRAIN] * 2 < 2 * replaced
    assert other_epsilons(config_of("client"), plan_of("client"), 4) == {}


def plan_of(unit: str) -> Any:
    return plan_privacy(config_of(unit), sketch=UNITS[unit].sketches, votes=True)


def test_the_published_noise_gives_a_region_what_it_gives() -> None:
    """sigma 4, T 50, updates alone: 8.6, and 20.7 for which data it has."""
    config = config_of(
        "region",
        noise_multiplier=4.0,
        target_epsilon=4.0,
        rounds=50,
        auxiliary_noise_ratio=1e3,
        evaluation_privacy="off",
    )
    plan = plan_privacy(config, sketch=False, votes=False)
    assert plan.budgets[TRAIN] == pytest.approx(8.6, abs=0.01)
    assert other_epsilons(config, plan, 50)["region replaced"] == pytest.approx(20.68, abs=0.01)


def test_noise_of_clients_is_foreseen_over_devices() -> None:
    """s z C sqrt(T / R) / (q n), n the devices."""
    config = replace(config_of("client"), server_lr=0.5, noise_limit=1e6)
    plan = plan_privacy(config, sketch=True, votes=True)
    update = plan.update.part("update")
    expected = 0.5 * update.noise_std / (config.sampling_rate * 1000) * math.sqrt(4 / 2)
    found = predicted_noise(config, plan, regions=2, examples=6e5, devices=1000)
    assert found == pytest.approx(expected)


# ------------------------------------------------------------------------------------- settings
@pytest.mark.parametrize("unit", ["example-in-mean", "client", "region"])
def test_a_user_s_model_is_weighed_by_examples_only(unit: str) -> None:
    """Clipped gradients of examples are comparable with a mean of such alone."""
    with pytest.raises(ConfigurationError, match="user-steps=0"):
        config_of(unit, user_steps=4)


def test_second_order_meta_goes_through_examples() -> None:
    """A device as one takes no step of each example's."""
    with pytest.raises(ConfigurationError, match="meta-order=1"):
        config_of("client", meta_order=2)


def test_the_setting_of_earlier_runs_is_understood() -> None:
    """`clipping` said where the clip stands; a run of then can still be resumed."""
    old = {"clipping": "region-mean", "conflict": "raw", "user-steps": 0}
    assert Config.from_run_config(old).unit == "example-in-mean"
    assert Config.from_run_config({"clipping": "example"}) == Config()
    with pytest.raises(ConfigurationError, match="unknown setting 'clipping'"):
        Config.from_run_config({"clipping": "layer"})


def test_a_part_is_named() -> None:
    """By what it is released as."""
    assert mechanism_of("client").part("update") == Part("update", 0.5, 2.0)


def test_an_example_of_a_clipped_mean_alone_promises_its_region_too() -> None:
    """A region is bounded by its mean's clip; where it is the unit, that is said already."""
    promising = {name for name, unit in UNITS.items() if unit.promises_region_too}
    clipping = {n for n, u in UNITS.items() if u.part("update", 1.0, 1.0).of_mean}
    assert promising == {"example-in-mean"} == clipping - {"region"}
