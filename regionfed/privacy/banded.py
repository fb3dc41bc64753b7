"""Noise that is correlated over rounds: banded matrix factorisation of a sum over rounds.

What a model is made of is ``A G``: G holds a gradient a round (T, p), A the weights with which the
optimiser adds them up. With ``A = B C``, releasing ``A G + B Z`` for independent Gaussian Z is
post-processing of **one** Gaussian release, ``C G + Z``. A round then gets the noise of its row of
``C^-1 Z``: part of what earlier rounds were noised by is taken back, so that sums are less noisy
than with noise that is independent (C = I).

C has b bands: the noise of a round depends on that of the last b - 1 rounds, and two rounds that
are b or more apart touch different rows of ``C G``. So an example that takes part at most k times,
b or more rounds apart, changes ``C G`` by sqrt(k) C in norm if the columns of C have unit norm
(Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", 2023); that gradients are taken
at what was released before changes nothing (Denisov et al. 2022, theorem 2.1). No sampling has to
be secret, nor to be trusted: who takes part when may be public.

C is the banded square root of A (Kalinin and Lampert 2024; Fichtenberger, Henzinger and Upadhyay
2023 for all bands), with its columns normalised. The factorisation decides how good the noise is,
never how private it is: that follows from bands, participation and unit columns alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from regionfed.errors import PrivacyError
from regionfed.privacy.accountant import epsilon, least_noise

Floats = NDArray[np.float64]


def workload(rounds: int, momentum: float = 0.0) -> Floats:
    """Return A (T, T): the weights of gradients in the model after each round.

    Prefix sums for ``momentum = 0``; else those of the averaged heavy ball
    ``m <- b m + (1 - b) g; theta <- theta - m``, in which a gradient comes in by and by.
    """
    ages = np.arange(1.0, rounds + 1.0)
    return _lower_toeplitz(1.0 - momentum**ages, rounds)


def banded_square_root(bands: int, momentum: float = 0.0) -> Floats:
    """Return the first coefficients (bands,) of the Toeplitz square root of `workload`, over c_0.

    The generating function of A is ``(1 - b) / ((1 - x)(1 - b x))``, and that of
    ``(1 - a x)^-1/2`` has the coefficients ``a^k binom(2k, k) / 4^k``.
    """
    k = np.arange(1, bands)
    root = np.concatenate([[1.0], np.cumprod((2.0 * k - 1.0) / (2.0 * k))])
    with_momentum: Floats = np.convolve(root, root * momentum ** np.arange(bands))[:bands]
    return with_momentum


def strategy(rounds: int, bands: int, momentum: float = 0.0) -> Floats:
    """Return C (T, T): lower triangular, `bands` diagonals, columns of unit norm."""
    c = _lower_toeplitz(banded_square_root(min(bands, rounds), momentum), rounds)
    normalised: Floats = c / np.linalg.norm(c, axis=0)
    return normalised


def strategy_row(rounds: int, bands: int, round_: int) -> Floats:
    """Return ``C[t, t - b + 1], ..., C[t, t]`` of `strategy`, t from 1; shorter at first."""
    coefficients = banded_square_root(min(bands, rounds))
    norms = np.sqrt(np.cumsum(coefficients**2))
    ages = np.arange(min(bands, round_) - 1, -1, -1)
    columns = round_ - ages
    row: Floats = coefficients[ages] / norms[np.minimum(len(norms), rounds - columns + 1) - 1]
    return row


@cache
def carried(rounds: int, bands: int) -> float:
    """Return what a sum over all rounds carries of noise, over that of independent noise.

    ``||1^T C^-1|| / sqrt(T)``, by back substitution: T b operations.
    """
    if bands == 1:
        return 1.0
    return _row_of_inverse(np.ones(rounds), rounds, bands) / math.sqrt(rounds)


def single(rounds: int, bands: int, round_: int) -> float:
    """Return the noise on one round's release, over that of independent noise, ``||e_t C^-1||``."""
    if bands == 1:
        return 1.0
    return _row_of_inverse(np.eye(1, rounds, round_ - 1)[0], rounds, bands)


def _row_of_inverse(weights: Floats, rounds: int, bands: int) -> float:
    """Return the norm of ``w^T C^-1``."""
    rest = weights.copy()
    for t in range(rounds, 0, -1):
        row = strategy_row(rounds, bands, t)
        rest[t - 1] /= row[-1]
        rest[t - len(row) : t - 1] -= row[:-1] * rest[t - 1]
    return float(np.linalg.norm(rest))


