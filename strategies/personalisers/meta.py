"""Meta: a step for after the world's step, by the region's gradient there."""

import torch

from regionfed.config import Config
from regionfed.personaliser import Proposal, Query, Released
from regionfed.privacy.plan import damped_step
from strategies.personalisers.sign import SIGNS, heading


def look_ahead(theta: torch.Tensor, global_update: torch.Tensor, eta: float) -> torch.Tensor:
    """Return ``theta - eta g``, (p,): where the world would go next."""
    return theta - eta * global_update


class Meta:
    """theta_r = -rho s grad L_r(theta - eta g): a second, noised and charged gradient.

    With ``meta-order=1`` the gradient is taken ahead, at theta - eta g. The noised g is a
    released constant, so this is exact: nothing of the region's is differentiated twice. With
    ``meta-order=2`` each example looks ahead along its own gradient, and the gradient of
    ``L_i(theta - eta grad L_i(theta))`` is taken through that step, ``(I - eta H_i) g_i'``
    (MAML: Finn, Abbeel, Levine 2017). An example's own step, not the region's: what one example
    adds must depend on it alone to be clipped. The published formula has the other sign.
    """

    measures_conflict = True
    searches_rho = True
    accumulates = False
    queries = 1
    compares_labels = False

    def __init__(self, config: Config) -> None:
        self._config = config

    def propose(self, released: Released, query: Query) -> Proposal:
        """Step along the gradient ahead."""
        config = self._config
        eta = config.inner_step
        if config.meta_order == 1:
            ahead = query(look_ahead(released.theta, released.global_update, eta))
        else:
            ahead = query(released.theta, inner_step=eta)
        step = damped_step(config.personal_step, released.noise_std, 1, config.noise_limit)
        return Proposal(
            direction=(SIGNS[config.sign] * step) * ahead,
            strategy="meta",
            reason=(
                f"{heading(config.sign)} along the gradient {eta:.3g} ahead, "
                f"order {config.meta_order}, step {step:.3g}"
            ),
        )
