"""What a device needs of a model and its data: a differentiable black box with scores."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from client_app.datasets.dataset import Example
from client_app.isolation import isolated
from client_app.recompute import recompute_blocks
from regionfed.config import Config
from regionfed.errors import ConfigurationError
from regionfed.registry import Registry

# A padded batch: tensors that share their first axis, the examples.
Batch = dict[str, torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


class Task(Protocol):
    """A model and what it is asked to do. All methods are functions of the weights given."""

    @property
    def module(self) -> nn.Module:
        """The model; its trainable parameters are what is federated."""
        ...

    def encode(self, examples: Sequence[Example]) -> Batch:
        """Return a padded batch of at least one example, on the model's device."""
        ...

    def losses(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        """Return each example's own loss, (B,); differentiable in `weights`, free of dropout.

        An example's loss depends on that example alone (the mean over *its* valid tokens, 0 when
        it has none), so that a gradient does not depend on how examples were batched. It must
        run under `torch.func.vmap`: no branch on values.
        """
        ...

    def scores(self, weights: Tensors, examples: Sequence[Example]) -> list[float]:
        """Return each example's score in [0, 1]."""
        ...


@runtime_checkable
class Answers(Protocol):
    """What a task can do besides, if queries are to be answered with it."""

    def answers(self, weights: Tensors, examples: Sequence[Example]) -> list[str]:
        """Return the model's answers; the examples' targets are not looked at."""
        ...


@runtime_checkable
class Saves(Protocol):
    """What a task can do besides, if its model is to be used elsewhere."""

    def save(self, weights: Tensors, folder: Path) -> None:
        """Write the model with these weights as a folder that others can load."""
        ...

    def usage(self, task: str) -> str:
        """Return Python code that loads such a folder, named by `folder`, and answers a query."""
        ...


TaskFactory = Callable[[Config], Task]

TASKS: Registry[TaskFactory] = Registry(
    "task",
    {
        "text-to-text": "client_app.tasks.text_to_text:make_task",
        "labels": "client_app.tasks.labels:make_task",
        "image": "client_app.tasks.image:make_task",
    },
)


def task_of(config: Config) -> Task:
    """Make the task that a configuration names, its model without dropout and batch statistics.

    Raises
    ------
    ConfigurationError
        If a layer mixes the examples of a batch all the same, naming it.
    """
    task = TASKS.load(config.task)(config)
    # Whatever mode it came in: a loss must be the same each time, and that of one example.
    for name, layer in task.module.eval().named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is None:
            raise ConfigurationError(
                f"task='{config.task}': its layer '{name}' ({type(layer).__name__}) mixes the "
                f"examples of a batch, so that no example has a gradient of its own, and one "
                f"alone has no statistics. Put GroupNorm or LayerNorm in its place, or set "
                f"track_running_stats=True."
            )
    if config.gradient_checkpointing:
        recompute_blocks(task.module)
    return task


def device_of(task: Task) -> torch.device:
    """Return where a task's model is, and hence its batches and weights."""
    return next(task.module.parameters()).device


@dataclass(frozen=True)
class ScoreSums:
    """Per task: number of examples and their summed score, in the order of the tasks."""

    counts: tuple[float, ...]
    sums: tuple[float, ...]

    def means(self, tasks: Sequence[str]) -> dict[str, float | None]:
        """Return the mean score of each task; None for one without examples."""
        rows = zip(tasks, self.counts, self.sums, strict=True)
        return {task: total / count if count else None for task, count, total in rows}


def score_sums(
    task: Task, weights: Tensors, examples: Sequence[Example], tasks: Sequence[str]
) -> ScoreSums:
    """Score examples and sum up by task; a task without examples counts 0.

    A score outside of [0, 1] is cut to it, and one that is no number is 0, whatever the task
    promises: an example changes its task's row by at most 1 in each column, which is the bound that
    noise on scores is planned for.
    """
    counts = dict.fromkeys(tasks, 0.0)
    sums = dict.fromkeys(tasks, 0.0)
    scored = isolated(lambda part: task.scores(weights, part), [examples])
    for part, scores in scored:
        for example, score in zip(part, scores, strict=True):
            counts[example.task] += 1.0
            sums[example.task] += min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0
    return ScoreSums(tuple(counts.values()), tuple(sums.values()))
