"""Personalisers: descent along what the world's gradient leaves out, or nothing."""

from dataclasses import replace

import pytest
import torch

from regionfed.config import Config
from regionfed.errors import ConfigurationError
from regionfed.personaliser import PERSONALISERS, Released
from strategies.personalisers.none import NoPersonaliser
from strategies.personalisers.residual import Residual
from tests.conftest import no_query


def released(update: torch.Tensor, mean: torch.Tensor, previous: torch.Tensor) -> Released:
    return Released(
        round=3,
        update=update,
        global_update=mean,
        theta=torch.zeros(2),
        previous=previous,
        noise_std=0.0,
    )


def residual(step: float) -> Residual:
    return Residual(Config(residual_step=step))


def test_the_residual_is_subtracted() -> None:
    """theta_r - step (g_r - g): gradients point uphill, so this descends."""
    update, mean = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
    proposal = residual(0.5).propose(released(update, mean, torch.tensor([10.0, 20.0])), no_query)
    assert torch.equal(proposal.direction, torch.tensor([9.0, 20.0]))
    assert proposal.strategy == "residual" and "3" in proposal.reason


def test_a_region_like_the_world_stays_where_it_is() -> None:
    """g_r = g moves nothing."""
    g, previous = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25])
    assert torch.equal(
        residual(3.0).propose(released(g, g, previous), no_query).direction, previous
    )


def test_what_it_is_given_is_not_changed() -> None:
    """The coordinator may retry with the same values."""
    update, mean, previous = torch.ones(2), torch.zeros(2), torch.full((2,), 5.0)
    residual(1.0).propose(released(update, mean, previous), no_query)
    assert torch.equal(previous, torch.full((2,), 5.0))
    assert torch.equal(update, torch.ones(2)) and not bool(mean.any())


def test_the_sum_of_residuals_finds_a_region_s_own_optimum() -> None:
    """Two regions with different minima: theta + theta_r goes to each region's own."""
    minima = [torch.tensor([1.0, 4.0]), torch.tensor([3.0, -2.0])]
    theta, own = torch.zeros(2), [torch.zeros(2), torch.zeros(2)]
    for _ in range(200):
        updates = [theta + o - m for o, m in zip(own, minima, strict=True)]
        mean = torch.stack(updates).mean(0)
        theta = theta - 0.3 * mean
        own = [
            residual(0.3).propose(released(u, mean, o), no_query).direction
            for u, o in zip(updates, own, strict=True)
        ]
    for o, m in zip(own, minima, strict=True):
        assert torch.allclose(theta + o, m, atol=1e-3)
    assert torch.allclose(theta, (minima[0] + minima[1]) / 2.0, atol=1e-3)


def test_no_personaliser_proposes_nothing_and_pays_nothing() -> None:
    """Zero, of the model's shape, whatever the region had; no conflict, no search."""
    none = NoPersonaliser(Config())
    proposal = none.propose(released(torch.ones(2), torch.zeros(2), torch.ones(2)), no_query)
    assert torch.equal(proposal.direction, torch.zeros(2))
    assert not none.measures_conflict and not none.searches_rho
    assert not none.queries and not none.compares_labels
    assert residual(1.0).measures_conflict and residual(1.0).searches_rho


def test_personalisers_are_found_by_name() -> None:
    """The names of the settings."""
    assert isinstance(PERSONALISERS.load("residual")(1.0), Residual)
    assert isinstance(PERSONALISERS.load("none")(1.0), NoPersonaliser)
    with pytest.raises(ConfigurationError, match="did you mean 'residual'"):
        PERSONALISERS.load("residuals")


def test_a_step_is_cut_where_noise_would_exceed_the_limit() -> None:
    """step * tau * sqrt(T) stays within noise_limit; below it the step is as configured."""
    config = Config(residual_step=10.0, rounds=25, noise_limit=0.5)
    update, mean, zero = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0])
    loud = replace(released(update, mean, zero), noise_std=0.1)  # 10 * 0.1 * 5 = ten times 0.5
    quiet = replace(loud, noise_std=0.001)
    assert Residual(config).propose(loud, no_query).direction.item() == pytest.approx(-1.0)
    assert Residual(config).propose(quiet, no_query).direction.item() == pytest.approx(-10.0)
