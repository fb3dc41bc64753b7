"""A user's own part of the model, made on the device; nothing of it ever leaves.

``theta_u = theta + alpha_r theta_r + alpha_u theta_u_local``: the last term is what a few AdamW
steps on the user's own examples add, weighted by how far the user is from the region.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from client_app.datasets.dataset import Example
from client_app.gradients import clipped_sums
from client_app.local_steps import Steps, walk
from client_app.task import Task
from regionfed.conflict import conflict, personalisation_weight
from regionfed.errors import RunError
from regionfed.privacy.plan import LOSS_CAP
from regionfed.randomness import derive_seed
from regionfed.vector import Layout

# Enough for a conflict well above what chance alone gives; a device's time is short.
CONFLICT_EXAMPLES = 128


@dataclass(frozen=True)
class Settings:
    """How a user's part is made; see the settings of the same names."""

    steps: int
    learning_rate: float
    clip_norm: float
    alpha_min: float
    alpha_gain: float
    microbatch: int
    seed: int


@dataclass(frozen=True)
class RegionModel:
    """What a user starts from.

    Attributes
    ----------
    point : torch.Tensor
        theta + alpha_r theta_r, (p,).
    update : torch.Tensor
        The region's released mean of clipped gradients, (p,).
    noise_std : float
        Standard deviation of the noise on each coordinate of `update`.
    """

    point: torch.Tensor
    update: torch.Tensor
    noise_std: float


@dataclass(frozen=True)
class UserGradient:
    """A user's mean clipped gradient, (p,), and how far chance alone would move it (L2)."""

    mean: torch.Tensor
    chance: float


@dataclass(frozen=True)
class UserPart:
    """A user's own part: theta_u_local (p,), alpha_u, and the conflict that alpha_u came from."""

    part: torch.Tensor
    alpha: float
    conflict: float


def adapt_user(
    task: Task,
    layout: Layout,
    region: RegionModel,
    examples: Sequence[Example],
    settings: Settings,
) -> UserPart:
    """Make a user's own part from its examples; without any it is zero."""
    gradient = user_gradient(task, layout, region.point, examples, settings)
    distance, alpha = user_weight(gradient, region, settings)
    return UserPart(local_part(task, layout, region.point, examples, settings), alpha, distance)


def local_part(
    task: Task, layout: Layout, start: torch.Tensor, examples: Sequence[Example], settings: Settings
) -> torch.Tensor:
    """Return what AdamW steps on the examples' mean loss add to `start`, (p,).

    Without weight decay, which would draw the region's model, not the user's part, to zero.

    Raises
    ------
    RunError
        If the steps diverge.
    """
    seed = derive_seed(settings.seed, "user batches")
    part = walk(task, layout, start, examples, Steps(settings.steps, settings.learning_rate, seed))
    if not bool(torch.isfinite(part).all()):
        raise RunError(
            f"the user's model diverged in {settings.steps} steps of {settings.learning_rate:g}: "
            f"lower user-lr."
        )
    return part


def user_gradient(
    task: Task, layout: Layout, point: torch.Tensor, examples: Sequence[Example], settings: Settings
) -> UserGradient:
    """Return the mean clipped gradient at `point`, and its standard error by two halves.

    For halves a and b, ``||a - b||^2 / 4`` is an unbiased estimate of the summed variance of the
    mean. Fewer than two examples tell nothing of chance: it is 0 then.
    """
    generator = torch.Generator().manual_seed(derive_seed(settings.seed, "user conflict"))
    order = torch.randperm(len(examples), generator=generator)[:CONFLICT_EXAMPLES].tolist()
    half = len(order) // 2
    parts = [order[:half], order[half : 2 * half]] if half else [order, order]
    first, second = (
        clipped_sums(
            task,
            layout,
            point,
            [examples[i] for i in chosen],
            clip_norm=settings.clip_norm,
            loss_cap=LOSS_CAP,
            signs={},
            microbatch=settings.microbatch,
        ).total.div_(max(len(chosen), 1))
        for chosen in parts
    )
    return UserGradient(0.5 * (first + second), 0.5 * float((first - second).norm()))


def user_weight(
    gradient: UserGradient, region: RegionModel, settings: Settings
) -> tuple[float, float]:
    """Return the user's conflict d_u and its weight alpha_u, in [alpha_min, 1].

    d_u is the distance of the user's gradient from the region's, less the noise on the latter. A
    region is weighed against the median of all regions; a median over users would be one more
    release, so a user is weighed against itself: the sigmoid is centred on, and scaled by, the
    distance that chance would give a user whose examples are like the region's.
    """
    floor = region.update.numel() * region.noise_std**2
    distance = conflict(float((gradient.mean - region.update).square().sum()), floor)
    weight = personalisation_weight(
        distance, gradient.chance, gradient.chance, settings.alpha_min, settings.alpha_gain
    )
    return distance, weight
