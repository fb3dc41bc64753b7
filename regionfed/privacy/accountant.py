"""Epsilon of a set of releases, by privacy loss distributions (PLD).

Neighbouring relation: add or remove one unit. Source: Google's dp-accounting, which implements
Doroshenko et al., "Connect the Dots" (2022); every bound is pessimistic (an upper bound).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from regionfed.errors import PrivacyError

ACCOUNTANT = "PLD (dp-accounting, connect-the-dots)"
CROSS_CHECK = "RDP (dp-accounting)"

_LARGEST_NOISE = 1e4

# One release, as the accountant sees it: (noise multiplier, sampling rate).
Release = tuple[float, float]
Counts = tuple[tuple[Release, int], ...]


def count_releases(releases: Iterable[Release]) -> Counts:
    """Group equal releases; the order of releases does not matter to epsilon."""
    return tuple(sorted(Counter(releases).items()))


# dp-accounting brings SciPy. Only who adds up imports it: a device, whose process Flower starts
# anew for each message, does not.
def _compose(accountant: Any, counts: Counts) -> Any:
    """Return the accountant after these releases."""
    from dp_accounting import dp_event  # noqa: PLC0415

    def one(noise_multiplier: float, rate: float) -> dp_event.DpEvent:
        gaussian = dp_event.GaussianDpEvent(noise_multiplier)
        return gaussian if rate == 1.0 else dp_event.PoissonSampledDpEvent(rate, gaussian)

    return accountant.compose(
        dp_event.ComposedDpEvent(
            [dp_event.SelfComposedDpEvent(one(z, q), n) for (z, q), n in counts]
        )
    )


def _pld(counts: Counts) -> Any:
    from dp_accounting.pld import PLDAccountant  # noqa: PLC0415

    return _compose(PLDAccountant(value_discretization_interval=1e-3), counts)


def _rdp(counts: Counts) -> Any:
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415

    return _compose(RdpAccountant(), counts)


@lru_cache(maxsize=1024)
def epsilon(counts: Counts, delta: float) -> float:
    """Return epsilon at `delta` of Gaussian releases over Poisson samples.

    Parameters
    ----------
    counts : tuple of ((noise multiplier, sampling rate), count)
        From `count_releases`. A noise multiplier of 0 is a release without noise.
    delta : float
        In (0, 1).

    Returns
    -------
    float
        0 when nothing was released, inf when something was released without noise.

    Raises
    ------
    PrivacyError
        If a number is no noise multiplier or no rate: it must not count as nothing.
    """
    what, known = _costly(counts)
    if known is not None:
        return known
    return float(_pld(what).get_epsilon(delta))


@lru_cache(maxsize=1024)
def epsilon_rdp(counts: Counts, delta: float) -> float:
    """Return epsilon by Rényi DP: looser than PLD, an independent check of it.

    Parameters, ends of the range and errors are those of `epsilon`.
    """
    what, known = _costly(counts)
    if known is not None:
        return known
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of each order that it leaves out; the bound holds
    try:
        return float(_rdp(what).get_epsilon(delta))
    finally:
        log.setLevel(level)


@lru_cache(maxsize=64)
def delta_at(counts: Counts, epsilon_: float) -> float:
    """Return the delta at which the releases of `epsilon` are (epsilon, delta)-DP, by PLD."""
    what, known = _costly(counts)
    if known is not None:
        return 0.0 if known == 0.0 else 1.0
    return float(_pld(what).get_delta(epsilon_))


def least_noise(spent: Callable[[float], float], target: float, unreachable: str) -> float:
    """Return the least noise multiplier (to 1e-3 of itself) with ``spent(z) <= target``.

    Parameters
    ----------
    spent : callable
        Epsilon at a noise multiplier; falls as that grows.
    target : float
    unreachable : str
        What to say, remedy included, if no noise will do.

    Raises
    ------
    PrivacyError
        With that text.
    """
    low, high = 0.0, 1.0
    while spent(high) > target:
        low, high = high, 2.0 * high
        if high > _LARGEST_NOISE:
            raise PrivacyError(unreachable)
    while high - low > 1e-3 * high:
        middle = 0.5 * (low + high)
        if middle > 0.05 and spent(middle) <= target:
            high = middle
        else:
            low = middle
    return high


def _costly(counts: Counts) -> tuple[Counts, float | None]:
    """Return the releases that cost something, or the epsilon that needs no accountant."""
    for (z, q), _ in counts:
        if not (0.0 <= q <= 1.0 and 0.0 <= z < float("inf")):  # nan is neither
            raise PrivacyError(f"no release has noise multiplier {z} and sampling rate {q}.")
    costly = tuple((release, n) for release, n in counts if n and release[1] > 0.0)
    if not costly:
        return (), 0.0
    if any(z <= 0.0 for (z, _), _ in costly):
        return costly, float("inf")
    return costly, None
