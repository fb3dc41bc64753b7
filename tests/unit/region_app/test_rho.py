"""Golden-section search that can be replayed on answers to one message."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import golden, minimize_scalar

from region_app.rho import best_rho, bracket, golden_section, possible_points

GOLDEN = (5**0.5 - 1.0) / 2.0
K = st.integers(2, 8)


def valley(minimum: float, left: float, right: float, power: float) -> Callable[[float], float]:
    """Return a function that falls to `minimum` and rises after it, unlike on both sides."""

    def value(x: float) -> float:
        return float((left if x < minimum else right) * abs(x - minimum) ** power)

    return value


@given(
    low=st.floats(-10.0, 10.0),
    width=st.floats(1e-3, 10.0),
    where=st.floats(0.0, 1.0),
    slopes=st.tuples(st.floats(0.1, 10.0), st.floats(0.1, 10.0)),
    power=st.floats(0.5, 4.0),
    k=st.integers(2, 12),
)
def test_it_closes_in_on_the_minimum(
    low: float, width: float, where: float, slopes: tuple[float, float], power: float, k: int
) -> None:
    """The best of k visits lies within 0.618^(k-1) of the interval from a unimodal minimum."""
    minimum = low + where * width
    value = valley(minimum, *slopes, power)
    visited = golden_section(value, low, low + width, k)
    assert len(visited) == k
    assert all(low <= x <= low + width and v == value(x) for x, v in visited)
    best = min(visited, key=lambda pair: pair[1])[0]
    assert abs(best - minimum) <= GOLDEN ** (k - 1) * width * (1.0 + 1e-9)


@given(low=st.floats(0.0, 2.0), width=st.floats(1e-2, 5.0), k=K, values=st.data())
def test_every_visited_point_was_foreseen_whatever_the_values(
    low: float, width: float, k: int, values: st.DataObject
) -> None:
    """Bit for bit: the replay looks its points up, it does not approximate them."""
    foreseen = possible_points(low, low + width, k)
    table = {x: values.draw(st.floats(-1.0, 1.0)) for x in foreseen}
    visited = golden_section(table.__getitem__, low, low + width, k)
    assert {x for x, _ in visited} <= set(foreseen)
    assert len({x for x, _ in visited}) == k


@given(where=st.floats(0.0, 2.0), k=K)
def test_the_replay_is_the_search(where: float, k: int) -> None:
    """Asking for all points at once finds what asking one by one does."""
    low, high = 0.25, 2.0
    value = valley(where, 1.0, 2.0, 2.0)
    points = possible_points(low, high, k)
    # Relative to the loss at 0, as devices report it.
    losses = [value(x) - value(0.0) for x in points]
    visited = golden_section(lambda x: value(x) - value(0.0), low, high, k)
    expected = min([(0.0, 0.0), *visited], key=lambda pair: pair[1])[0]
    assert best_rho(points, losses, low, high, k) == expected


@pytest.mark.parametrize(("k", "count"), [(2, 2), (3, 4), (4, 8), (5, 15), (6, 26)])
def test_few_points_are_possible(k: int, count: int) -> None:
    """Few enough for one message; sorted, distinct, and inside the interval."""
    points = possible_points(0.0, 1.0, k)
    assert points == sorted(set(points)) and points[0] > 0.0 and points[-1] < 1.0
    assert len(points) <= count


@pytest.mark.parametrize("minimum", [0.5, 0.7, 0.9, 1.1])
def test_it_visits_what_scipy_visits(minimum: float) -> None:
    """The same points in the same order as scipy.optimize.golden from the same bracket."""
    low, high, k = 0.0, 2.0, 10
    first = high - GOLDEN * (high - low)
    seen: list[float] = []

    def value(x: float) -> float:
        seen.append(x)
        return (x - minimum) ** 2 + 0.1 * abs(x - minimum)

    golden(value, brack=(low, first, high), maxiter=k - 2, tol=0.0)
    theirs = seen[3 : 3 + k]  # the first three check the bracket
    ours = [x for x, _ in golden_section(value, low, high, k)]
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_zero_is_always_a_candidate() -> None:
    """When no point is better than doing nothing, rho is 0; a tie counts as no better."""
    points = possible_points(0.5, 2.0, 4)
    assert best_rho(points, [1.0] * len(points), 0.5, 2.0, 4) == 0.0
    assert best_rho(points, [0.0] * len(points), 0.5, 2.0, 4) == 0.0
    assert best_rho(points, [-1e-9] * len(points), 0.5, 2.0, 4) > 0.0


def test_answers_of_another_length_are_refused() -> None:
    """A value that is missing is not guessed."""
    points = possible_points(0.0, 2.0, 4)
    with pytest.raises(ValueError, match="zip"):
        best_rho(points, [0.0] * (len(points) - 1), 0.0, 2.0, 4)


@given(previous=st.floats(0.0, 1e3), highest=st.floats(0.0, 1e3))
def test_the_bracket_is_an_interval_below_the_upper_end(previous: float, highest: float) -> None:
    """For any rho so far and any upper end: 0 <= low <= high <= highest."""
    low, high = bracket(previous, highest)
    assert 0.0 <= low <= high <= highest


def test_the_bracket_is_warm_started() -> None:
    """Around the last rho, and all of it again once that was 0."""
    assert bracket(0.0, 2.0) == (0.0, 2.0)
    assert bracket(0.5, 2.0) == (0.25, 1.0)
    assert bracket(1.5, 2.0) == (0.75, 2.0)


def test_the_search_is_deterministic() -> None:
    """M5: the same values give the same rho, to the last bit."""
    points = possible_points(0.0, 2.0, 6)
    values = [math.sin(5.0 * x) for x in points]
    assert len({best_rho(points, values, 0.0, 2.0, 6) for _ in range(5)}) == 1


def counted(value: Callable[[float], float]) -> tuple[Callable[[float], float], list[float]]:
    seen: list[float] = []

    def counting(x: float) -> float:
        seen.append(x)
        return value(x)

    return counting, seen


@pytest.mark.parametrize("tolerance", [0.1, 0.01, 1e-3])
@pytest.mark.parametrize("minimum", [0.5, 0.9, 1.3])
def test_it_reaches_a_tolerance_with_no_more_evaluations_than_scipy(
    minimum: float, tolerance: float
) -> None:
    """k - 1 = log(tolerance / width) / log(0.618), one more than Fibonacci's optimum at most."""
    low, high = 0.0, 2.0
    k = 1 + math.ceil(math.log(tolerance / (high - low)) / math.log(GOLDEN))
    ours, seen = counted(valley(minimum, 1.0, 2.0, 2.0))
    best = min(golden_section(ours, low, high, k), key=lambda pair: pair[1])[0]
    assert abs(best - minimum) <= tolerance and len(seen) == k
    theirs, theirs_seen = counted(valley(minimum, 1.0, 2.0, 2.0))
    # scipy's tolerance is relative to the points themselves.
    found = minimize_scalar(
        theirs,
        bracket=(low, high - GOLDEN * (high - low), high),
        method="golden",
        options={"xtol": tolerance / 2.0},
    )
    assert abs(found.x - minimum) <= 2.0 * tolerance
    assert len(seen) <= len(theirs_seen)
    # Fibonacci search of n evaluations leaves 1 / F(n + 1) of the interval; none does better.
    fibonacci = [1, 1]
    while fibonacci[-1] < (high - low) / tolerance:
        fibonacci.append(sum(fibonacci[-2:]))
    optimum = len(fibonacci) - 1
    assert k <= optimum + 1


def test_the_published_search_has_no_zero() -> None:
    """Seven evaluations of a rising loss on [0, 1] end at 0.618^7 = 0.0344."""
    points = possible_points(0.0, 1.0, 7)
    pinned = best_rho(points, points, 0.0, 1.0, 7, zero=False)
    assert pinned == min(points) == pytest.approx(GOLDEN**7)
    assert best_rho(points, points, 0.0, 1.0, 7) == 0.0