def _lower_toeplitz(coefficients: Floats, rounds: int) -> Floats:
    out = np.zeros((rounds, rounds))
    for age, coefficient in enumerate(coefficients):
        out += coefficient * np.eye(rounds, k=-age)
    return out


def correlated(row: Floats, fresh: torch.Tensor, past: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a round's noise, ``(C^-1 Z)_t = (z_t - sum_j C[t, t - j] n_(t - j)) / C[t, t]``.

    Parameters
    ----------
    row : array (b,)
        ``C[t, t - b + 1], ..., C[t, t]``; shorter in the first rounds.
    fresh : torch.Tensor
        z_t, standard normals; (n,).
    past : sequence of torch.Tensor
        What this returned in the last ``len(row) - 1`` rounds, oldest first. As secret as the
        noise itself: with it whoever has the releases has the sums.
    """
    if len(past) != len(row) - 1:
        raise ValueError(f"{len(row) - 1} earlier noises are needed, {len(past)} were given")
    noise = fresh.clone()
    for weight, earlier in zip(row[:-1], past, strict=True):
        noise.sub_(earlier, alpha=float(weight))
    return noise.div_(float(row[-1]))


@dataclass(frozen=True)
class BandedMechanism:
    """All noised sums of a run as one Gaussian mechanism, without amplification.

    Attributes
    ----------
    rounds, bands : int
    separation : int
        Rounds from one participation of an example to the next, at least.
    noise_multiplier : float
        Standard deviation of Z over the sensitivity ``sqrt(k) C``: that of the whole run.
    clip_norm : float
        C, the most that an example adds to the sum of a round.
    momentum : float
        Of the workload that the noise is good for.

    Raises
    ------
    PrivacyError
        If examples may take part before the bands have passed: sqrt(k) C would be no bound.
    """

    rounds: int
    bands: int
    separation: int
    noise_multiplier: float
    clip_norm: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.bands <= self.separation:
            raise PrivacyError(
                f"{self.bands} bands of noise need examples to sit out {self.bands - 1} rounds "
                f"after each that they take part in; they sit out {self.separation - 1}. "
                f"Use at least 1 and at most {self.separation} bands."
            )

    @property
    def participations(self) -> int:
        """The most rounds that an example can be in, k = ceil(T / separation)."""
        return -(-self.rounds // self.separation)

    @property
    def sensitivity(self) -> float:
        """What an example changes in ``C G``, in L2: sqrt(k) C."""
        return math.sqrt(self.participations) * self.clip_norm

    @property
    def noise_std(self) -> float:
        """Standard deviation of each coordinate of Z."""
        return self.noise_multiplier * self.sensitivity

    def strategy(self) -> Floats:
        """Return C (T, T)."""
        return strategy(self.rounds, self.bands, self.momentum)

    def epsilon(self, delta: float, rounds: int | None = None) -> float:
        """Return epsilon of the first rounds (of all, if not given): that of one Gaussian.

        The first t rounds release the first t rows of ``C G + Z``; an example is in ceil(t / s) of
        them. So it rises in steps, from one Gaussian to a larger one: these do not compose.
        """
        done = self.rounds if rounds is None else rounds
        if done == 0:
            return 0.0
        share = -(-done // self.separation) / self.participations
        return epsilon((((self.noise_multiplier / math.sqrt(share), 1.0), 1),), delta)

    def rms_error(self) -> float:
        """Return the rms over rounds of the noise on the model, in ``A G``, per coordinate."""
        b = np.linalg.solve(self.strategy().T, workload(self.rounds, self.momentum).T).T
        return self.noise_std * float(np.linalg.norm(b)) / math.sqrt(self.rounds)


def least_banded_noise(target: float, delta: float) -> float:
    """Return the noise multiplier of one Gaussian release at a target epsilon."""
    return least_noise(
        lambda z: epsilon((((z, 1.0), 1),), delta),
        target,
        f"no noise brings one release to epsilon {target:g}: raise target-epsilon.",
    )


def cyclic_turn(group: int, separation: int, round_: int) -> bool:
    """Say whether the examples of a group (0..separation - 1) take part in a round (from 1).

    By construction no example takes part twice within `separation` rounds.
    """
    return (round_ - 1) % separation == group % separation
