"""Server optimisers: the textbook step, and the same step after a restart."""

from collections.abc import Callable

import pytest
import torch

from regionfed.errors import ConfigurationError
from strategies.optimisers import OPTIMISERS, Adam, Momentum, ServerOptimiser

P = 6
Make = Callable[[], ServerOptimiser]
BOTH: list[Make] = [lambda: Momentum(0.5, 0.9), lambda: Adam(0.01, 0.9)]


def gradients(n: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(n, P, generator=generator))


@pytest.mark.parametrize("make", BOTH)
def test_it_descends(make: Make) -> None:
    """A gradient points uphill: on a bowl, the steps lead down."""
    optimiser, theta = make(), torch.full((P,), 3.0)
    for _ in range(500):
        theta = optimiser.step(theta, 2.0 * theta)
    assert float(theta.norm()) < 1.0


def test_momentum_is_the_corrected_average_of_gradients() -> None:
    """Against its definition, written out; a constant gradient gives steps of lr from the start."""
    lr, b = 0.3, 0.8
    optimiser, theta, mean = Momentum(lr, b), torch.zeros(P), torch.zeros(P)
    for t, g in enumerate(gradients(7), 1):
        before = theta
        theta = optimiser.step(theta, g)
        mean = b * mean + (1.0 - b) * g
        assert torch.allclose(theta, before - lr * mean / (1.0 - b**t), atol=1e-6)
    steady, theta = Momentum(lr, b), torch.zeros(P)
    for t in range(1, 4):
        theta = steady.step(theta, torch.ones(P))
        assert torch.allclose(theta, torch.full((P,), -lr * t), atol=1e-6)


def test_without_momentum_it_is_plain_descent() -> None:
    """theta - lr g."""
    (g,) = gradients(1)
    assert torch.allclose(Momentum(0.3, 0.0).step(torch.ones(P), g), 1.0 - 0.3 * g)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_adam_is_torch_s_adam(momentum: float) -> None:
    """Step by step against torch.optim.Adam with the same betas."""
    optimiser, theta = Adam(0.05, momentum), torch.ones(P)
    reference = torch.nn.Parameter(torch.ones(P))
    theirs = torch.optim.Adam([reference], lr=0.05, betas=(momentum, 0.99), eps=1e-8)
    for g in gradients(10):
        theta = optimiser.step(theta, g)
        reference.grad = g.clone()
        theirs.step()
        assert torch.allclose(theta, reference.detach(), atol=1e-5)


@pytest.mark.parametrize("make", BOTH)
def test_nothing_that_is_given_is_changed(make: Make) -> None:
    """theta and gradient belong to the caller."""
    optimiser, theta, g = make(), torch.ones(P), gradients(1)[0]
    kept = g.clone()
    for _ in range(2):
        optimiser.step(theta, g)
    assert torch.equal(theta, torch.ones(P)) and torch.equal(g, kept)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_restored_optimiser_goes_on_bit_for_bit(make: Make, stop: int) -> None:
    """Saved after any number of steps, even none."""
    straight, before, after = make(), make(), make()
    theta = other = torch.ones(P)
    for g in gradients(stop):
        theta, other = straight.step(theta, g), before.step(other, g)
    after.load_state_dict({k: v.clone() for k, v in before.state_dict().items()})
    for g in gradients(4, seed=1):
        theta, other = straight.step(theta, g), after.step(other, g)
        assert torch.equal(theta, other)


@pytest.mark.parametrize("make", BOTH)
def test_a_saved_state_is_a_picture_and_not_a_window(make: Make) -> None:
    """An observer may keep a state; later steps must not change it."""
    optimiser, (first, second) = make(), gradients(2)
    optimiser.step(torch.ones(P), first)
    state = optimiser.state_dict()
    picture = {k: v.clone() for k, v in state.items()}
    optimiser.step(torch.ones(P), second)
    assert all(torch.equal(state[k], picture[k]) for k in picture)


@pytest.mark.parametrize("make", BOTH)
def test_restoring_does_not_share_memory(make: Make) -> None:
    """Two optimisers of one state go their own ways."""
    source, (first, second) = make(), gradients(2)
    source.step(torch.ones(P), first)
    state = {k: v.clone() for k, v in source.state_dict().items()}
    one, other = make(), make()
    one.load_state_dict(state)
    other.load_state_dict(state)
    expected = make()
    expected.load_state_dict({k: v.clone() for k, v in state.items()})
    one.step(torch.ones(P), second)
    assert torch.equal(other.step(torch.ones(P), second), expected.step(torch.ones(P), second))


def test_optimisers_are_found_by_name() -> None:
    """The names of the settings, or a path; anything else is an error with the list."""
    assert isinstance(OPTIMISERS.load("momentum")(1.0, 0.9), Momentum)
    assert isinstance(OPTIMISERS.load("strategies.optimisers:Adam")(1.0, 0.9), Adam)
    with pytest.raises(ConfigurationError, match="did you mean 'momentum'"):
        OPTIMISERS.load("momentun")
