"""Second part of pretraining: learn to be taught, on invented regions.

Each step invents a region, takes a few descent steps on its queries in the weights that a
federation will train, and asks the whole model to be good at it *after* these steps and noise.
First-order MAML (Finn, Abbeel and Levine 2017, section 5.2); the noise is what privacy will add.
Only invented words and public queries are used, so nothing of any real region is learnt.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch

from client_app.datasets.dataset import Example
from client_app.datasets.retail import public_examples
from client_app.datasets.retail.invented import InventedRegion
from client_app.tasks.text_to_text import TextToText

Weights = dict[str, torch.Tensor]

_EMBEDDING = "shared.weight"


@dataclass(frozen=True)
class MetaOptions:
    """How to learn to be taught.

    Attributes
    ----------
    steps : int
        Invented regions.
    lr : float
        Highest learning rate of AdamW.
    inner_steps, support, query : int
        Descent steps on a region, queries for each, queries to judge by.
    distance : float
        Most that one inner step moves the weights, in L2.
    noise, rest_noise : float
        Std of the noise on each weight that a federation trains, and on the others.
    keep : float
        Weight of the loss without any teaching, on public queries.
    seed : int
    """

    steps: int
    lr: float
    inner_steps: int = 3
    support: int = 64
    query: int = 96
    distance: float = 2.0
    noise: float = 0.05
    rest_noise: float = 0.03
    keep: float = 0.3
    seed: int = 0


def learn_to_be_taught(
    task: TextToText, taught: frozenset[str], coined: torch.Tensor, options: MetaOptions
) -> None:
    """Train a model in place.

    Parameters
    ----------
    task : TextToText
    taught : frozenset of str
        Names of the weights that a federation will train.
    coined : torch.Tensor
        Token ids of the invented words.
    options : MetaOptions
    """
    parameters = dict(task.module.named_parameters())
    task.module.requires_grad_(True)
    optimiser = torch.optim.AdamW(parameters.values(), lr=options.lr, weight_decay=0.01)
    rate = warm_cosine(options.steps, options.steps // 30)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    generator = torch.Generator().manual_seed(options.seed)
    rng = Random(f"retail/{options.seed}/invented")

    def noised(weights: Weights) -> Weights:
        std = {name: options.noise if name in taught else options.rest_noise for name in weights}
        return {
            name: value + std[name] * torch.randn(value.shape, generator=generator)
            for name, value in weights.items()
        }

    started, sums = time.perf_counter(), torch.zeros(3)
    for step in range(1, options.steps + 1):
        region = InventedRegion.draw(rng)
        start = {name: value.detach().clone() for name, value in parameters.items()}
        # A word never seen before has its embedding as it was drawn: draw it anew.
        seen = start[_EMBEDDING][coined]
        fresh = torch.randn(seen.shape, generator=generator)
        start[_EMBEDDING][coined] = seen.mean(0) + seen.std(0) * fresh
        weights, untaught = start, 0.0
        for inner in range(options.inner_steps):
            examples = region.examples(rng, options.support)
            loss, gradients = _gradients(task, weights, examples, taught)
            untaught = loss if inner == 0 else untaught
            norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
            scale = options.distance / max(norm, 1.0)
            weights = weights | {n: weights[n] - scale * g for n, g in gradients.items()}
        after, gradients = _gradients(task, noised(weights), region.examples(rng, options.query))
        public = public_examples((options.seed + 1) * 10**9 + step, options.query)
        kept, rest = _gradients(task, noised(start), public)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].add(rest[name], alpha=options.keep)
            if name == _EMBEDDING:
                parameter.grad[coined] = 0.0
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimiser.step()
        schedule.step()
        sums += torch.tensor([untaught, after, kept])
        if step % 100 == 0:
            untaught, after, kept = (sums / 100).tolist()
            seconds = time.perf_counter() - started
            print(
                f"region {step:5d}  loss untaught {untaught:.3f}, taught {after:.3f}, "
                f"public {kept:.3f}  {seconds:5.0f} s",
                flush=True,
            )
            sums.zero_()


def warm_cosine(steps: int, warmup: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: a linear warm-up, then half a cosine."""

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))

    return rate


def _gradients(
    task: TextToText,
    weights: Weights,
    examples: Sequence[Example],
    names: frozenset[str] | None = None,
) -> tuple[float, Weights]:
    """Return the mean loss and its gradient with respect to the named weights, or to all."""
    free = {n: w.clone().requires_grad_() for n, w in weights.items() if not names or n in names}
    loss = task.losses(weights | free, task.encode(examples)).mean()
    gradients = torch.autograd.grad(loss, list(free.values()))
    return float(loss.detach()), dict(zip(free, gradients, strict=True))
