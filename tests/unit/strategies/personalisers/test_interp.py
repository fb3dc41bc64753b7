"""Interp: towards the region's own model, a noised gradient a step."""

import pytest
import torch

from regionfed.config import Config
from regionfed.personaliser import PERSONALISERS
from strategies.personalisers.interp import Interp, local_model
from tests.conftest import released

THETA = torch.tensor([1.0, 2.0])
MINIMUM = torch.tensor([-1.0, 0.0])


def slope(point: torch.Tensor, inner_step: float = 0.0) -> torch.Tensor:
    """Return the gradient of |w - MINIMUM|^2 / 2."""
    assert inner_step == 0.0
    return point - MINIMUM


def test_local_steps_are_plain_descent_from_theta() -> None:
    """After E steps of s the way to the minimum that is left is (1 - s)^E of it."""
    for steps in (1, 3, 7):
        there = local_model(THETA, slope, 0.25, steps)
        assert torch.allclose(there - MINIMUM, 0.75**steps * (THETA - MINIMUM))


@pytest.mark.parametrize("sign", ["descent", "published"])
def test_it_proposes_the_way_walked_whatever_the_sign(sign: str) -> None:
    """theta_loc - theta: it points down already."""
    config = Config(personal_step=0.25, local_steps=3, sign=sign)
    proposal = Interp(config).propose(released(theta=THETA), slope)
    assert torch.allclose(proposal.direction, (1.0 - 0.75**3) * (MINIMUM - THETA))
    assert proposal.strategy == "interp" and "3 local steps" in proposal.reason


def test_it_asks_for_as_many_gradients_as_it_declares() -> None:
    """Each at the moving point."""
    asked: list[torch.Tensor] = []

    def query(point: torch.Tensor, inner_step: float = 0.0) -> torch.Tensor:
        asked.append(point)
        return slope(point)

    interp = Interp(Config(personal_step=0.5, local_steps=4))
    interp.propose(released(theta=THETA), query)
    assert len(asked) == interp.queries == 4
    assert torch.equal(asked[0], THETA)
    assert torch.allclose(asked[1], THETA - 0.5 * slope(THETA))


def test_the_noise_of_all_steps_stays_within_the_limit() -> None:
    """step * tau * sqrt(E)."""
    config = Config(personal_step=10.0, local_steps=4, noise_limit=0.5)
    facts = released(theta=torch.zeros(1), noise_std=0.1)
    found = Interp(config).propose(facts, lambda *_: torch.ones(1)).direction
    assert found.item() == pytest.approx(-4 * 0.5 / (0.1 * 2.0))


def test_it_is_found_by_name() -> None:
    assert isinstance(PERSONALISERS.load("interp")(Config()), Interp)
