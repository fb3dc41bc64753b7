"""The accumulated residual: what the world's gradient leaves out of a region's, summed up."""

from regionfed.personaliser import Proposal, Released


class Residual:
    """theta_r <- theta_r - step (g_r - g), at rho = 1.

    Devices take their gradients at theta + alpha_r theta_r, so that g_r shrinks as the region's
    own part fits it, and the sum converges. One round's residual drowns in privacy noise; their
    sum does not, for signal adds up with T and noise with sqrt(T). Only released values enter:
    no further epsilon.

    Parameters
    ----------
    step : float
        Learning rate of the region's own part.
    """

    measures_conflict = True
    searches_rho = True

    def __init__(self, step: float) -> None:
        self._step = step

    def propose(self, released: Released) -> Proposal:
        """Descend along this round's residual."""
        residual = released.update - released.global_update
        return Proposal(
            direction=released.previous.sub(residual, alpha=self._step),
            strategy="residual",
            reason=f"descent along {released.round} accumulated residuals",
        )
