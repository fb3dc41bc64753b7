"""The planner: known values, answers that keep the target, and errors that name the remedy."""

from dataclasses import replace

import pytest

from regionfed.errors import PrivacyError
from regionfed.privacy.accountant import epsilon
from regionfed.privacy.planner import (
    DROWNED,
    FAINT,
    PROTECTIONS,
    Job,
    Plan,
    Protection,
    complete,
    forecast,
)

PUBLISHED = Plan(None, 4.0, 50, 0.1, 1e-5)
ITSELF = PROTECTIONS[0]
PUBLISHED_EPSILON = {1.0: 0.684, 2.0: 1.65}
JOB = Job(
    server_lr=2.0, clip_norm=0.5, units=1000.0, regions=4, parameters=10_000, noise_limit=0.06
)


@pytest.mark.parametrize("protection", [p for p in PROTECTIONS if p.sampled])
def test_the_published_setting_for_each_sampled_unit(protection: Protection) -> None:
    """sigma 4, q 0.1, T 50, delta 1e-5: 0.684 by itself, 1.65 within a mean that is clipped."""
    found = complete(PUBLISHED, protection).epsilon
    assert found == pytest.approx(PUBLISHED_EPSILON[protection.sensitivity], rel=2e-3)


def test_a_region_is_in_every_round() -> None:
    """8.6 for that it takes part; no sampling rate helps it, and none is needed."""
    present, replaced = (p for p in PROTECTIONS if p.unit == "region")
    alone = replace(PUBLISHED, sampling_rate=None)
    assert complete(PUBLISHED, present).epsilon == pytest.approx(8.6, abs=0.05)
    assert complete(alone, present) == complete(PUBLISHED, present)
    assert complete(alone, replaced).epsilon == pytest.approx(20.7, abs=0.05)
    assert (present.neighbouring, replaced.neighbouring) == ("zero-out", "replace-one")


@pytest.mark.parametrize(("target", "z"), [(0.6, 4.476), (1.0, 2.932), (4.0, 1.147), (8.0, 0.804)])
def test_the_noise_for_a_target(target: float, z: float) -> None:
    """q 0.1, T 50, delta 1e-5: the figures that are quoted, to a fifth of a percent."""
    plan = complete(Plan(target, None, 50, 0.1, 1e-5), ITSELF)
    assert plan.noise_multiplier == pytest.approx(z, rel=2.5e-3)
    assert epsilon((((plan.noise_multiplier or 0.0, 0.1), 50),), 1e-5) <= target


def test_the_most_rounds_for_a_target() -> None:
    """They fit, one more does not."""
    plan = complete(Plan(1.0, 4.0, None, 0.1, 1e-5), ITSELF)
    assert plan.rounds is not None
    one_more = complete(replace(plan, epsilon=None, rounds=plan.rounds + 1), ITSELF).epsilon
    exactly = complete(replace(plan, epsilon=None), ITSELF).epsilon
    assert exactly is not None and one_more is not None
    assert exactly <= 1.0 < one_more


def test_the_largest_sampling_rate_for_a_target() -> None:
    """It fits, a percent more does not; where everyone in every round fits, it is 1."""
    rate = complete(Plan(1.0, 4.0, 50, None, 1e-5), ITSELF).sampling_rate
    assert rate is not None
    assert epsilon((((4.0, rate), 50),), 1e-5) <= 1.0 < epsilon((((4.0, 1.01 * rate), 50),), 1e-5)
    assert complete(Plan(1.0, 400.0, 50, None, 1e-5), ITSELF).sampling_rate == 1.0


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(1.0, 4.0, 50, 0.1, 1e-5), "nothing is left to compute.*Leave --target-epsilon out"),
        (Plan(None, None, 50, 0.1, 1e-5), "--target-epsilon, --noise-multiplier are not given.*"),
        (Plan(1e-3, 0.5, None, 0.1, 1e-5), "not even one round.*raise --target-epsilon or"),
    ],
)
def test_what_cannot_be_computed_names_the_remedy(plan: Plan, said: str) -> None:
    """Too much, too little, or out of reach."""
    with pytest.raises(PrivacyError, match=said):
        complete(plan, ITSELF)


def test_the_forecast_is_the_formula() -> None:
    """s z C sqrt(T / R) / m on a weight; z C sqrt(p / R) / m of noise against a signal of C."""
    seen = forecast(PUBLISHED, JOB)
    m = 0.1 * 1000.0
    assert seen.noise_per_weight == pytest.approx(2.0 * 4.0 * 0.5 * (50 / 4) ** 0.5 / m)
    assert seen.noise_to_signal == pytest.approx(4.0 * (10_000 / 4) ** 0.5 / m)
    assert seen.step_factor == pytest.approx(0.06 / seen.noise_per_weight)
    assert seen.verdict == "drowned" and seen.noise_per_weight > DROWNED


def test_the_units_that_are_needed_are_enough() -> None:
    """With as many the noise is just clear; half of them are faint."""
    needed = forecast(PUBLISHED, JOB).units_needed
    enough = forecast(PUBLISHED, replace(JOB, units=1.001 * needed))
    assert enough.verdict == "clear" and enough.noise_per_weight == pytest.approx(FAINT, rel=0.01)
    assert forecast(PUBLISHED, replace(JOB, units=0.5 * needed)).verdict == "faint"
    assert enough.step_factor == 1.0


def test_a_forecast_needs_a_whole_plan() -> None:
    """Not a guess."""
    with pytest.raises(PrivacyError, match="complete the plan"):
        forecast(replace(PUBLISHED, rounds=None), JOB)
