"""What one unit of privacy is: who is drawn, where its clip stands, how far it moves a release.

Nothing here imports PyTorch, nor an accountant: whoever only reads a configuration needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

NEIGHBOURING = "add-or-remove-one"

_TINY = 1e-12


def clip(vector: torch.Tensor, bound: float) -> torch.Tensor:
    """Return ``v min(1, C / max(||v||, tiny))``: L2 norm at most C, direction kept; a new tensor.

    A zero stays zero.
    """
    return vector * min(1.0, bound / max(float(vector.norm()), _TINY))


@dataclass(frozen=True)
class Part:
    """One released sum: the clip, and the noise that belongs to it.

    Attributes
    ----------
    name : str
    clip : float
        L2 norm C that the clip leaves: of each unit's contribution, or of the region's mean.
    noise : float
        Standard deviation of the noise over `clip`, z; 0 is no noise and no privacy.
    turn : float
        How far one unit moves what was clipped, over C. 1 where its own contribution is; 2 where
        it is within a mean, for that may turn from one end of the ball to the other.
    of_mean : bool
        Whether the region's mean is clipped, instead of each contribution.
    """

    name: str
    clip: float
    noise: float
    turn: float = 1.0
    of_mean: bool = False

    @property
    def bound(self) -> float:
        """Sensitivity: the most, in L2, that one unit changes what is noised."""
        return self.turn * self.clip

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over the sensitivity."""
        return self.noise / self.turn

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of what is noised."""
        return self.noise * self.clip

    def gathered(self, total: torch.Tensor, batch: float) -> torch.Tensor:
        """Return what is noised: the sum of clipped contributions, or the clipped mean.

        Parameters
        ----------
        total : torch.Tensor
            Sum over devices, (n,).
        batch : float
            What a sum is divided by to be a mean.
        """
        return clip(total.div_(batch), self.clip) if self.of_mean else total

    def divisor(self, batch: float) -> float:
        """Return what makes a mean of what was noised; a mean is one already."""
        return 1.0 if self.of_mean else batch


@dataclass(frozen=True)
class Sampling:
    """Who is drawn into a release, by whom, and what that is worth.

    Attributes
    ----------
    devices : float
        Chance of each device, drawn by the coordinator; 1 asks all of them.
    examples : float
        Chance of each example of a device that is asked, drawn by the device.
    accounted : float
        Chance of a *unit*: what amplification may be counted with. 1 is none.
    period : int
        Above 0 nobody is drawn: an example takes part once in that many rounds, on a schedule that
        anybody may know.
    """

    devices: float
    examples: float
    accounted: float
    period: int = 0

    @property
    def share(self) -> float:
        """Share of a region's units that a sample is expected to have."""
        return self.devices * self.examples


class Unit(Protocol):
    """What neighbours differ in: who draws it, where its clip stands, what it is called.

    An object without state; `regionfed.privacy.units` has them all.
    """

    @property
    def protects(self) -> str:
        """``"example"``, ``"client"`` or ``"region"``, as the ledger has it."""
        ...

    @property
    def whom(self) -> str:
        """Who is protected, in words: "each training example"."""
        ...

    @property
    def neighbouring(self) -> str:
        """How neighbours differ."""
        ...

    @property
    def as_one(self) -> bool:
        """Whether a device answers as one: its steps, its means, bounded as a whole."""
        ...

    @property
    def declared(self) -> bool:
        """Whether the size of the cohort is declared, so that none has to be released for it."""
        ...

    @property
    def holds_both(self) -> bool:
        """Whether one unit has training and held-out examples: their epsilons add up then."""
        ...

    @property
    def sketches(self) -> bool:
        """Whether a sketch is bounded, so that it may be released."""
        ...

    @property
    def weighs_users(self) -> bool:
        """Whether a user's clipped gradients may be compared with the region's update."""
        ...

    @property
    def promises_region_too(self) -> bool:
        """Whether updates and gradients bound what they tell of a region as a whole.

        Where the unit is an example of a clipped mean: `plan.region_epsilon` says by how much.
        """
        ...

    @property
    def hides_sums(self) -> bool:
        """Whether devices do all there is to do before noise, so that nobody needs exact sums."""
        ...

    def sampling(self, rate: float) -> Sampling:
        """Return who is drawn at a rate."""
        ...

    def sampling_words(self, rate: float) -> str:
        """Say who is drawn at a rate, for people."""
        ...

    def part(self, name: str, clip: float, noise: float) -> Part:
        """Return a part of a release: `clip` is C, `noise` the noise (std) over it."""
        ...

    def device_clip(self, clip: float) -> float:
        """Return what devices clip to, where C is the clip of the part."""
        ...

    def size_bound(self, examples_per_device: int) -> float:
        """Return the most that one unit changes a region's size by; 0 where it is not bounded."""
        ...

    def population(self, examples: float, devices: int) -> float:
        """Return the units of a region: of its size (released or declared) and its devices."""
        ...

    def also(self, rate: float) -> Mapping[str, tuple[float, float]]:
        """Return who else is protected by all releases: name to (turn, accounted rate)."""
        ...
