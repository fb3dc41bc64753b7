"""Grad: down what the world's gradient leaves out."""

import pytest
import torch

from regionfed.config import Config
from regionfed.personaliser import PERSONALISERS
from strategies.personalisers.grad import Grad, gradient_direction
from tests.conftest import no_query, released

G_R, G = torch.tensor([3.0, -1.0]), torch.tensor([1.0, 1.0])


def test_the_direction_is_minus_the_step_times_the_difference() -> None:
    """theta_r = -rho s (g_r - g), and + where the published sign is asked for."""
    config = Config(personal_step=0.5)
    proposal = Grad(config).propose(released(update=G_R, global_update=G), no_query)
    assert torch.equal(proposal.direction, torch.tensor([-1.0, 1.0]))
    assert proposal.strategy == "grad" and "descent" in proposal.reason
    published = Grad(Config(personal_step=0.5, sign="published"))
    proposal = published.propose(released(update=G_R, global_update=G), no_query)
    assert torch.equal(proposal.direction, torch.tensor([1.0, -1.0]))
    assert "published" in proposal.reason


def test_descent_lowers_the_region_s_loss_and_the_published_sign_raises_it() -> None:
    """On quadratics with minima of their own, in every region: the reason for the sign."""
    minima = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    updates = -minima  # gradients of |w - m|^2 / 2 at w = 0
    mean = updates.mean(0)
    for minimum, update in zip(minima, updates, strict=True):
        assert float(update @ (update - mean)) > 0.0

        def loss(w: torch.Tensor, minimum: torch.Tensor = minimum) -> float:
            return float((w - minimum).square().sum()) / 2.0

        down = gradient_direction(update, mean, -1.0, 0.1)
        up = gradient_direction(update, mean, 1.0, 0.1)
        assert loss(down) < loss(torch.zeros(5)) < loss(up)


def test_the_step_is_cut_to_the_noise_limit() -> None:
    """One round's noise: step * tau stays within it."""
    config = Config(personal_step=10.0, noise_limit=0.5)
    facts = released(update=torch.tensor([1.0]), global_update=torch.tensor([0.0]), noise_std=0.1)
    assert Grad(config).propose(facts, no_query).direction.item() == pytest.approx(-5.0)


def test_it_is_found_by_name_and_costs_no_gradient() -> None:
    """Released values only."""
    grad = PERSONALISERS.load("grad")(Config())
    assert isinstance(grad, Grad)
    assert grad.queries == 0 and not grad.accumulates and not grad.compares_labels
