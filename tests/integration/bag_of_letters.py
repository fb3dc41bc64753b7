"""A task that a process loads in no time: letters of a query, and a linear model.

Processes of a deployment start anew for each message, so the tests of it spend little on models.
"""

from collections.abc import Sequence

import torch
from torch import nn

from client_app.datasets.dataset import Example
from client_app.task import Batch, Tensors
from regionfed.config import Config

LETTERS = "abcdefghijklmnop"


def letters(text: str) -> list[float]:
    """Return how often each letter occurs in a text, as shares."""
    return [text.count(letter) / max(len(text), 1) for letter in LETTERS]


class BagOfLetters:
    """Predicts the length of the answer from the letters of the question."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.module: nn.Module = nn.Linear(len(LETTERS), 1)

    def encode(self, examples: Sequence[Example]) -> Batch:
        return {
            "x": torch.tensor([letters(e.source) for e in examples]),
            "y": torch.tensor([len(e.target) / 16.0 for e in examples]),
        }

    def losses(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        guess = batch["x"] @ weights["weight"].reshape(-1) + weights["bias"].reshape(())
        return (guess - batch["y"]) ** 2

    def scores(self, weights: Tensors, examples: Sequence[Example]) -> list[float]:
        return [float(v) for v in torch.exp(-self.losses(weights, self.encode(examples)))]


def make_task(config: Config) -> BagOfLetters:
    """Return the task; its settings play no part."""
    del config
    return BagOfLetters()
