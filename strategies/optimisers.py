"""Server optimisers: from the mean noised gradient to the next global model."""

from collections.abc import Mapping
from typing import Protocol

import torch

from regionfed.registry import Registry


class ServerOptimiser(Protocol):
    """One step of the global model. Works on noised gradients, so it costs no privacy."""

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the next model (p,); `gradient` (p,) points uphill."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of what has to be saved to go on later."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state_dict` returned."""
        ...


class ServerOptimiserFactory(Protocol):
    """Makes an optimiser from the settings."""

    def __call__(self, lr: float, momentum: float) -> ServerOptimiser:
        """Return an optimiser with this step size and momentum."""
        ...


OPTIMISERS: Registry[ServerOptimiserFactory] = Registry(
    "server-optimiser",
    {"momentum": "strategies.optimisers:Momentum", "adam": "strategies.optimisers:Adam"},
)


class Momentum:
    """Averaged heavy ball: m <- b m + (1 - b) g; theta <- theta - lr m.

    The average keeps the step's size whatever b is, and filters the noise of single rounds.
    """

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr = lr
        self._momentum = momentum
        self._mean: torch.Tensor | None = None
        self._steps = 0

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the next model; the running mean is corrected for its start at zero."""
        if self._mean is None:
            self._mean = torch.zeros_like(gradient)
        self._steps += 1
        self._mean.lerp_(gradient, 1.0 - self._momentum)
        return theta - self._lr / (1.0 - self._momentum**self._steps) * self._mean

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the running mean and the number of steps."""
        mean = {} if self._mean is None else {"mean": self._mean.clone()}
        return {**mean, "steps": torch.tensor(self._steps)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the running mean and the number of steps."""
        self._mean = state["mean"].clone() if "mean" in state else None
        self._steps = int(state["steps"])


class Adam:
    """Adam (Kingma and Ba 2015), beta_1 = momentum, beta_2 = 0.99."""

    _BETA2 = 0.99
    _EPSILON = 1e-8

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr = lr
        self._momentum = Momentum(1.0, momentum)
        self._square: torch.Tensor | None = None
        self._steps = 0

    def step(self, theta: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the next model."""
        if self._square is None:
            self._square = torch.zeros_like(gradient)
        self._steps += 1
        self._square.lerp_(gradient.square(), 1.0 - self._BETA2)
        scale = (self._square / (1.0 - self._BETA2**self._steps)).sqrt_().add_(self._EPSILON)
        mean = -self._momentum.step(torch.zeros_like(gradient), gradient)
        return theta - self._lr * mean / scale

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return both moments and the number of steps."""
        square = {} if self._square is None else {"square": self._square.clone()}
        return {**self._momentum.state_dict(), **square}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore both moments and the number of steps."""
        self._momentum.load_state_dict(state)
        self._square = state["square"].clone() if "square" in state else None
        self._steps = int(state["steps"])
