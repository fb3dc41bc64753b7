"""Real vectors as integers of a ring, with each device's share of the noise, and back.

What a device sends is ``rint(clamp(x) / step) + rint(N(0, s^2))`` modulo 2^32 or 2^64: a value on
a grid first, integer noise then, so that a sum over devices is the sum of grid values plus the
sum of their noises, whoever they are. Why this is the Gaussian mechanism, and what rounding
costs, is proved in docs/secure_aggregation.md.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regionfed.errors import ContractError
from regionfed.randomness import NORMAL_REACH, PrivateRandomness
from regionfed.secure_aggregation.terms import Terms

Ring = NDArray[np.unsignedinteger[Any]]

# The grid may add this much to the sensitivity, over the bound; a finer ring is taken otherwise.
_ROUNDING = 0.05
# A share of noise of so many steps makes sums of integer noises Gaussian up to a factor of
# 1 +- 1e-270 a coordinate (docs/secure_aggregation.md).
_LEAST_STEPS = 8.0
# Integers stay far inside what a double holds exactly.
_FINEST = 2.0**-44
_BLOCK = 1 << 19


@dataclass(frozen=True)
class Segment:
    """How one field of a reply lies in the ring.

    Attributes
    ----------
    name : str
    length : int
    bound : float
        L2 norm by which one example may change the values, before rounding.
    step : float
        Width of the grid.
    most : int
        A device's value is clamped to so many steps, either side of 0.
    share_steps : float
        Standard deviation of a device's share of noise, in steps.
    """

    name: str
    length: int
    bound: float
    step: float
    most: int
    share_steps: float

    @property
    def sensitivity(self) -> float:
        """L2 norm by which one example may change the sum, ``C + sqrt(length) step``.

        Each coordinate of the two neighbouring sums is moved by at most half a step.
        """
        return self.bound + math.sqrt(self.length) * self.step


@dataclass(frozen=True)
class FixedPoint:
    """A ring and the segments of a vector in it.

    Overflow is impossible: n devices of at most ``most`` plus the reach of their noise stay below
    half of the ring, for the clamp and the sampler bound both.
    """

    bits: int
    segments: tuple[Segment, ...]

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Elements of the ring, as unsigned integers of little end first."""
        return np.dtype("<u4" if self.bits == 32 else "<u8")

    @property
    def length(self) -> int:
        """Length of the whole vector."""
        return sum(segment.length for segment in self.segments)

    def zeros(self) -> Ring:
        """Return a vector of zeros, (length,)."""
        return np.zeros(self.length, self.dtype)

    def encode(self, values: dict[str, torch.Tensor], randomness: PrivateRandomness) -> Ring:
        """Return a device's values with its share of noise as a vector of the ring.

        Parameters
        ----------
        values : dict of str to torch.Tensor
            Field to finite values (length,).
        randomness : PrivateRandomness
            A stream that nothing else uses.

        Raises
        ------
        ContractError
            If a field is missing, has another length, or is not finite.
        """
        out = self.zeros()
        start = 0
        for segment in self.segments:
            value = values.get(segment.name)
            if value is None or value.shape != (segment.length,):
                raise ContractError(f"'{segment.name}': expected {segment.length} values.")
            if not bool(torch.isfinite(value).all()):
                raise ContractError(f"'{segment.name}': holds nan or inf.")
            _encode(segment, value.numpy(), randomness, out[start : start + segment.length])
            start += segment.length
        return out

    def decode(self, total: Ring) -> dict[str, torch.Tensor]:
        """Return the sum over devices, by field, float32."""
        signed = total.view(np.dtype("<i4" if self.bits == 32 else "<i8"))
        out: dict[str, torch.Tensor] = {}
        start = 0
        for segment in self.segments:
            stop = start + segment.length
            field = torch.empty(segment.length)
            np.multiply(signed[start:stop], segment.step, out=field.numpy(), casting="same_kind")
            out[segment.name] = field
            start = stop
        return out


def _encode(
    segment: Segment, values: NDArray[np.float32], randomness: PrivateRandomness, out: Ring
) -> None:
    for start in range(0, len(values), _BLOCK):
        stop = min(start + _BLOCK, len(values))
        steps = values[start:stop].astype(np.float64)
        steps /= segment.step
        np.clip(steps, -segment.most, segment.most, out=steps)
        np.rint(steps, out=steps)
        if segment.share_steps > 0.0:
            noise = randomness.normal_block(stop - start)
            noise *= segment.share_steps
            steps += np.rint(noise, out=noise)
        # From signed to unsigned is modulo the ring.
        out[start:stop] = steps.astype(np.int64).astype(out.dtype)


def fixed_point(terms: Terms) -> FixedPoint:
    """Return the ring and the grids that terms call for; both ends come to the same.

    The smaller ring is taken where its grids are fine enough.

    Raises
    ------
    ContractError
        If no ring is.
    """
    for bits in (32, 64):
        segments = [_segment(terms, i, bits) for i in range(len(terms.fields))]
        if all(segments):
            return FixedPoint(bits, tuple(s for s in segments if s))
    raise ContractError(
        "secure aggregation: no ring holds these sums finely enough; use a larger clip-norm, "
        "fewer examples-per-client, or fewer devices."
    )


def _segment(terms: Terms, index: int, bits: int) -> Segment | None:
    """Return a field's segment in a ring, or None where the grid would be too coarse."""
    length, bound, z = terms.lengths[index], terms.bounds[index], terms.noise[index]
    # Half a step each for the value and the noise that are rounded.
    capacity = (2 ** (bits - 1) - 1) // terms.devices - 2
    share = z / math.sqrt(terms.tolerance.honest)
    most = terms.examples * bound
    room = capacity - NORMAL_REACH * share * math.sqrt(length)
    if room <= 0.0:
        return None
    reach = most + NORMAL_REACH * share * bound
    # A hair wider than what just fits, for the rounding of these very lines.
    step = max(reach / room, reach * _FINEST) * (1.0 + 1e-9)
    segment = Segment(
        name=terms.fields[index],
        length=length,
        bound=bound,
        step=step,
        most=math.floor(most / step),
        share_steps=share * (bound + math.sqrt(length) * step) / step,
    )
    fine = math.sqrt(length) * step <= _ROUNDING * bound
    noisy = z == 0.0 or segment.share_steps >= _LEAST_STEPS
    return segment if fine and noisy else None
