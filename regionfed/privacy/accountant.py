"""Epsilon of a set of releases, by privacy loss distributions (PLD).

Neighbouring relation: add or remove one unit. Source: Google's dp-accounting, which implements
Doroshenko et al., "Connect the Dots" (2022); every bound is pessimistic (an upper bound).
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from regionfed.errors import PrivacyError

ACCOUNTANT = "PLD (dp-accounting, connect-the-dots)"
NEIGHBOURING = "add-or-remove-one"

# One release, as the accountant sees it: (noise multiplier, sampling rate).
Release = tuple[float, float]
Counts = tuple[tuple[Release, int], ...]


def count_releases(releases: Iterable[Release]) -> Counts:
    """Group equal releases; the order of releases does not matter to epsilon."""
    return tuple(sorted(Counter(releases).items()))


def _event(counts: Counts) -> dp_event.DpEvent:
    def one(noise_multiplier: float, rate: float) -> dp_event.DpEvent:
        gaussian = dp_event.GaussianDpEvent(noise_multiplier)
        return gaussian if rate == 1.0 else dp_event.PoissonSampledDpEvent(rate, gaussian)

    return dp_event.ComposedDpEvent(
        [dp_event.SelfComposedDpEvent(one(z, q), n) for (z, q), n in counts]
    )


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
    for (z, q), _ in counts:
        if not (0.0 <= q <= 1.0 and 0.0 <= z < float("inf")):  # nan is neither
            raise PrivacyError(f"no release has noise multiplier {z} and sampling rate {q}.")
    counts = tuple((release, n) for release, n in counts if n and release[1] > 0.0)
    if not counts:
        return 0.0
    if any(z <= 0.0 for (z, _), _ in counts):
        return float("inf")
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(_event(counts))
    return float(accountant.get_epsilon(delta))


def epsilon_rdp(counts: Counts, delta: float) -> float:
    """Return epsilon by Rényi DP: looser than PLD, an independent check of it."""
    accountant = RdpAccountant()
    accountant.compose(_event(counts))
    return float(accountant.get_epsilon(delta))
