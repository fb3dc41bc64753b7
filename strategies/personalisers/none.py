"""No personalisation: the baseline in which every region uses the global model."""

import torch

from regionfed.config import Config
from regionfed.personaliser import Proposal, Query, Released


class NoPersonaliser:
    """theta_r = 0. Pays neither for conflict nor for rho, so its updates need less noise."""

    measures_conflict = False
    searches_rho = False
    accumulates = False
    queries = 0
    compares_labels = False

    def __init__(self, config: Config) -> None:
        del config

    def propose(self, released: Released, query: Query) -> Proposal:
        """Return no direction."""
        del query
        return Proposal(
            direction=torch.zeros_like(released.theta),
            strategy="none",
            reason="personalisation is switched off",
        )
