"""Conflict without its noise, and the weight that follows from it."""

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from regionfed.conflict import centre_and_spread, conflict, noise_floor, personalisation_weight

NOT_NEGATIVE = st.floats(0.0, allow_nan=False, allow_infinity=False)


def test_equal_weights_and_noise_give_the_short_formula() -> None:
    """tau^2 n (1 - 1/R)."""
    for regions in (1, 2, 8):
        floor = noise_floor(100, [0.3] * regions, [1.0 / regions] * regions, 0)
        assert floor == pytest.approx(0.09 * 100 * (1.0 - 1.0 / regions))


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("weights", [(1 / 3, 1 / 3, 1 / 3), (0.5, 0.3, 0.2), (0.9, 0.1, 0.0)])
def test_the_floor_is_what_noise_adds_on_average(weights: tuple[float, ...], index: int) -> None:
    """Over many draws of noise, E d_r^2 minus the floor is the true squared distance."""
    n, draws, stds = 40, 4000, (0.5, 1.0, 2.0)
    generator = torch.Generator().manual_seed(index)
    true = torch.randn(3, n, generator=generator)
    noise = torch.randn(draws, 3, n, generator=generator) * torch.tensor(stds)[:, None]
    noised = true + noise
    w = torch.tensor(weights)[:, None]
    squared = (noised[:, index] - (w * noised).sum(1)).square().sum(1)
    expected = (true[index] - (w * true).sum(0)).square().sum()
    rest = squared - noise_floor(n, stds, weights, index) - expected
    standard_error = rest.std() / math.sqrt(draws)
    assert abs(float(rest.mean())) < 4.0 * float(standard_error)


def test_conflict_never_goes_below_zero() -> None:
    """A distance that noise alone explains is no conflict."""
    assert conflict(4.0, 5.0) == 0.0
    assert conflict(5.0, 1.0) == 2.0
    assert conflict(4.0, 0.0) == 2.0


def test_centre_and_spread() -> None:
    """Median, and mean absolute deviation from it; 0 where nothing differs."""
    assert centre_and_spread([1.0, 2.0, 6.0]) == (2.0, 5.0 / 3.0)
    assert centre_and_spread([3.0]) == (3.0, 0.0)
    assert centre_and_spread([2.0, 2.0]) == (2.0, 0.0)


@given(
    d=NOT_NEGATIVE,
    median=NOT_NEGATIVE,
    spread=NOT_NEGATIVE,
    alpha_min=st.floats(0.0, 1.0),
    gain=st.floats(0.0, 1e3),
)
@example(d=1e300, median=0.0, spread=1e-300, alpha_min=0.5, gain=0.0)
def test_alpha_stays_between_its_least_and_one(
    d: float, median: float, spread: float, alpha_min: float, gain: float
) -> None:
    """For any numbers that a message may carry."""
    alpha = personalisation_weight(d, median, spread, alpha_min, gain)
    assert alpha_min <= alpha <= 1.0


@given(ds=st.tuples(NOT_NEGATIVE, NOT_NEGATIVE), spread=st.floats(1e-6, 1e6))
def test_more_conflict_never_means_less_weight(ds: tuple[float, float], spread: float) -> None:
    """The sigmoid rises."""
    assume(max(ds) < 1e100)
    low, high = (personalisation_weight(d, 1.0, spread, 0.5, 1.0) for d in sorted(ds))
    assert low <= high


@given(scale=st.floats(1e-3, 1e3))
def test_the_weight_does_not_depend_on_the_unit_of_conflict(scale: float) -> None:
    """The spread scales the slope: a larger model or clip changes nothing."""
    one = personalisation_weight(3.0, 1.0, 2.0, 0.5, 1.0)
    assert personalisation_weight(3.0 * scale, scale, 2.0 * scale, 0.5, 1.0) == pytest.approx(one)


def test_equal_conflicts_and_a_single_region_stand_in_the_middle() -> None:
    """Nothing tells the regions apart, so nothing is divided by."""
    for conflicts in ([2.0, 2.0, 2.0], [7.0]):
        median, spread = centre_and_spread(conflicts)
        for d in conflicts:
            assert personalisation_weight(d, median, spread, 0.5, 1.0) == 0.75


def test_the_median_region_stands_in_the_middle() -> None:
    """alpha(m) = a_min + (1 - a_min) / 2."""
    assert personalisation_weight(2.0, 2.0, 1.0, 0.2, 3.0) == pytest.approx(0.6)
