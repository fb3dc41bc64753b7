"""What the guesses of an attacker prove about epsilon: bounds from below, as pure functions.

Source: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run" (2023): many
canaries, each in or out of **one** training by a fair coin, and one attacker who guesses the coins
of as many as it likes. Canaries need not be independent of each other, and nothing is assumed of
how the attacker scores them.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_MOST_EPSILON = 50.0


def binomial_log_pmf(trials: int, probability: float) -> Floats:
    """Return log P[Binomial(n, p) = k] for k = 0..n; (n + 1,). `probability` in (0, 1)."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    k = np.arange(trials + 1)
    ways = log_factorial[-1] - log_factorial - log_factorial[::-1]
    log_odds: Floats = ways + k * math.log(probability) + (trials - k) * math.log1p(-probability)
    return log_odds


def p_value(guesses: int, right: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return the chance, at most, of so many right guesses if the training were (eps, delta)-DP.

    Theorem 5.2 of the paper: with W ~ Binomial(r, e^eps / (1 + e^eps)),
    ``P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i``. For delta = 0 each guess is at best a
    randomised response, and the bound is met by it.

    Parameters
    ----------
    guesses : int
        r, canaries whose coin was guessed.
    right : int
        v of these guesses were right.
    canaries : int
        m, all coins that were thrown, guessed or not.
    epsilon, delta : float
        The claim; neighbours differ in one canary, added or removed.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError(f"{right} right of {guesses} guesses on {canaries} canaries")
    if guesses == 0:
        return 1.0
    # 1 / (1 + e^eps) is taken first: e^eps / (1 + e^eps) rounds to 1 where epsilon is large.
    wrong = 1.0 / (1.0 + math.exp(epsilon))
    pmf = np.exp(binomial_log_pmf(guesses, wrong)[::-1])
    tail = float(pmf[right:].sum())
    just_below = np.cumsum(pmf[:right][::-1])  # P[v > W >= v - i] for i = 1..v
    worst = float((just_below / np.arange(1, right + 1)).max()) if right else 0.0
    return min(1.0, tail + 2.0 * canaries * delta * worst)


def epsilon_bound(
    guesses: int, right: int, canaries: int, delta: float, confidence: float
) -> float:
    """Return the largest epsilon that these guesses rule out, or 0.

    A training that is (eps, delta)-DP brings about a bound above eps with a chance of at most
    ``1 - confidence``. What an attacker may not do is choose how many to guess by how well it
    went: `best_bound` corrects for that.
    """

    def ruled_out(epsilon: float) -> bool:
        return p_value(guesses, right, canaries, epsilon, delta) <= 1.0 - confidence

    if not ruled_out(0.0):
        return 0.0
    low, high = 0.0, _MOST_EPSILON
    while high - low > 1e-4:  # its lower end is returned
        middle = 0.5 * (low + high)
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Bound:
    """A lower bound on epsilon and the guesses that gave it.

    Attributes
    ----------
    epsilon : float
    guessed_in, guessed_out : int
        The canaries of highest and of lowest score.
    right : int
    canaries : int
    """

    epsilon: float
    guessed_in: int
    guessed_out: int
    right: int
    canaries: int


def right_guesses(scores: Floats, included: Bools, top: int, bottom: int) -> int:
    """Return how many are right if the `top` scores are guessed in, the `bottom` ones out."""
    order = np.argsort(-scores, kind="stable")
    return int(included[order[:top]].sum() + (~included[order[len(order) - bottom :]]).sum())


def best_bound(
    scores: Floats,
    included: Bools,
    choices: list[tuple[float, float]],
    delta: float,
    confidence: float,
) -> Bound:
    """Return the best bound over some numbers of guesses, at a joint confidence.

    Parameters
    ----------
    scores : array (m,)
        High for a canary that seems to be in.
    included : array of bool (m,)
        The coins.
    choices : list of (share guessed in, share guessed out)
        Chosen before the coins are looked at. Each is tested at ``(1 - confidence) / len``
        (Bonferroni), so that taking the best is no cheat.
    """
    m = len(scores)
    each = 1.0 - (1.0 - confidence) / len(choices)
    bounds = []
    for share_in, share_out in choices:
        top, bottom = round(share_in * m), round(share_out * m)
        right = right_guesses(scores, included, top, bottom)
        epsilon = epsilon_bound(top + bottom, right, m, delta, each)
        bounds.append(Bound(epsilon, top, bottom, right, m))
    return max(bounds, key=lambda bound: bound.epsilon)


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Return bounds from below and above on a proportion, each at `confidence` by itself."""

    def solve(successes_: int) -> float:
        """Return the p at which so many successes or more have the chance 1 - confidence."""
        low, high = 0.0, 1.0
        while high - low > 1e-9:
            middle = 0.5 * (low + high)
            tail = float(np.exp(binomial_log_pmf(trials, middle))[successes_:].sum())
            low, high = (low, middle) if tail > 1.0 - confidence else (middle, high)
        return low

    lower = solve(successes) if successes else 0.0
    failures = trials - successes
    return lower, 1.0 - (solve(failures) if failures else 0.0)


def threshold_bound(scores: Floats, included: Bools, delta: float, confidence: float) -> float:
    """Return the classical bound ``log((TPR - delta) / FPR)`` at a threshold, from rates.

    The threshold is chosen on the even canaries, the rates (by Clopper and Pearson) are those
    of the odd ones. It takes canaries for independent trials: in one training that holds only as
    far as they do not touch each other, so it is an estimate beside `best_bound`, no proof.
    """

    def bound(threshold: float, half: slice) -> float:
        found, truth = scores[half] >= threshold, included[half]
        each = 1.0 - (1.0 - confidence) / 2.0
        caught, _ = clopper_pearson(int((found & truth).sum()), int(truth.sum()), each)
        _, false = clopper_pearson(int((found & ~truth).sum()), int((~truth).sum()), each)
        return math.log(max(caught - delta, 1e-300) / max(false, 1e-300))

    even, odd = slice(0, None, 2), slice(1, None, 2)
    candidates = np.unique(np.quantile(scores[even], np.linspace(0.5, 0.9999, 40)))
    best = max((float(t) for t in candidates), key=lambda threshold: bound(threshold, even))
    return max(0.0, bound(best, odd))
