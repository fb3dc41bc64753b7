"""Private randomness: the right distributions, secure by default, reproducible only if asked."""

import numpy as np
import pytest
import torch
from scipy import stats

from regionfed.randomness import (
    PrivateRandomness,
    SeededRandomness,
    derive_seed,
    randomness_source,
    secure_randomness,
)

KEY = bytes(range(32))
# Keys are fixed, so a test either always passes or never does; 1e-3 leaves room for ill luck.
LEVEL = 1e-3


def test_the_same_purpose_has_the_same_stream() -> None:
    """In tests a release can be drawn again, from any process and in any order."""
    a, b = SeededRandomness(5), SeededRandomness(5)
    b("something", "else", 1).normal(10)
    assert torch.equal(
        a("update", "run", 1, "North").normal(99), b("update", "run", 1, "North").normal(99)
    )


@pytest.mark.parametrize(
    "other",
    [
        ("update", "run", 2, "N"),
        ("update", "run", 1, "S"),
        ("rho", "run", 1, "N"),
        ("update", "run1", "", "N"),
    ],
)
def test_another_purpose_has_another_stream(other: tuple[object, ...]) -> None:
    """Round, region, run and purpose all count, and parts cannot run into each other."""
    source = SeededRandomness(5)
    one, two = source("update", "run", 1, "N").uniform(1000), source(*other).uniform(1000)
    assert not np.isin(one, two).any()


def test_another_seed_has_another_stream() -> None:
    """The seed counts."""
    one, two = (SeededRandomness(s)("update").uniform(1000) for s in (0, 1))
    assert not np.isin(one, two).any()


def test_secure_streams_never_repeat() -> None:
    """Same purpose, independent streams: 64 streams share no number, nor a key."""
    draws = np.concatenate([secure_randomness("update", 1).uniform(64) for _ in range(64)])
    assert len(np.unique(draws)) == draws.size


def test_a_stream_does_not_repeat_itself() -> None:
    """Two draws from one stream are different draws."""
    stream = PrivateRandomness(KEY)
    assert not torch.equal(stream.normal(100), stream.normal(100))


def test_one_long_draw_is_spread_over_blocks() -> None:
    """Vectors longer than a block (2^20) have no seam and no repetition."""
    normals = PrivateRandomness(KEY).normal((1 << 20) + 7)
    assert not torch.equal(normals[:7], normals[1 << 20 :])
    assert bool((normals[1 << 20 :] != 0).all())


def test_uniforms_lie_in_the_half_open_interval() -> None:
    """(0, 1]: a zero would make the logarithm of Box-Muller infinite."""
    u = PrivateRandomness(KEY).uniform(200_000)
    assert u.dtype == np.float64 and u.shape == (200_000,)
    assert u.min() > 0.0 and u.max() <= 1.0
    assert stats.kstest(u, "uniform").pvalue > LEVEL


def test_the_extreme_words_stay_in_the_interval() -> None:
    """All bits 0 give 2^-53, all bits 1 give exactly 1: both ends are finite under log."""

    class Fixed:
        def __init__(self, byte: int) -> None:
            self.byte = byte

        def update(self, data: bytes) -> bytes:
            return bytes([self.byte]) * len(data)

    for byte, expected in ((0, 2.0**-53), (255, 1.0)):
        randomness = PrivateRandomness(KEY)
        randomness._stream = Fixed(byte)  # type: ignore[assignment]
        assert randomness.uniform(3).tolist() == [expected] * 3
        assert bool(torch.isfinite(randomness.normal(3)).all())


def test_normals_are_standard_normal() -> None:
    """Kolmogorov-Smirnov, mean, variance and fourth moment; Gaussian and not something alike."""
    n = 200_000
    x = PrivateRandomness(KEY).normal(n)
    assert x.dtype == torch.float32
    values = x.double().numpy()
    assert stats.kstest(values, "norm").pvalue > LEVEL
    z = stats.norm.ppf(1 - LEVEL / 2)
    assert abs(values.mean()) < z / np.sqrt(n)
    assert abs(values.var() - 1.0) < z * np.sqrt(2.0 / n)
    assert abs(stats.kurtosis(values)) < z * np.sqrt(24.0 / n)


def test_normals_are_independent_of_their_neighbours() -> None:
    """No correlation at small lags."""
    n = 100_000
    x = PrivateRandomness(KEY).normal(n).double().numpy()
    for lag in (1, 2, 3):
        assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < 4.0 / np.sqrt(n)


@pytest.mark.parametrize("p", [0.01, 0.5, 0.99])
def test_coins_have_their_probability(p: float) -> None:
    """A binomial test of a hundred thousand coins."""
    heads = int(PrivateRandomness(KEY).bernoulli(p, 100_000).sum())
    assert stats.binomtest(heads, 100_000, p).pvalue > LEVEL


def test_coins_at_the_ends() -> None:
    """Probability 1 takes everybody, 0 nobody."""
    assert PrivateRandomness(KEY).bernoulli(1.0, 1000).all()
    assert not PrivateRandomness(KEY).bernoulli(0.0, 1000).any()
    assert PrivateRandomness(KEY).bernoulli(0.5, 0).shape == (0,)


def test_noise_is_secure_unless_a_seed_is_given() -> None:
    """-1 is the operating system's randomness; 0 is already a seed."""
    assert randomness_source(-1) is secure_randomness
    assert isinstance(randomness_source(0), SeededRandomness)


def test_seeds_are_stable_distinct_and_fit_63_bits() -> None:
    """A pinned value: it must not change with a version, or old runs cannot be repeated."""
    assert derive_seed(0, "sketch") == derive_seed(0, "sketch")
    seeds = {derive_seed(*p) for p in [(0, "a"), (1, "a"), (0, "b"), ("0a",), (0, "a", "")]}
    assert len(seeds) == 5
    assert all(0 <= s < 2**63 for s in seeds)
    assert derive_seed("pinned", 1) == 3624491848650805605
