"""Banded noise: the factorisation, its sensitivity by brute force, its covariance, its account."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from regionfed.errors import PrivacyError
from regionfed.privacy.accountant import epsilon
from regionfed.privacy.banded import (
    BandedMechanism,
    banded_square_root,
    carried,
    correlated,
    cyclic_turn,
    least_banded_noise,
    single,
    strategy,
    strategy_row,
    workload,
)
from regionfed.randomness import SeededRandomness
from strategies.optimisers import Momentum


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("rounds", "bands"), [(1, 1), (7, 1), (7, 3), (25, 7), (5, 9)])
def test_c_is_banded_with_unit_columns(rounds: int, bands: int, momentum: float) -> None:
    c = strategy(rounds, bands, momentum)
    np.testing.assert_allclose(np.linalg.norm(c, axis=0), 1.0, rtol=1e-12)
    assert np.array_equal(c, np.tril(c))
    assert np.array_equal(c, np.triu(c, -(bands - 1)))
    b = workload(rounds, momentum) @ np.linalg.inv(c)
    np.testing.assert_allclose(b @ c, workload(rounds, momentum), atol=1e-9)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_with_all_bands_it_is_the_square_root(momentum: float) -> None:
    rounds = 12
    row = banded_square_root(rounds, momentum)
    root = sum(v * np.eye(rounds, k=-i) for i, v in enumerate(row))
    np.testing.assert_allclose((1.0 - momentum) * root @ root, workload(rounds, momentum))


def test_the_workload_is_what_the_server_optimiser_does() -> None:
    """Averaged heavy ball, apart from its correction for starting at zero."""
    gradients = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    momentum, mean, theta = 0.5, torch.zeros(3), torch.zeros(3)
    for t, gradient in enumerate(gradients, 1):
        mean = momentum * mean + (1.0 - momentum) * gradient
        theta = theta - mean
        expected = -torch.from_numpy(workload(6, momentum))[t - 1] @ gradients
        torch.testing.assert_close(theta, expected)
    plain = Momentum(1.0, 0.0)
    theta = torch.zeros(3, dtype=torch.float64)
    for gradient in gradients:
        theta = plain.step(theta, gradient)
    torch.testing.assert_close(theta, -torch.from_numpy(workload(6))[-1] @ gradients)


def patterns(rounds: int, separation: int):
    """All sets of rounds that an example may take part in."""
    for size in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield list(chosen)


def worst_change(c: np.ndarray, separation: int) -> float:
    """Largest norm of C applied to +-1 contributions, over all patterns and signs.

    The norm is convex in each contribution, so that those of full size are the worst. C has no
    negative entry, so that no inner product of its columns is negative: vectors that all point the
    same way are the worst, and those are scalars.
    """
    return max(
        float(np.linalg.norm(c[:, chosen] @ np.array(signs)))
        for chosen in patterns(len(c), separation)
        for signs in itertools.product([1.0, -1.0], repeat=len(chosen))
    )


@pytest.mark.parametrize(("rounds", "bands", "separation"), [(8, 3, 3), (9, 2, 4), (7, 1, 2)])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sensitivity_by_brute_force(
    rounds: int, bands: int, separation: int, momentum: float
) -> None:
    mechanism = BandedMechanism(rounds, bands, separation, 1.0, 0.5, momentum)
    found = 0.5 * worst_change(mechanism.strategy(), separation)
    assert mechanism.sensitivity == pytest.approx(found, rel=1e-9)


def test_more_bands_than_rounds_between_participations_are_refused() -> None:
    assert worst_change(strategy(8, 4), 3) > math.sqrt(3) * 1.05  # sqrt(k) would be no bound
    with pytest.raises(PrivacyError, match="at most 3 bands"):
        BandedMechanism(8, 4, 3, 1.0, 0.5)
    with pytest.raises(PrivacyError, match="0 bands"):
        BandedMechanism(8, 0, 3, 1.0, 0.5)


@pytest.mark.parametrize(("rounds", "separation"), [(25, 7), (8, 3), (6, 6), (5, 9)])
def test_the_schedule_keeps_its_word(rounds: int, separation: int) -> None:
    """Each example is in a round of each cycle, never twice within one, and in k at most."""
    mechanism = BandedMechanism(rounds, 1, separation, 1.0, 1.0)
    turns = [
        [t for t in range(1, rounds + 1) if cyclic_turn(group, separation, t)]
        for group in range(separation)
    ]
    assert max(map(len, turns)) == mechanism.participations
    assert all(b - a == separation for mine in turns for a, b in itertools.pairwise(mine))
    assert sorted(itertools.chain(*turns)) == list(range(1, rounds + 1))


def noises(c: np.ndarray, bands: int, size: int) -> torch.Tensor:
    """The noise of all rounds, made one after the other from the last few."""
    source, made = SeededRandomness(0), []
    for t in range(len(c)):
        start = max(0, t - bands + 1)
        made.append(correlated(c[t, start : t + 1], source(t).normal(size), made[start:]))
    return torch.stack(made)


def test_released_noise_has_the_covariance_of_the_mechanism() -> None:
    rounds, bands, size = 6, 3, 200_000
    c = strategy(rounds, bands)
    inverse = np.linalg.inv(c)
    found = np.cov(noises(c, bands, size).double().numpy())
    expected = inverse @ inverse.T
    # A sample covariance has the variance (s_ii s_jj + s_ij^2) / n.
    scale = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / size)
    assert np.abs((found - expected) / scale).max() < 4.5


def test_undone_by_c_it_is_independent_normal_noise() -> None:
    c = strategy(5, 2)
    white = (torch.from_numpy(c).float() @ noises(c, 2, 5000)).flatten().numpy()
    assert stats.kstest(white, "norm").pvalue > 1e-3


def test_a_missing_past_is_refused() -> None:
    c = strategy(4, 3)
    with pytest.raises(ValueError, match="2 earlier noises are needed, 1 were given"):
        correlated(c[2, :3], torch.zeros(2), [torch.zeros(2)])


def test_it_is_accounted_for_as_one_gaussian() -> None:
    z, delta = least_banded_noise(4.0, 1e-5), 1e-5
    mechanism = BandedMechanism(25, 7, 7, z, 0.5)
    spent = mechanism.epsilon(delta)
    assert spent == epsilon((((z, 1.0), 1),), delta)
    assert 3.98 < spent <= 4.0
    # Exactly (Balle and Wang 2018, theorem 8): PLD stands above it by its grid at most.
    mu = 1.0 / z
    exact = stats.norm.cdf(mu / 2 - spent / mu) - math.exp(spent) * stats.norm.cdf(
        -mu / 2 - spent / mu
    )
    assert exact == pytest.approx(delta, rel=0.05)
    assert exact <= delta * (1 + 1e-6)


def test_epsilon_rises_with_the_participations_and_ends_at_the_whole() -> None:
    mechanism = BandedMechanism(25, 7, 7, 2.0, 0.5)
    by_round = [mechanism.epsilon(1e-5, t) for t in range(26)]
    assert by_round == sorted(by_round)
    assert by_round[0] == 0.0
    assert len(set(by_round[1:])) == mechanism.participations == 4
    assert by_round[7] == epsilon((((4.0, 1.0), 1),), 1e-5)  # once each: sqrt(4) times the noise
    assert by_round[-1] == mechanism.epsilon(1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sums_are_less_noisy_than_with_independent_noise_at_equal_epsilon(momentum: float) -> None:
    """One band is independent noise; with more, errors fall (participation and z are equal)."""
    errors = [
        BandedMechanism(25, bands, 7, 1.0, 0.5, momentum).rms_error() for bands in range(1, 8)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.75 * errors[0]
    independent = BandedMechanism(25, 1, 7, 1.0, 0.5)
    assert independent.rms_error() == pytest.approx(independent.noise_std * math.sqrt(26 / 2))


@pytest.mark.parametrize(("rounds", "bands"), [(1, 1), (7, 1), (7, 3), (25, 7), (5, 9)])
def test_rows_and_what_they_carry_are_those_of_the_whole_matrix(rounds: int, bands: int) -> None:
    c = strategy(rounds, bands)
    inverse = np.linalg.inv(c)
    for t in range(1, rounds + 1):
        row = strategy_row(rounds, bands, t)
        np.testing.assert_allclose(row, c[t - 1, t - len(row) : t], rtol=1e-12)
        assert not c[t - 1, : t - len(row)].any()
        assert single(rounds, bands, t) == pytest.approx(np.linalg.norm(inverse[t - 1]))
    sums = np.ones(rounds) @ inverse
    assert carried(rounds, bands) == pytest.approx(np.linalg.norm(sums) / math.sqrt(rounds))
    assert carried(rounds, bands) <= 1.0 + 1e-12
