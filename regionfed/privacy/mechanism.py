"""The Gaussian sum mechanism: it owns clip bounds, noise, sampling and its ledger event.

One mechanism releases several sums over **one** sample (update, sketch, loss). Together they are
one Gaussian mechanism: scale each part by its own noise and the whole vector of one unit has
L2 norm at most ``sqrt(sum z_i^-2)`` against noise of standard deviation 1. Hence
``z_eff = (sum z_i^-2)^-1/2``, which is what the ledger is charged with.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from regionfed.privacy.ledger import LedgerEvent
from regionfed.randomness import PrivateRandomness


@dataclass(frozen=True)
class Part:
    """One released sum.

    Attributes
    ----------
    name : str
    bound : float
        L2 norm that the contribution of one unit never exceeds (whoever sums has clipped to it).
    noise_multiplier : float
        Standard deviation of the noise over `bound`; 0 is no noise and no privacy.
    """

    name: str
    bound: float
    noise_multiplier: float

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on each coordinate of the sum."""
        return self.noise_multiplier * self.bound


@dataclass(frozen=True)
class GaussianSum:
    """A joint release of noised sums over one sample of units.

    Attributes
    ----------
    release : str
        What is released, in words, for the ledger.
    population : str
        Whose data: ``"train"`` or ``"held-out"``. No example is in both.
    unit : str
        What one contribution is; add-or-remove-one neighbours differ in one of these.
    sampling_rate : float
        Chance of each unit to be in the sample; 1 is everyone, without amplification.
    parts : tuple of Part
    """

    release: str
    population: str
    unit: str
    sampling_rate: float
    parts: tuple[Part, ...]

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of the parts taken together, ``(sum z_i^-2)^-1/2``."""
        if any(part.noise_multiplier == 0.0 for part in self.parts):
            return 0.0
        return 1.0 / math.sqrt(sum(part.noise_multiplier**-2 for part in self.parts))

    def event(self, region: str, round_: int) -> LedgerEvent:
        """Return the ledger event of one use of this mechanism."""
        return LedgerEvent(
            round=round_,
            region=region,
            release=self.release,
            population=self.population,
            unit=self.unit,
            sampling_rate=self.sampling_rate,
            noise_multiplier=self.noise_multiplier,
            sensitivity={part.name: part.bound for part in self.parts},
            noise={part.name: part.noise_multiplier for part in self.parts},
        )

    def noised(
        self, sums: Mapping[str, torch.Tensor], randomness: PrivateRandomness
    ) -> dict[str, torch.Tensor]:
        """Return each sum plus N(0, (z C)^2 I), added in place; an empty sample is noised too.

        Parameters
        ----------
        sums : Mapping[str, torch.Tensor]
            Part name to float32 vector (n,).
        randomness : PrivateRandomness
            A stream that nothing else uses.
        """
        if set(sums) != {part.name for part in self.parts}:
            raise ValueError(f"sums {sorted(sums)} are not the parts of '{self.release}'")
        for part in self.parts:
            if part.noise_std > 0.0:
                total = sums[part.name]
                total.add_(randomness.normal(total.numel()), alpha=part.noise_std)
        return dict(sums)
