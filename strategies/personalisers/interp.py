"""Interp: part of the way to where the region would go by itself."""

from collections.abc import Callable

import torch

from regionfed.config import Config
from regionfed.personaliser import Proposal, Query, Released
from regionfed.privacy.plan import damped_step


def local_model(
    theta: torch.Tensor, gradient: Callable[[torch.Tensor], torch.Tensor], step: float, steps: int
) -> torch.Tensor:
    """Return theta_loc after `steps` of ``w <- w - step * gradient(w)`` from theta, (p,)."""
    w = theta
    for _ in range(steps):
        w = w - step * gradient(w)
    return w


class Interp:
    """theta_r = rho (theta_loc - theta), theta_loc after E noised gradient steps of the region.

    Each step is DP-SGD over the region's devices: a Poisson sample of its own, noised and
    charged. The sign is + here, for theta_loc - theta points down already.
    """

    measures_conflict = True
    searches_rho = True
    accumulates = False
    compares_labels = False

    def __init__(self, config: Config) -> None:
        self._config = config
        self.queries = config.local_steps

    def propose(self, released: Released, query: Query) -> Proposal:
        """Walk E steps from theta and return the way walked."""
        config = self._config
        steps = config.local_steps
        step = damped_step(config.personal_step, released.noise_std, steps, config.noise_limit)
        there = local_model(released.theta, query, step, steps)
        return Proposal(
            direction=there - released.theta,
            strategy="interp",
            reason=f"towards the region's own model, {steps} local steps of {step:.3g}",
        )
