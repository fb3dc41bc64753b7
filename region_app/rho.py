"""Golden-section search whose every possible point is known before any value is.

A search of k evaluations visits few distinct points whatever the values turn out to be, so all
of them are asked for in one message and the search is replayed on the answers, bit for bit.
Source: Kiefer (1953), "Sequential minimax search for a maximum".
"""

from collections.abc import Callable

_GOLDEN = (5**0.5 - 1.0) / 2.0


def _inner(low: float, high: float) -> tuple[float, float]:
    """Return the two golden points of an interval."""
    width = _GOLDEN * (high - low)
    return high - width, low + width


def golden_section(
    value: Callable[[float], float], low: float, high: float, evaluations: int
) -> list[tuple[float, float]]:
    """Return the (point, value) pairs that the search visits, in order; 2 <= `evaluations`.

    For a unimodal function the least value visited is within ``0.618^(k - 1) (high - low)`` of
    the minimum.
    """
    left, right = _inner(low, high)
    visited = [(left, value(left)), (right, value(right))]
    at_left, at_right = visited[0][1], visited[1][1]
    for _ in range(evaluations - 2):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = _inner(low, high)[0]
            at_left = value(left)
            visited.append((left, at_left))
        else:
            low, left, at_left = left, right, at_right
            right = _inner(low, high)[1]
            at_right = value(right)
            visited.append((right, at_right))
    return visited


def possible_points(low: float, high: float, evaluations: int) -> list[float]:
    """Return every point that `golden_section` may visit, sorted.

    Found by running it on each of the 2^(k-2) possible sequences of comparisons, so the points
    are the very floats that the replay will ask for.
    """
    points: set[float] = set()
    for choices in range(2 ** (evaluations - 2)):
        points.update(x for x, _ in _forced(low, high, evaluations, choices))
    return sorted(points)


def _forced(low: float, high: float, evaluations: int, choices: int) -> list[tuple[float, float]]:
    left, right = _inner(low, high)
    visited = [(left, 0.0), (right, 0.0)]
    for bit in range(evaluations - 2):
        if choices >> bit & 1:
            high, right = right, left
            left = _inner(low, high)[0]
            visited.append((left, 0.0))
        else:
            low, left = left, right
            right = _inner(low, high)[1]
            visited.append((right, 0.0))
    return visited


def bracket(previous: float, highest: float) -> tuple[float, float]:
    """Return the interval to search: around the last rho, or all of it when that was 0."""
    previous = min(previous, highest)
    if previous <= 0.0:
        return 0.0, highest
    return 0.5 * previous, min(2.0 * previous, highest)


def best_rho(
    points: list[float],
    values: list[float],
    low: float,
    high: float,
    k: int,
    *,
    zero: bool = True,
) -> float:
    """Replay the search on the values and return the best point visited, or 0 if none is better.

    Parameters
    ----------
    points, values : lists of equal length
        From `possible_points`, with the loss at each relative to the loss at 0.
    zero : bool
        Whether 0 is a candidate; the published search has none.
    """
    known = dict(zip(points, values, strict=True))
    visited = golden_section(known.__getitem__, low, high, k)
    if zero:
        visited = [(0.0, 0.0), *visited]
    return min(visited, key=lambda pair: pair[1])[0]
