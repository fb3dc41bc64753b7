"""Conflict without its noise, and the weight that follows from it."""

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy import stats

from regionfed.conflict import (
    centre_and_spread,
    conflict,
    label_divergence,
    noise_floor,
    personalisation_weight,
)

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


VECTORS = st.lists(st.floats(-10.0, 10.0), min_size=3, max_size=3)


@given(a=VECTORS, b=VECTORS, bound=st.floats(0.01, 100.0))
def test_at_full_clip_conflict_is_the_angle(a: list[float], b: list[float], bound: float) -> None:
    """Where both gradients have norm C: d^2 = 2 C^2 (1 - cos)."""
    x, y = (torch.tensor(v, dtype=torch.float64) for v in (a, b))
    assume(float(x.norm()) > 1e-3 and float(y.norm()) > 1e-3)
    cosine = float(x @ y / (x.norm() * y.norm()))
    difference = bound * (x / x.norm() - y / y.norm())
    d = conflict(float(difference.square().sum()), 0.0)
    assert d**2 == pytest.approx(2.0 * bound**2 * (1.0 - cosine), rel=1e-6, abs=1e-9 * bound**2)


def test_a_region_that_joins_later_is_weighed_like_the_others() -> None:
    """By round 1's median and spread, of which it was no part: still in [a_min, 1]."""
    median, spread = centre_and_spread([1.0, 2.0, 3.0])
    for d in (0.0, 0.5, 2.0, 50.0):
        assert 0.5 <= personalisation_weight(d, median, spread, 0.5, 1.0) <= 1.0
    assert personalisation_weight(2.0, median, spread, 0.5, 1.0) == 0.75
    assert personalisation_weight(50.0, median, spread, 0.5, 1.0) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------- labels
def test_the_divergence_of_labels_is_kl() -> None:
    """In nats, after one is added to each count."""
    p, q = (10.0, 4.0, 7.0), (1.0, 30.0, 5.0)
    smooth_p, smooth_q = [v + 1.0 for v in p], [v + 1.0 for v in q]
    expected = stats.entropy(smooth_p, smooth_q)
    assert label_divergence(p, q) == pytest.approx(float(expected))
    assert label_divergence(p, p) == 0.0
    assert label_divergence([], []) == 0.0


@given(
    counts=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=9)
)
def test_the_divergence_is_finite_and_not_negative(counts: list[tuple[float, float]]) -> None:
    """Whatever noise made of the counts: negative ones count as none."""
    found = label_divergence([a for a, _ in counts], [b for _, b in counts])
    assert 0.0 <= found < math.inf


def test_the_scale_of_the_world_does_not_matter_to_the_divergence() -> None:
    """A sum over regions is as good as a mean, for counts that are not small."""
    p, q = [3000.0, 1000.0], [20_000.0, 20_000.0]
    assert label_divergence(p, q) == pytest.approx(
        label_divergence(p, [v / 8 for v in q]), rel=1e-2
    )
