"""Bounds of epsilon from below: right by brute force, and honest at the stated confidence."""

import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.audit_statistics import (
    best_bound,
    binomial_log_pmf,
    clopper_pearson,
    epsilon_bound,
    p_value,
    right_guesses,
    threshold_bound,
)

SHARES = [(s, t) for s in (0.02, 0.1, 0.5) for t in (0.0, s)]


def responses(rng, epsilon, coins, reveal=0.0):
    """Randomised response, that with chance `reveal` tells the coin: (epsilon, reveal)-DP."""
    honest = rng.random(len(coins)) < math.exp(epsilon) / (1.0 + math.exp(epsilon))
    told = rng.random(len(coins)) < reveal
    return np.where(honest | told, coins, ~coins)


def gaussian_epsilon(mu, delta):
    """Epsilon of a Gaussian of sensitivity mu and std 1 (Balle and Wang 2018, theorem 8)."""

    def delta_at(e):
        return stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)

    low, high = 0.0, 50.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize(("trials", "probability"), [(1, 0.5), (40, 0.03), (3000, 0.9)])
def test_the_binomial_is_scipys(trials: int, probability: float) -> None:
    expected = stats.binom.logpmf(np.arange(trials + 1), trials, probability)
    np.testing.assert_allclose(binomial_log_pmf(trials, probability), expected, atol=1e-9)


@pytest.mark.parametrize("right", [0, 1, 30, 47, 60])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
def test_the_p_value_is_the_theorems(right: int, delta: float) -> None:
    """Theorem 5.2 written out term by term."""
    guesses, canaries, epsilon = 60, 200, 1.1
    chance = math.exp(epsilon) / (1.0 + math.exp(epsilon))
    w = stats.binom(guesses, chance)
    tail = sum(w.pmf(k) for k in range(right, guesses + 1))
    alpha = max(
        (2.0 / i * sum(w.pmf(k) for k in range(right - i, right)) for i in range(1, right + 1)),
        default=0.0,
    )
    expected = min(1.0, tail + alpha * canaries * delta)
    assert p_value(guesses, right, canaries, epsilon, delta) == pytest.approx(expected, rel=1e-9)


def test_the_p_value_is_monotone() -> None:
    by_epsilon = [p_value(50, 45, 80, e, 1e-4) for e in np.linspace(0.0, 8.0, 30)]
    by_right = [p_value(50, right, 80, 1.0, 1e-4) for right in range(51)]
    by_delta = [p_value(50, 45, 80, 0.5, d) for d in (0.0, 1e-6, 1e-4, 1e-2)]
    assert by_epsilon == sorted(by_epsilon)
    assert by_right == sorted(by_right, reverse=True)
    assert by_delta == sorted(by_delta)
    assert by_delta[0] < by_delta[-1]


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_randomised_response_is_bounded_honestly(epsilon: float) -> None:
    """Above the truth in 5 % of trainings at most: the bound is met by this mechanism."""
    rng = np.random.default_rng(0)
    trials, m = 400, 200
    above = 0
    for _ in range(trials):
        coins = rng.random(m) < 0.5
        right = int((responses(rng, epsilon, coins) == coins).sum())
        above += p_value(m, right, m, epsilon, 0.0) < 0.05  # the bound is above the truth
    assert above <= stats.binom.ppf(0.999, trials, 0.05)
    assert above > 0  # and no more cautious than it has to be


def test_a_mechanism_that_sometimes_tells_is_bounded_honestly() -> None:
    rng = np.random.default_rng(1)
    trials, m, epsilon, delta = 400, 100, 0.5, 0.01
    above = 0
    for _ in range(trials):
        coins = rng.random(m) < 0.5
        right = int((responses(rng, epsilon, coins, reveal=delta) == coins).sum())
        above += p_value(m, right, m, epsilon, delta) < 0.05
    assert above <= stats.binom.ppf(0.999, trials, 0.05)


def test_with_many_canaries_the_bound_is_near_the_truth() -> None:
    rng = np.random.default_rng(2)
    coins = rng.random(50_000) < 0.5
    right = int((responses(rng, 1.0, coins) == coins).sum())
    assert 0.95 < epsilon_bound(len(coins), right, len(coins), 0.0, 0.95) < 1.0


def test_all_right_proves_what_that_many_coins_can() -> None:
    """``(e^eps / (1 + e^eps))^m = 1 - confidence`` at the bound."""
    m = 8000
    bound = epsilon_bound(m, m, m, 0.0, 0.95)
    assert (1.0 + math.exp(-bound)) ** -m == pytest.approx(0.05, rel=1e-3)
    assert epsilon_bound(0, 0, m, 0.0, 0.95) == 0.0


def test_guesses_are_the_extremes() -> None:
    scores = np.array([0.1, 5.0, -2.0, 3.0])
    coins = np.array([True, True, False, False])
    assert right_guesses(scores, coins, 1, 1) == 2
    assert right_guesses(scores, coins, 2, 0) == 1
    assert right_guesses(scores, coins, 0, 2) == 1
    with pytest.raises(ValueError, match="3 right of 2"):
        p_value(2, 3, 10, 1.0, 0.0)


def test_taking_the_best_of_several_numbers_of_guesses_is_no_cheat() -> None:
    rng = np.random.default_rng(3)
    trials, m = 400, 300
    proven = sum(
        best_bound(rng.normal(size=m), rng.random(m) < 0.5, SHARES, 0.0, 0.95).epsilon > 0.0
        for _ in range(trials)
    )
    assert proven <= stats.binom.ppf(0.999, trials, 0.05)


def test_a_gaussian_is_bounded_from_below() -> None:
    """Scores of a Gaussian mechanism: both bounds stay under its epsilon and tell a good part."""
    rng = np.random.default_rng(4)
    m, mu, delta = 8000, 1.2, 1e-5
    coins = rng.random(m) < 0.5
    scores = rng.normal(size=m) + mu * coins
    truth = gaussian_epsilon(mu, delta)
    bound = best_bound(scores, coins, SHARES, delta, 0.95)
    assert 1.0 < bound.epsilon < truth
    assert 1.0 < threshold_bound(scores, coins, delta, 0.95) < truth


@pytest.mark.parametrize(("successes", "trials"), [(0, 20), (3, 20), (20, 20), (512, 4000)])
def test_proportions_are_bounded_by_clopper_and_pearson(successes: int, trials: int) -> None:
    lower, upper = clopper_pearson(successes, trials, 0.975)
    expected_lower = stats.beta.ppf(0.025, successes, trials - successes + 1) if successes else 0.0
    failures = trials - successes
    expected_upper = stats.beta.ppf(0.975, successes + 1, failures) if failures else 1.0
    assert lower == pytest.approx(expected_lower, abs=1e-6)
    assert upper == pytest.approx(expected_upper, abs=1e-6)
