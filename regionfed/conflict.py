"""How far a region's gradient is from the world's, and what that means for its weight.

Pure functions of released values: they cost no privacy.
"""

import math
import statistics
from collections.abc import Sequence


def noise_floor(
    dimensions: int, stds: Sequence[float], weights: Sequence[float], index: int
) -> float:
    """Return the part of E[d_r^2] that is noise alone.

    ``n [(1 - w_r)^2 tau_r^2 + sum_{s != r} w_s^2 tau_s^2]`` for d_r = ||g_r - sum_s w_s g_s||
    in n dimensions with independent noise of std tau_s on each coordinate of g_s. With equal
    weights and stds this is ``tau^2 n (1 - 1/R)``.

    Parameters
    ----------
    dimensions : int
    stds, weights : sequence of float, one per region; weights sum to 1
    index : int
        The region r.
    """
    own = (1.0 - weights[index]) ** 2 * stds[index] ** 2
    others = sum(
        w**2 * tau**2 for s, (w, tau) in enumerate(zip(weights, stds, strict=True)) if s != index
    )
    return dimensions * (own + others)


def conflict(squared_distance: float, floor: float) -> float:
    """Return d_r = sqrt(max(||g_r - g||^2 - noise floor, 0)): unbiased in the square."""
    return math.sqrt(max(squared_distance - floor, 0.0))


def centre_and_spread(conflicts: Sequence[float]) -> tuple[float, float]:
    """Return the median of round-1 conflicts and their spread (mean absolute deviation from it).

    The spread scales the sigmoid, so that its slope does not depend on the model's size or on
    the clip bound. It is 0 for one region or equal conflicts.
    """
    middle = statistics.median(conflicts)
    return middle, statistics.fmean(abs(d - middle) for d in conflicts)


def personalisation_weight(
    conflict_: float, median: float, spread: float, alpha_min: float, gain: float
) -> float:
    """Return alpha_r = a_min + (1 - a_min) sigmoid(k (d_r - m) / spread), in [a_min, 1].

    Where the spread is 0 (one region, equal conflicts) nothing distinguishes the regions and
    the sigmoid stands at its middle.
    """
    distance = (conflict_ - median) / spread if spread > 0.0 and gain > 0.0 else 0.0
    # tanh is the sigmoid that cannot overflow.
    sigmoid = 0.5 * (1.0 + math.tanh(0.5 * gain * distance))
    return alpha_min + (1.0 - alpha_min) * sigmoid


def label_divergence(regional: Sequence[float], world: Sequence[float]) -> float:
    """Return h_r = KL(regional || world) of two histograms in nats; 0 where there are no labels.

    Noised counts may be negative: they count as none. One is added to each count (Laplace), so
    that the divergence is finite whatever is missing on either side.

    Parameters
    ----------
    regional, world : sequences of equal length
        Noised counts by label.
    """
    if not regional:
        return 0.0
    p, q = _shares(regional), _shares(world)
    return max(0.0, math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))


def _shares(counts: Sequence[float]) -> list[float]:
    smoothed = [max(count, 0.0) + 1.0 for count in counts]
    total = math.fsum(smoothed)
    return [count / total for count in smoothed]
