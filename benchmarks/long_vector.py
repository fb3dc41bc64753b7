"""A task with as many parameters as it is told, that costs little else: what is timed is the way.

Named by ``task``; ``model`` is the number of parameters.
"""

from collections.abc import Sequence

import torch
from torch import nn

from client_app.datasets.dataset import Example
from client_app.task import Batch, Tensors
from regionfed.config import Config

LETTERS = "abcdefghijklmnop"


class LongVector:
    """A linear guess from sixteen parameters; the others are pulled towards nothing.

    Parameters
    ----------
    size : int
        Parameters in all.
    """

    def __init__(self, size: int) -> None:
        self.module: nn.Module = nn.Module()
        self.module.register_parameter("weight", nn.Parameter(torch.zeros(size)))

    def encode(self, examples: Sequence[Example]) -> Batch:
        """Return how often each letter occurs, and how long the answer is."""
        counts = [[e.source.count(letter) for letter in LETTERS] for e in examples]
        return {
            "x": torch.tensor(counts, dtype=torch.float32),
            "y": torch.tensor([len(e.target) / 16.0 for e in examples]),
        }

    def losses(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        """Return a loss per example, whose gradient is as long as the vector."""
        vector = weights["weight"]
        guess = batch["x"] @ vector[: len(LETTERS)]
        return (guess - batch["y"]) ** 2 + 1e-9 * (vector**2).sum()

    def scores(self, weights: Tensors, examples: Sequence[Example]) -> list[float]:
        """Return scores between nothing and one."""
        return [float(v) for v in torch.exp(-self.losses(weights, self.encode(examples)))]


def make_task(config: Config) -> LongVector:
    """Return the task of the size that ``model`` says."""
    return LongVector(int(config.model))
