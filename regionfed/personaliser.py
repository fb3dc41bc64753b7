"""What a personaliser is: how released values become a region's own part of the model."""

from dataclasses import dataclass
from typing import Protocol

import torch

from regionfed.config import Config
from regionfed.registry import Registry


@dataclass(frozen=True)
class Released:
    """What a personaliser may look at: values that were released, so it costs no privacy.

    Attributes
    ----------
    round : int
    update, global_update : torch.Tensor
        The region's own noised gradient and the mean over regions, both (p,); they point uphill.
    theta : torch.Tensor
        The global model after this round, (p,).
    previous : torch.Tensor
        The region's direction after the last round, (p,); zero at first.
    noise_std : float
        Standard deviation of the noise on each coordinate of `update`.
    """

    round: int
    update: torch.Tensor
    global_update: torch.Tensor
    theta: torch.Tensor
    previous: torch.Tensor
    noise_std: float


@dataclass(frozen=True)
class Proposal:
    """A personaliser's answer: theta_r = rho * direction.

    Attributes
    ----------
    direction : torch.Tensor
        (p,); rho scales it.
    strategy, reason : str
        What was done and why, in words, for the report.
    """

    direction: torch.Tensor
    strategy: str
    reason: str


class Personaliser(Protocol):
    """One way to personalise; an object per region, without state of its own."""

    @property
    def measures_conflict(self) -> bool:
        """Whether alpha_r is used, so that conflict has to be measured (and paid for)."""
        ...

    @property
    def searches_rho(self) -> bool:
        """Whether rho is searched for on the region's loss (a vote that has to be paid for)."""
        ...

    def propose(self, released: Released) -> Proposal:
        """Return the region's new direction."""
        ...


class PersonaliserFactory(Protocol):
    """Makes a personaliser from the settings."""

    def __call__(self, config: Config) -> Personaliser:
        """Return the personaliser of one region."""
        ...


PERSONALISERS: Registry[PersonaliserFactory] = Registry(
    "personaliser",
    {
        "residual": "strategies.personalisers.residual:Residual",
        "none": "strategies.personalisers.none:NoPersonaliser",
    },
)
