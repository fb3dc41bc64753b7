"""The accumulated residual: what the world's gradient leaves out of a region's, summed up."""

from regionfed.config import Config
from regionfed.personaliser import Proposal, Query, Released
from regionfed.privacy.plan import damped_step


class Residual:
    """theta_r <- theta_r - step (g_r - g), at rho = 1.

    Devices take their gradients at theta + alpha_r theta_r, so that g_r shrinks as the region's
    own part fits it, and the sum converges. One round's residual drowns in privacy noise; their
    sum does not, for signal adds up with T and noise with sqrt(T). Only released values enter:
    no further epsilon.

    The step is cut where noise would exceed `noise_limit` on a weight (`damped_step`).
    """

    measures_conflict = True
    searches_rho = True
    accumulates = True
    queries = 0
    compares_labels = False

    def __init__(self, config: Config) -> None:
        self._config = config

    def propose(self, released: Released, query: Query) -> Proposal:
        """Descend along this round's residual."""
        del query
        config = self._config
        step = damped_step(
            config.residual_step, released.noise_std, config.rounds, config.noise_limit
        )
        residual = released.update - released.global_update
        return Proposal(
            direction=released.previous.sub(residual, alpha=step),
            strategy="residual",
            reason=f"descent along {released.round} accumulated residuals, step {step:.3g}",
        )
