"""The Gaussian sum mechanism: it owns clip, sampling, noise, sensitivity and its ledger event.

One mechanism releases several sums over **one** sample (update, sketch, loss). Together they are
one Gaussian mechanism: scale each part by its own noise and the whole vector of one unit has
L2 norm at most ``sqrt(sum z_i^-2)`` against noise of standard deviation 1. Hence
``z_eff = (sum z_i^-2)^-1/2``, which is what the ledger is charged with.

What one unit is, who draws it and where its clip stands is said by a `Unit`
(`regionfed.privacy.units`); all numbers follow from it here.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from regionfed.privacy.ledger import LedgerEvent
from regionfed.randomness import PrivateRandomness

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


@dataclass(frozen=True)
class GaussianSum:
    """A joint release of noised sums over one sample of units.

    Attributes
    ----------
    release : str
        What is released, in words, for the ledger.
    population : str
        Whose data: ``"train"`` or ``"held-out"``. No example is in both.
    unit : Unit
    rate : float
        Chance that the sample is drawn with; 1 is everyone.
    parts : tuple of Part
    bands : int
        Rounds over which the noise of its first part is correlated (`regionfed.privacy.banded`);
        1 is independent noise. No unit takes part twice within them, so that they are charged as
        one release.
    """

    release: str
    population: str
    unit: Unit
    rate: float
    parts: tuple[Part, ...]
    bands: int = 1

    @property
    def sampling(self) -> Sampling:
        """Who is drawn."""
        return self.unit.sampling(self.rate)

    @property
    def sampling_rate(self) -> float:
        """Chance of each unit to be in the sample, as accounted; 1 is no amplification."""
        return self.sampling.accounted

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of the parts taken together, ``(sum z_i^-2)^-1/2``."""
        if any(part.noise_multiplier == 0.0 for part in self.parts):
            return 0.0
        return 1.0 / math.sqrt(sum(part.noise_multiplier**-2 for part in self.parts))

    def part(self, name: str) -> Part:
        """Return a part by its name."""
        return next(part for part in self.parts if part.name == name)

    def event(self, region: str, round_: int) -> LedgerEvent:
        """Return the ledger event of one use of this mechanism."""
        return LedgerEvent(
            round=round_,
            region=region,
            release=self.release,
            population=self.population,
            unit=self.unit.protects,
            sampling_rate=self.sampling_rate,
            noise_multiplier=self.noise_multiplier,
            sensitivity={part.name: part.bound for part in self.parts},
            noise={part.name: part.noise_multiplier for part in self.parts},
            drawn=f"correlated over {self.bands} rounds, which are charged as one"
            if self.bands > 1
            else "",
        )

    def charges(self, rounds: int) -> int:
        """Return how often the first rounds are charged, if each uses this once."""
        return -(-rounds // self.bands)

    def is_charged(self, round_: int, events: Iterable[LedgerEvent]) -> bool:
        """Say whether a ledger holds what covers a round; independent noise is charged each time.

        A unit is in one round of a period, and its contributions to several are orthogonal
        (columns of C, b or more apart): k periods are k Gaussian releases, and one event each.
        """
        return self.bands > 1 and any(
            event.release == self.release
            and (event.round - 1) // self.bands == (round_ - 1) // self.bands
            for event in events
        )

    def cohort(self, devices: Sequence[int], coins: PrivateRandomness) -> list[int]:
        """Return the devices that are asked: each is drawn by itself, or all where none is.

        Amplification holds against whoever does not know who was drawn: the coins are private
        randomness, like noise.
        """
        chance = self.sampling.devices
        if chance == 1.0:
            return list(devices)
        drawn = coins.bernoulli(chance, len(devices))
        return [device for device, taken in zip(devices, drawn, strict=True) if taken]

    def enforced(self, reply: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return what a device's reply may add to each sum, cut to its bound if it is one unit's.

        What a device does as one is bounded by whoever sums, whatever its app does. Where it holds
        many units, only the device can clip each.
        """
        if not self.unit.as_one:
            return reply
        return {name: clip(value, self.part(name).clip) for name, value in reply.items()}

    def gathered(
        self, sums: Mapping[str, torch.Tensor], batch: float
    ) -> Mapping[str, torch.Tensor]:
        """Return what is noised, of the sums over devices."""
        return {name: self.part(name).gathered(total, batch) for name, total in sums.items()}

    def noised(
        self,
        sums: Mapping[str, torch.Tensor],
        randomness: PrivateRandomness,
        rows: Mapping[str, Callable[[int], torch.Tensor]] = MappingProxyType({}),
    ) -> dict[str, torch.Tensor]:
        """Return each sum plus N(0, (z C)^2 I), added in place; an empty sample is noised too.

        Parameters
        ----------
        sums : Mapping[str, torch.Tensor]
            Part name to float32 vector (n,).
        randomness : PrivateRandomness
            A stream that nothing else uses.
        rows : Mapping[str, callable]
            Part name to what returns its noise (n,) for z C = 1, where it is correlated.
        """
        if set(sums) != {part.name for part in self.parts}:
            raise ValueError(f"sums {sorted(sums)} are not the parts of '{self.release}'")
        for part in self.parts:
            if part.noise_std > 0.0:
                total = sums[part.name]
                draw = rows.get(part.name, randomness.normal)
                total.add_(draw(total.numel()), alpha=part.noise_std)
        return dict(sums)
