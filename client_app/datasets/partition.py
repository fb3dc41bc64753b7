"""Share rows out over devices: label-skewed, deterministic, never below a minimum."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regionfed.errors import DataError

Indices = NDArray[np.intp]

SMALLEST_ALPHA, LARGEST_ALPHA = 1e-9, 1e9


def dirichlet_shares(
    classes: int, parts: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw, for every class, the share of it that each part gets.

    Parameters
    ----------
    classes, parts : int
        Number of rows and columns.
    alpha : float
        Concentration, the same for all parts: near 0 one part takes a class whole,
        large gives even shares.
    rng : numpy.random.Generator
        Source of the draws.

    Returns
    -------
    NDArray, shape (classes, parts)
        Rows are non-negative, finite and sum to 1, however small `alpha` is.

    Raises
    ------
    DataError
        If `alpha` is not between 1e-9 and 1e9, or there is no part.
    """
    if not (math.isfinite(alpha) and SMALLEST_ALPHA <= alpha <= LARGEST_ALPHA):
        raise DataError(
            f"Dirichlet concentration {alpha} is not between {SMALLEST_ALPHA} and "
            f"{LARGEST_ALPHA}; try 0.3 for skewed parts, 100 for even ones."
        )
    if parts < 1:
        raise DataError(f"cannot share rows out over {parts} parts; ask for at least 1.")
    # A gamma variate of a tiny shape underflows to 0, and a row of zeros becomes NaN. Its
    # logarithm does not: log G(a) = log G(a + 1) + log(U) / a, and -log(U) is exponential.
    shape = (classes, parts)
    logs = np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    shares: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return shares


def dirichlet_partition(
    labels: Sequence[int] | NDArray[Any],
    parts: int,
    alpha: float,
    minimum: int,
    rng: np.random.Generator,
) -> list[Indices]:
    """Share rows out so that each class follows its own Dirichlet draw over the parts.

    Nothing is redrawn: a part that came out below `minimum` is filled from the parts that
    can spare rows, in proportion to what they can spare, and with few classes rather than
    a mixture, so that a filled part is as skewed as the others.

    Parameters
    ----------
    labels : sequence of int or NDArray, shape (n,)
        Class of every row; any values that can be sorted.
    parts : int
        Number of parts.
    alpha : float
        Concentration of the draw, see `dirichlet_shares`.
    minimum : int
        Rows that every part gets at least.
    rng : numpy.random.Generator
        Source of the draws; the same state gives the same parts.

    Returns
    -------
    list of NDArray
        `parts` ascending arrays of row numbers; together each of 0 .. n - 1 exactly once.

    Raises
    ------
    DataError
        If there are fewer than ``parts * minimum`` rows, or an argument is out of range.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> [part.size for part in dirichlet_partition([0] * 10, 3, 1e-3, 2, rng)]
    [6, 2, 2]
    """
    array = np.asarray(labels)
    if array.ndim != 1:
        raise DataError(f"labels must be a flat list, one per row; found shape {array.shape}.")
    if minimum < 0:
        raise DataError(f"a part cannot hold at least {minimum} rows; use 0 or more.")
    if array.size < parts * minimum:
        raise DataError(
            f"{array.size} rows cannot give {parts} parts at least {minimum} each: that takes "
            f"{parts * minimum}. Lower the minimum to {array.size // parts}, ask for fewer "
            f"parts, or bring more data."
        )
    classes, codes = np.unique(array, return_inverse=True)
    edges = np.cumsum(dirichlet_shares(len(classes), parts, alpha, rng), axis=1)
    owner = np.empty(array.size, dtype=np.intp)
    for code in range(len(classes)):
        rows = rng.permutation(np.flatnonzero(codes == code))
        # Systematic sampling: evenly spaced points with one random offset give each part its
        # share to within one row and without bias, also for a class of a single row.
        points = (np.arange(rows.size) + rng.random()) / rows.size
        owner[rows] = np.minimum(np.searchsorted(edges[code], points, side="right"), parts - 1)
    owner = _fill(owner, codes, parts, minimum, rng)
    return [np.flatnonzero(owner == part) for part in range(parts)]


def _fill(
    owner: Indices, codes: Indices, parts: int, minimum: int, rng: np.random.Generator
) -> Indices:
    """Move rows until every part holds `minimum`; the rows are known to suffice."""
    sizes = np.bincount(owner, minlength=parts)
    spare, short = np.maximum(sizes - minimum, 0), np.maximum(minimum - sizes, 0)
    if not short.any():
        return owner
    # Differences of a floored cumulative sum: whole numbers that add up to the need, none
    # of them above what its part can spare.
    gives = np.diff(np.cumsum(spare) * short.sum() // spare.sum(), prepend=0)
    shuffled = rng.permutation(owner.size)
    given = np.concatenate(
        [shuffled[owner[shuffled] == part][: gives[part]] for part in range(parts)]
    )
    # In order of class, so that a filled part gets few classes and not the global mixture.
    filled = owner.copy()
    filled[given[np.argsort(codes[given], kind="stable")]] = np.repeat(np.arange(parts), short)
    return filled


def split_by_group(groups: Sequence[str], fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Hold out about `fraction` of the groups; a group is never on both sides.

    The side of a group depends on its name and `seed` alone, never on the other rows: it is
    the same in every task, file, device and process, and stays when rows are added.

    Parameters
    ----------
    groups : sequence of str, length n
        Group of every row.
    fraction : float
        Share of the groups to hold out, in [0, 1).
    seed : int
        Chooses which groups; any whole number.

    Returns
    -------
    train, test : NDArray
        Ascending row numbers; either may be empty when there are few groups.

    Raises
    ------
    DataError
        If `fraction` is not in [0, 1).
    """
    if not 0 <= fraction < 1:
        raise DataError(f"cannot hold out a fraction of {fraction}; use 0 or more, below 1.")
    held_out = np.array([_position(group, seed) < fraction for group in groups], dtype=np.bool_)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _position(group: str, seed: int) -> float:
    """Hash a group into [0, 1)."""
    text = f"{seed}\n{group}".encode("utf-8", "surrogatepass")
    # 53 bits are what a float holds exactly, so the result stays below 1.
    return (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 11) / 2**53
