"""What a task's answers are held to before they are summed up."""

import math

import pytest
import torch

from client_app.task import score_sums
from tests.conftest import ToyTask, toy_example


class Boaster(ToyTask):
    """A task that does not keep its promise of scores in [0, 1]."""

    def __init__(self, score: float) -> None:
        super().__init__(1)
        self._score = score

    def scores(self, weights: object, examples: object) -> list[float]:
        return [0.5, self._score]


@pytest.mark.parametrize(
    ("score", "counted"),
    [(7.0, 1.0), (-7.0, 0.0), (math.nan, 0.0), (math.inf, 0.0), (0.25, 0.25)],
)
def test_one_example_changes_its_row_by_one_at_most(score: float, counted: float) -> None:
    """The bound on held-out scores is kept by construction, whoever wrote the task."""
    examples = [toy_example([1.0]), toy_example([2.0])]
    weights = {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}
    sums = score_sums(Boaster(score), weights, examples, ("toy",))
    assert sums.counts == (2.0,) and sums.sums == (0.5 + counted,)
