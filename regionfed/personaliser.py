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
    conflict, median_conflict : float
        d_r, and the median over regions in round 1.
    divergence : float
        h_r = KL(regional || global histogram of labels), in nats; 0 without labels.
    examples, mean_examples : float
        Size of the region and of the mean region.
    """

    round: int
    update: torch.Tensor
    global_update: torch.Tensor
    theta: torch.Tensor
    previous: torch.Tensor
    noise_std: float
    conflict: float = 0.0
    median_conflict: float = 0.0
    divergence: float = 0.0
    examples: float = 0.0
    mean_examples: float = 0.0


class Query(Protocol):
    """Asks the region's devices for one more gradient; each call is charged and noised."""

    def __call__(self, point: torch.Tensor, inner_step: float = 0.0) -> torch.Tensor:
        """Return the region's noised mean gradient at `point`, (p,); it points uphill.

        With ``inner_step`` eta > 0 it is the mean of the gradients of
        ``L_i(w - eta grad L_i(w))``, differentiated through the step.
        """
        ...


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

    @property
    def accumulates(self) -> bool:
        """Whether theta_r grows from round to round.

        Then `propose` is called each round, and devices learn at theta + alpha_r theta_r. Else
        theta_r is built from scratch where it is used, and devices learn at theta.
        """
        ...

    @property
    def queries(self) -> int:
        """The most gradients that one `propose` asks for: their noise is planned for."""
        ...

    @property
    def compares_labels(self) -> bool:
        """Whether the divergence of labels is used, so that a histogram has to be paid for."""
        ...

    def propose(self, released: Released, query: Query) -> Proposal:
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
        "grad": "strategies.personalisers.grad:Grad",
        "interp": "strategies.personalisers.interp:Interp",
        "meta": "strategies.personalisers.meta:Meta",
        "dynamic": "strategies.personalisers.dynamic:Dynamic",
        "none": "strategies.personalisers.none:NoPersonaliser",
    },
)
