"""Grad: one step along what the world's gradient leaves out of a region's."""

import torch

from regionfed.config import Config
from regionfed.personaliser import Proposal, Query, Released
from regionfed.privacy.plan import damped_step
from strategies.personalisers.sign import SIGNS, heading


def gradient_direction(
    update: torch.Tensor, global_update: torch.Tensor, sign: float, step: float
) -> torch.Tensor:
    """Return ``sign * step * (g_r - g)``, (p,).

    Gradients point uphill, so sign = -1 descends the part of the region's loss that the world's
    step leaves: to first order ``L_r(theta - s (g_r - g)) - L_r(theta) = -s <g_r, g_r - g>``, and
    ``<g_r, g_r - g> > 0`` unless the world's gradient is the steeper way down for the region too.
    The published formula has sign = +1.

    Parameters
    ----------
    update, global_update : torch.Tensor
        g_r and g, (p,).
    """
    return (sign * step) * (update - global_update)


class Grad:
    """theta_r = -rho s (g_r - g), from released values: it costs no privacy beyond rho's search.

    The step is cut where one round's noise would exceed `noise_limit` on a weight.
    """

    measures_conflict = True
    searches_rho = True
    accumulates = False
    queries = 0
    compares_labels = False

    def __init__(self, config: Config) -> None:
        self._config = config

    def propose(self, released: Released, query: Query) -> Proposal:
        """Step along this round's difference."""
        del query
        config = self._config
        step = damped_step(config.personal_step, released.noise_std, 1, config.noise_limit)
        return Proposal(
            direction=gradient_direction(
                released.update, released.global_update, SIGNS[config.sign], step
            ),
            strategy="grad",
            reason=f"{heading(config.sign)} along this round's difference, step {step:.3g}",
        )
