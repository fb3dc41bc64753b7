"""No personalisation: the baseline in which every region uses the global model."""

import torch

from regionfed.config import Config
from regionfed.personaliser import Proposal, Released


class NoPersonaliser:
    """theta_r = 0. Pays neither for conflict nor for rho, so its updates need less noise."""

    measures_conflict = False
    searches_rho = False

    def __init__(self, config: Config) -> None:
        del config

    def propose(self, released: Released) -> Proposal:
        """Return no direction."""
        return Proposal(
            direction=torch.zeros_like(released.theta),
            strategy="none",
            reason="personalisation is switched off",
        )
