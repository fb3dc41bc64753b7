"""Meta: the region's gradient after the world's step."""

import pytest
import torch

from regionfed.config import Config
from regionfed.personaliser import PERSONALISERS
from strategies.personalisers.meta import Meta, look_ahead
from tests.conftest import released

THETA = torch.tensor([1.0, -2.0])
G = torch.tensor([0.5, 0.25])


def recording(asked: list[tuple[torch.Tensor, float]]) -> object:
    def query(point: torch.Tensor, inner_step: float = 0.0) -> torch.Tensor:
        asked.append((point, inner_step))
        return torch.tensor([4.0, 8.0])

    return query


@pytest.mark.parametrize(("sign", "factor"), [("descent", -0.5), ("published", 0.5)])
def test_the_first_order_asks_once_where_the_world_would_go(sign: str, factor: float) -> None:
    """theta_r = -rho s grad L_r(theta - eta g)."""
    asked: list[tuple[torch.Tensor, float]] = []
    meta = Meta(Config(personal_step=0.5, inner_step=2.0, sign=sign))
    proposal = meta.propose(released(theta=THETA, global_update=G), recording(asked))
    ((point, inner),) = asked
    assert len(asked) == meta.queries == 1
    assert torch.equal(point, torch.tensor([0.0, -2.5])) and inner == 0.0
    assert torch.equal(proposal.direction, factor * torch.tensor([4.0, 8.0]))
    assert proposal.strategy == "meta" and "order 1" in proposal.reason


def test_the_second_order_asks_at_theta_through_each_example_s_step() -> None:
    """The devices differentiate through the step; see the meta-gradient's own tests."""
    asked: list[tuple[torch.Tensor, float]] = []
    meta = Meta(Config(inner_step=2.0, meta_order=2))
    proposal = meta.propose(released(theta=THETA, global_update=G), recording(asked))
    ((point, inner),) = asked
    assert torch.equal(point, THETA) and inner == 2.0
    assert "order 2" in proposal.reason


def test_the_first_order_is_exact_for_a_released_step() -> None:
    """The gradient of w -> L(w - eta g) with g constant is grad L at w - eta g."""
    w = THETA.clone().requires_grad_()
    loss = look_ahead(w, G, 2.0).pow(4).sum()
    (expected,) = torch.autograd.grad(loss, w)
    assert torch.allclose(4.0 * look_ahead(THETA, G, 2.0) ** 3, expected)


def test_descent_lowers_the_loss_after_the_world_s_step() -> None:
    """On a quadratic: theta - eta g + theta_r is nearer to the region's minimum."""
    minimum = torch.tensor([-3.0, 5.0])
    meta = Meta(Config(personal_step=0.2, inner_step=1.0))
    facts = released(theta=THETA, global_update=G)
    direction = meta.propose(facts, lambda p, inner_step=0.0: p - minimum).direction
    ahead = look_ahead(THETA, G, 1.0)
    assert float((ahead + direction - minimum).norm()) < float((ahead - minimum).norm())


def test_it_is_found_by_name() -> None:
    assert isinstance(PERSONALISERS.load("meta")(Config()), Meta)
