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

import torch

from regionfed.privacy.ledger import LedgerEvent
from regionfed.privacy.unit import Part, Sampling, Unit, clip
from regionfed.randomness import PrivateRandomness


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
