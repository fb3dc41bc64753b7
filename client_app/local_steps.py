"""A device as one: what K steps on its own examples change, and its losses and scores as one.

Where the unit of privacy is the device, each thing that it says is bounded as a whole: all of its
examples together change the coordinator's sums by no more than one bound.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from client_app.datasets.dataset import Example
from client_app.gradients import ClippedSums, batches, loss_differences
from client_app.task import Batch, Task, Tensors, device_of
from regionfed.privacy.unit import clip
from regionfed.sketch import sketch
from regionfed.vector import Layout

BATCH = 32

OptimiserFactory = Callable[[list[torch.Tensor], float], torch.optim.Optimizer]

# Without weight decay, which would draw the model that steps start from to zero.
OPTIMISERS: Mapping[str, OptimiserFactory] = {
    "adamw": lambda weights, lr: torch.optim.AdamW(weights, lr=lr, weight_decay=0.0),
    "sgd": lambda weights, lr: torch.optim.SGD(weights, lr=lr),
}


@dataclass(frozen=True)
class Steps:
    """How a device steps.

    Attributes
    ----------
    count : int
        K.
    learning_rate : float
    seed : int
        Of the order of its examples.
    optimiser : str
        A name in `OPTIMISERS`.
    """

    count: int
    learning_rate: float
    seed: int
    optimiser: str = "adamw"


def walk(
    task: Task, layout: Layout, start: torch.Tensor, examples: Sequence[Example], steps: Steps
) -> torch.Tensor:
    """Return what K steps on the examples' mean loss add to `start`, (p,).

    A pure function: `start` and the shared model are read only, and only trainable weights enter
    the result, so that no buffer ever does. Without examples it is zero. It is not finite where
    the steps diverge.
    """
    if not examples:
        return torch.zeros(layout.size)
    # What steps is the float32 vector, whatever the model computes in: in 8 bits small steps
    # vanish, and rounding `start` to them would look like a step.
    at = start.to(device_of(task)).detach().clone().requires_grad_()
    optimiser = OPTIMISERS[steps.optimiser]([at], steps.learning_rate)
    order = _batches(len(examples), steps.seed)
    for _ in range(steps.count):
        batch = task.encode([examples[i] for i in next(order)])
        optimiser.zero_grad()
        # An unused weight's gradient is zero: neither optimiser moves it then.
        task.losses(layout.tensors(at), batch).float().mean().backward()
        optimiser.step()
    return at.detach().to(start.device) - start


def clipped_delta(
    task: Task,
    layout: Layout,
    point: torch.Tensor,
    examples: Sequence[Example],
    *,
    steps: Steps,
    clip_norm: float,
    loss_cap: float,
    signs: Tensors,
    microbatch: int,
) -> ClippedSums:
    """Return what a device says of its K steps from `point`, bounded as a whole.

    ``start - end`` is a pseudo-gradient: it points uphill (Reddi et al. 2021, algorithm 1, with
    the other sign). A device that diverged contributes zero.

    Returns
    -------
    ClippedSums
        ``||total|| <= C``, ``||sketch|| <= C`` and ``0 <= loss <= loss_cap`` (its mean loss at
        `point`), whatever its examples.
    """
    delta = -walk(task, layout, point, examples, steps)
    if not bool(torch.isfinite(delta).all()):
        delta = torch.zeros_like(delta)
    total = clip(delta, clip_norm)
    if signs:
        one = {name: view[None] for name, view in layout.views(total).items()}
        sketched = clip(sketch(one, signs)[0], clip_norm)
    else:
        sketched = torch.zeros(0)
    weights = layout.tensors(point.to(device_of(task)))
    losses = [
        _losses(task, weights, task.encode(part), loss_cap)
        for part in batches(examples, microbatch)
    ]
    loss = float(torch.cat(losses).mean()) if losses else 0.0
    return ClippedSums(total, sketched, loss)


def mean_differences(
    task: Task,
    layout: Layout,
    base: torch.Tensor,
    direction: torch.Tensor,
    *,
    steps: Sequence[float],
    examples: Sequence[Example],
    clip_norm: float,
    microbatch: int,
) -> list[float]:
    """Return the mean of `loss_differences` over the examples: L2 norm at most `clip_norm`.

    Each example's is clipped first, so that one which breaks does not speak for the device.
    """
    sums = loss_differences(
        task,
        layout,
        base,
        direction,
        steps=steps,
        examples=examples,
        clip_norm=clip_norm,
        microbatch=microbatch,
    )
    mean = torch.tensor(sums) / max(len(examples), 1)
    return [float(v) for v in clip(mean, clip_norm)]


def _losses(task: Task, weights: Tensors, batch: Batch, cap: float) -> torch.Tensor:
    """Return each example's loss, in [0, cap]; (B,)."""
    with torch.no_grad():
        return task.losses(weights, batch).float().nan_to_num(cap).clamp(0.0, cap)


def _batches(count: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of indices without end; each pass over all of them is shuffled anew."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator)
        yield from (rows.tolist() for rows in torch.split(order, BATCH))
