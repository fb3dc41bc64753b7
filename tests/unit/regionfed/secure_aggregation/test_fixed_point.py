"""Numbers in the ring: they come back, they cannot overflow, and noise is as stated."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from regionfed.errors import ContractError
from regionfed.randomness import NORMAL_REACH, PrivateRandomness, SeededRandomness
from regionfed.secure_aggregation.fixed_point import FixedPoint, fixed_point
from regionfed.secure_aggregation.terms import Terms

LEVEL = 1e-3
KEY = bytes(range(32))


def terms_of(**changes: Any) -> Terms:
    terms = Terms(
        run="7",
        round=1,
        message_type="train.gradient",
        number=0,
        nonce="00",
        devices=10,
        dropouts=3,
        colluders=1,
        fields=["total", "loss"],
        lengths=[64, 1],
        bounds=[0.5, 8.0],
        noise=[0.0, 0.0],
        examples=600,
    )
    return replace(terms, **changes)


def stream(*which: object) -> PrivateRandomness:
    return SeededRandomness(1)(*which)


@given(
    st.lists(st.floats(-400.0, 400.0, width=32), min_size=64, max_size=64),
    st.floats(-5000.0, 5000.0, width=32),
)
def test_values_come_back_within_half_a_step(total: list[float], loss: float) -> None:
    """Whatever lies within the range; what lies beyond is clamped to it."""
    fixed = fixed_point(terms_of())
    values = {"total": torch.tensor(total), "loss": torch.tensor([loss])}
    back = fixed.decode(fixed.encode(values, stream("none")))
    for segment in fixed.segments:
        most = segment.most * segment.step
        error = back[segment.name] - values[segment.name].clamp(-most, most)
        assert float(error.abs().max()) <= 0.5 * segment.step + 1e-6 * most
    assert fixed.segments[0].most * fixed.segments[0].step == pytest.approx(600 * 0.5)


@pytest.mark.parametrize("noise", [0.0, 0.7, 40.0])
@pytest.mark.parametrize("devices", [1, 3, 10, 1000])
@pytest.mark.parametrize("length", [1, 60_000_000])
def test_overflow_is_impossible(noise: float, devices: int, length: int) -> None:
    """All devices at the end of their range, all noise at the end of its reach: half a ring."""
    terms = terms_of(
        devices=devices,
        dropouts=devices // 3 - (devices % 3 == 0),
        colluders=0,
        fields=["total"],
        lengths=[length],
        bounds=[0.5],
        noise=[noise],
    )
    fixed = fixed_point(terms)
    (segment,) = fixed.segments
    reach = segment.most + math.ceil(NORMAL_REACH * segment.share_steps) + 1
    assert devices * reach <= 2 ** (fixed.bits - 1) - 1
    assert segment.sensitivity <= 1.05 * segment.bound
    assert segment.share_steps == 0.0 or segment.share_steps >= 8.0


def test_the_ends_of_the_range_add_up() -> None:
    """Ten devices at the very end, either side."""
    fixed = fixed_point(terms_of(noise=[1.0, 1.0]))
    for sign in (-1.0, 1.0):
        values = {"total": torch.full((64,), sign * 1e9), "loss": torch.tensor([sign * 1e9])}
        total = fixed.zeros()
        for i in range(10):
            total += fixed.encode(values, stream("end", i))
        back = fixed.decode(total)
        assert torch.allclose(back["total"], torch.full((64,), sign * 3000.0), rtol=0.01)


def test_a_larger_ring_is_taken_where_the_grid_would_be_coarse() -> None:
    """A grid that would add more than a twentieth to the sensitivity is refined."""
    small = fixed_point(terms_of())
    large = fixed_point(terms_of(devices=1000, lengths=[60_000_000, 1]))
    assert (small.bits, large.bits) == (32, 64)
    assert small.dtype == np.dtype("<u4") and large.dtype == np.dtype("<u8")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_by_the_device_itself(value: float) -> None:
    """A4: nobody else can see it."""
    values = {"total": torch.zeros(64), "loss": torch.tensor([value])}
    with pytest.raises(ContractError, match="'loss': holds nan or inf"):
        fixed_point(terms_of()).encode(values, stream("bad"))
    with pytest.raises(ContractError, match="'total': expected 64 values"):
        fixed_point(terms_of()).encode({"total": torch.zeros(63)}, stream("bad"))


def noise_of(fixed: FixedPoint, devices: int) -> torch.Tensor:
    """Return the noise in a sum over so many devices of zeros."""
    (segment,) = fixed.segments
    total = fixed.zeros()
    for i in range(devices):
        total += fixed.encode({segment.name: torch.zeros(segment.length)}, stream("noise", i))
    return fixed.decode(total)[segment.name].double()


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("survivors", [6, 7, 10], ids=["honest alone", "most gone", "all there"])
def test_the_noise_is_as_stated_and_never_less_than_accounted(survivors: int, bits: int) -> None:
    """D4: std = sqrt(m / h) z (C + sqrt(p) step), Gaussian, for every number m of survivors."""
    p, z = 40_000, 1.3
    # A large declared range makes the grid of 32 bits too coarse.
    examples = 600 if bits == 32 else 10_000_000
    terms = terms_of(fields=["total"], lengths=[p], bounds=[0.5], noise=[z], examples=examples)
    fixed = fixed_point(terms)
    assert fixed.bits == bits
    (segment,) = fixed.segments
    assert segment.sensitivity == 0.5 + math.sqrt(p) * segment.step
    accounted = z * segment.sensitivity
    stated = math.sqrt(survivors / 6) * accounted
    noise = noise_of(fixed, survivors)
    low, high = stats.chi2.interval(1.0 - LEVEL, p)
    assert low < float((noise / stated).square().sum()) < high
    assert stats.kstest((noise / stated).numpy(), "norm").pvalue > LEVEL
    # Ten deviations of an estimate would be needed to take more for less.
    assert float(noise.std()) > accounted * (1.0 - 10.0 / math.sqrt(2 * p))


def test_the_least_noise_may_exceed_the_accounted_by_a_stated_factor() -> None:
    assert terms_of().tolerance.excess == pytest.approx(math.sqrt(10 / 6))
    assert terms_of().tolerance.threshold == 7


def test_integer_noise_has_the_tails_and_moments_of_a_gaussian() -> None:
    """Of the sampler that is rounded: moments, Kolmogorov-Smirnov, reach."""
    draws = PrivateRandomness(KEY).normal_block(400_001)
    assert draws.shape == (400_001,) and np.abs(draws).max() < NORMAL_REACH
    assert stats.kstest(draws, "norm").pvalue > LEVEL
    assert abs(stats.kurtosis(draws)) < 0.05
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01
    assert not np.array_equal(draws[:9], PrivateRandomness(bytes(32)).normal_block(9))


class Ends:
    """A stream of all zeros or all ones: the ends of the sampler."""

    def __init__(self, byte: int) -> None:
        self._byte = bytes([byte])

    def update(self, data: bytes) -> bytes:
        return self._byte * len(data)


@pytest.mark.parametrize("byte", [0, 255])
def test_the_sampler_is_bounded_at_its_very_ends(byte: int) -> None:
    """Which overflow being impossible depends on."""
    source = PrivateRandomness(KEY)
    source._stream = Ends(byte)  # type: ignore[assignment]
    draws = source.normal_block(4)
    assert np.isfinite(draws).all() and np.abs(draws).max() < NORMAL_REACH


# ------------------------------------------------------------------------------------- terms
@given(st.integers(1, 40), st.integers(0, 20), st.integers(0, 40))
def test_terms_have_a_threshold_that_two_sets_cannot_both_reach(
    devices: int, dropouts: int, colluders: int
) -> None:
    """2 t > n + K and t > K, or the terms are refused."""
    text = terms_of(devices=devices, dropouts=dropouts, colluders=colluders).to_text()
    if 2 * dropouts + colluders >= devices:
        with pytest.raises(ContractError, match="may drop out"):
            Terms.from_text(text)
        return
    t = Terms.from_text(text).tolerance
    assert 2 * t.threshold > devices + colluders and t.threshold > colluders and t.honest >= 1


@pytest.mark.parametrize(
    "change",
    [
        {"noise": [math.nan, 1.0]},
        {"noise": [-1.0, 1.0]},
        {"noise": [1.0]},
        {"bounds": [0.0, 1.0]},
        {"lengths": [-1, 1]},
        {"fields": ["total", "total"]},
        {"devices": 0},
        {"devices": 10**9},
        {"devices": True},
        {"round": "1"},
        {"examples": 0},
        {"dropouts": -1},
    ],
    ids=str,
)
def test_terms_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    """D1: whatever a coordinator writes into them."""
    import json

    text = json.dumps(
        json.loads(terms_of().to_text()) | change, sort_keys=True, separators=(",", ":")
    )
    with pytest.raises(ContractError, match="terms of secure aggregation"):
        Terms.from_text(text)


def test_one_text_stands_for_terms() -> None:
    """Spaces, or a key that nobody knows, would let two devices sign different texts."""
    text = terms_of().to_text()
    assert Terms.from_text(text) == terms_of()
    for other in (text + " ", text.replace("{", "{ ", 1), text[:-1] + ',"more":1}', "[]", "{"):
        with pytest.raises(ContractError, match="terms of secure aggregation"):
            Terms.from_text(other)
