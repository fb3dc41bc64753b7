"""The Gaussian sum: its noise, and the event that it is charged as."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from regionfed.privacy.mechanism import GaussianSum
from regionfed.privacy.unit import Part
from regionfed.privacy.units import UNITS
from regionfed.randomness import PrivateRandomness

KEY = bytes(range(32))
LEVEL = 1e-3


def mechanism(*parts: Part, rate: float = 0.1) -> GaussianSum:
    return GaussianSum("update+loss", "train", UNITS["example"], rate, parts)


UPDATE = Part("update", 0.5, 2.0)
LOSS = Part("loss", 8.0, 4.0)


@given(st.lists(st.floats(0.01, 1e3), min_size=1, max_size=5))
def test_parts_of_one_sample_are_one_mechanism(multipliers: list[float]) -> None:
    """z_eff = (sum z_i^-2)^-1/2: below every z_i, and equal to the only one."""
    joint = mechanism(*(Part(str(i), 1.0, z) for i, z in enumerate(multipliers)))
    expected = sum(z**-2 for z in multipliers) ** -0.5
    assert joint.noise_multiplier == pytest.approx(expected, rel=1e-12)
    assert joint.noise_multiplier <= min(multipliers) * (1 + 1e-12)


def test_the_bounds_do_not_enter_the_joint_multiplier() -> None:
    """Scaling a part and its noise alike is the same mechanism."""
    one = mechanism(Part("a", 1.0, 2.0), Part("b", 100.0, 3.0))
    assert (
        one.noise_multiplier == mechanism(Part("a", 7.0, 2.0), Part("b", 0.1, 3.0)).noise_multiplier
    )


def test_one_part_without_noise_is_a_release_without_noise() -> None:
    """It cannot hide among noised parts."""
    assert mechanism(UPDATE, Part("loss", 8.0, 0.0)).noise_multiplier == 0.0


def test_the_worst_neighbour_is_as_far_as_the_joint_multiplier_says() -> None:
    """One unit at every bound, in units of each part's noise, has norm 1 / z_eff."""
    joint = mechanism(UPDATE, LOSS, Part("sketch", 0.5, 8.0))
    distance = math.sqrt(sum((part.bound / part.noise_std) ** 2 for part in joint.parts))
    assert distance == pytest.approx(1.0 / joint.noise_multiplier)


def test_the_event_says_what_was_released() -> None:
    """D3: unit, rate and sensitivity come from the mechanism; moving the clip moves the event."""
    event = mechanism(UPDATE, LOSS, rate=0.3).event("North", 7)
    assert (event.region, event.round, event.release) == ("North", 7, "update+loss")
    assert (event.population, event.unit, event.sampling_rate) == ("train", "example", 0.3)
    assert event.noise_multiplier == mechanism(UPDATE, LOSS).noise_multiplier
    assert event.sensitivity == {"update": 0.5, "loss": 8.0}
    moved = mechanism(Part("update", 1.5, 2.0), LOSS).event("North", 7)
    assert moved.sensitivity["update"] == 1.5


def test_noise_has_the_declared_standard_deviation_over_the_whole_vector() -> None:
    """D2: N(0, (z C)^2) on the sum: chi-square for the size, Kolmogorov-Smirnov for the shape."""
    n = 50_000
    true = torch.linspace(-10.0, 10.0, n)
    sums = {"update": true.clone(), "loss": torch.tensor([3.0])}
    released = mechanism(UPDATE, LOSS).noised(sums, PrivateRandomness(KEY))
    noise = (released["update"] - true).double() / UPDATE.noise_std
    low, high = stats.chi2.interval(1.0 - LEVEL, n)
    assert low < float(noise.square().sum()) < high
    assert stats.kstest(noise.numpy(), "norm").pvalue > LEVEL
    for part in noise.split(n // 5):  # no stretch of the vector is left out
        low, high = stats.chi2.interval(1.0 - LEVEL / 5, part.numel())
        assert low < float(part.square().sum()) < high


def test_each_part_has_noise_of_its_own() -> None:
    """Parts are scaled by their own bound, and do not share their draws."""
    n = 20_000
    sums = {"update": torch.zeros(n), "loss": torch.zeros(n)}
    released = mechanism(UPDATE, LOSS).noised(sums, PrivateRandomness(KEY))
    low, high = stats.chi2.interval(1.0 - LEVEL, n)
    for part in (UPDATE, LOSS):
        assert low < float((released[part.name].double() / part.noise_std).square().sum()) < high
    correlation = torch.corrcoef(torch.stack([released["update"], released["loss"]]))[0, 1]
    assert abs(float(correlation)) < 4.0 / math.sqrt(n)


def test_an_empty_sample_is_noised_like_any_other() -> None:
    """D5: zero plus the same noise; whether anybody was drawn cannot be told."""
    empty = mechanism(UPDATE).noised({"update": torch.zeros(99)}, PrivateRandomness(KEY))
    full = mechanism(UPDATE).noised({"update": torch.full((99,), 3.0)}, PrivateRandomness(KEY))
    assert torch.allclose(full["update"] - empty["update"], torch.full((99,), 3.0), atol=1e-5)
    assert bool((empty["update"] != 0).all())


def test_without_noise_the_sum_is_untouched() -> None:
    """Multiplier 0 is no noise at all, and is charged as such."""
    off = mechanism(Part("update", 0.5, 0.0))
    sums = {"update": torch.ones(3)}
    assert torch.equal(off.noised(sums, PrivateRandomness(KEY))["update"], torch.ones(3))


@pytest.mark.parametrize("names", [[], ["update"], ["update", "loss", "more"], ["update", "Loss"]])
def test_a_sum_that_was_not_planned_is_never_released(names: list[str]) -> None:
    """More, fewer or other parts than declared are an error, before any noise is drawn."""
    with pytest.raises(ValueError, match="are not the parts"):
        mechanism(UPDATE, LOSS).noised({n: torch.zeros(1) for n in names}, PrivateRandomness(KEY))
