"""Per-example clipped gradients, vectorised: what a device computes of its data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.func import grad, vjp, vmap

from client_app.datasets.dataset import Example
from client_app.isolation import isolated
from client_app.task import Batch, Task, Tensors, device_of
from regionfed.sketch import sketch
from regionfed.vector import Layout

_TINY = 1e-12


@dataclass(frozen=True)
class ClippedSums:
    """Sums over a sample.

    Attributes
    ----------
    total : torch.Tensor
        Sum of per-example gradients, each of L2 norm <= C over the whole vector; (p,).
    sketch : torch.Tensor
        Sum of their sketches, each of L2 norm <= C; (k,).
    loss : float
        Sum of losses, each in [0, cap].
    """

    total: torch.Tensor
    sketch: torch.Tensor
    loss: float


def clip_scale(norms: torch.Tensor, bound: float) -> torch.Tensor:
    """Return min(1, C / max(norm, tiny)) for norms (B,): a zero gradient stays zero."""
    return (bound / norms.clamp(min=_TINY)).clamp(max=1.0)


def clipped_sums(
    task: Task,
    layout: Layout,
    point: torch.Tensor,
    examples: Sequence[Example],
    *,
    clip_norm: float,
    loss_cap: float,
    signs: Tensors,
    microbatch: int,
    inner_step: float = 0.0,
) -> ClippedSums:
    """Return the clipped sums over examples, at the weights `point`.

    Parameters
    ----------
    task : Task
    layout : Layout
    point : torch.Tensor
        Weights (p,).
    examples : sequence of Example
        May be empty: everything is zero then.
    clip_norm : float
        C. One example changes `total` by at most C and `sketch` by at most C, in L2.
    loss_cap : float
        One example changes `loss` by at most this.
    signs : Mapping[str, torch.Tensor]
        From `sketch_signs`; empty for no sketch (k = 0).
    microbatch : int
        Examples per pass: memory is microbatch * p floats, whatever the number of examples.
    inner_step : float
        eta: above 0 the gradients are those of `meta_gradient`.
    """
    device = device_of(task)
    total = torch.zeros(layout.size, device=device)
    views = layout.views(total)
    signs = {name: sign.to(device) for name, sign in signs.items()}
    size = next(iter(signs.values())).shape[1] if signs else 0
    sketched = torch.zeros(size, device=device)
    loss = 0.0
    weights = layout.tensors(point.to(device))

    def of_each(part: Sequence[Example]) -> Gradient:
        return example_gradients(task, weights, task.encode(part), inner_step)

    for _, (found, losses) in isolated(of_each, batches(examples, microbatch)):
        loss += float(losses.float().nan_to_num(loss_cap).clamp(0.0, loss_cap).sum())
        norms = (
            torch.stack([g.reshape(len(g), -1).float().square().sum(1) for g in found.values()])
            .sum(0)
            .sqrt()
        )
        # A value that is not finite must not pass: it would take the whole sum with it.
        # min(1, C / inf) is 0 but 0 * inf is nan, so such an example is taken out.
        keep = torch.isfinite(norms)
        gradients = found if bool(keep.all()) else {n: g[keep] for n, g in found.items()}
        if not bool(keep.any()):
            continue
        scale = clip_scale(norms[keep], clip_norm)
        for name, gradient in gradients.items():
            flat = gradient.reshape(len(gradient), -1).float()
            views[name].view(-1).addmv_(flat.t(), scale)
        if size:
            sketches = sketch(gradients, signs) * scale[:, None]
            sketched += clip_scale(sketches.norm(dim=1), clip_norm) @ sketches
    return ClippedSums(total.cpu(), sketched.cpu(), loss)


def loss_differences(
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
    """Return summed losses at ``base + t * direction``, relative to t = 0, one per step.

    Each example's vector of differences is clipped to the L2 norm `clip_norm`, so that one
    example changes the result by at most that.
    """
    device = device_of(task)
    base, direction = base.to(device), direction.to(device)
    out = torch.zeros(len(steps), device=device)

    def of_each(part: Sequence[Example]) -> torch.Tensor:
        batch = task.encode(part)
        at_zero = task.losses(layout.tensors(base), batch)
        rows = [task.losses(layout.tensors(base + t * direction), batch) for t in steps]
        return (torch.stack(rows, 1) - at_zero[:, None]).float()

    with torch.no_grad():
        for _, found in isolated(of_each, batches(examples, microbatch)):
            # What breaks the model is as bad as can be, never as good as rho = 0.
            differences = found.nan_to_num(clip_norm, clip_norm, -clip_norm)
            out += clip_scale(differences.norm(dim=1), clip_norm) @ differences
    return [float(v) for v in out]


def batches(examples: Sequence[Example], microbatch: int) -> list[Sequence[Example]]:
    """Return batches of at most `microbatch` examples, alike lengths together."""
    ordered = sorted(examples, key=lambda e: (len(e.source), e.source, e.target))
    return [ordered[i : i + microbatch] for i in range(0, len(ordered), microbatch)]


def example_gradients(
    task: Task, weights: Tensors, batch: Batch, inner_step: float = 0.0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return each example's gradients by name, (B, ...), and losses (B,).

    With ``inner_step > 0`` they are taken of the loss after one step of that size along the
    example's own gradient (`meta_gradient`).
    """

    def one(weights: dict[str, torch.Tensor], example: Batch) -> Gradient:
        def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return task.losses(weights, {k: v[None] for k, v in example.items()})[0]

        if inner_step > 0.0:
            return meta_gradient(loss, weights, inner_step)
        return gradient_of(loss, weights)

    gradients, losses = vmap(one, in_dims=(None, 0))(dict(weights), batch)
    return {name: g.detach() for name, g in gradients.items()}, losses.detach()


Loss = Callable[[dict[str, torch.Tensor]], torch.Tensor]
Gradient = tuple[dict[str, torch.Tensor], torch.Tensor]


def gradient_of(loss: Loss, weights: dict[str, torch.Tensor]) -> Gradient:
    """Return the gradient of `loss` by name, and its value; not to be differentiated again.

    What `torch.func.grad` returns can be: it keeps all that its backward pass computes, and with
    it every activation until the end. This lets go of them on its way.
    """
    value, pull_back = vjp(loss, weights)[:2]
    with torch.no_grad():
        (gradient,) = pull_back(torch.ones_like(value), retain_graph=False)
    return gradient, value


def meta_gradient(loss: Loss, weights: dict[str, torch.Tensor], eta: float) -> Gradient:
    """Return the gradient of ``M(w) = L(w - eta grad L(w))`` by name, and M(w), exactly.

    ``grad M = (I - eta H) g'`` with H the Hessian of L at w and g' its gradient after the step.
    H is symmetric, so that H g' is the pull-back of g' through ``w -> grad L(w)``: no Hessian is
    built. Three backward passes instead of one; the model's attention must be differentiable
    twice (eager is, fused kernels are not). Source: Finn, Abbeel, Levine (2017), equation 1.

    Parameters
    ----------
    loss : callable
        L, differentiable twice.
    weights : dict of str to torch.Tensor
        w.
    eta : float
        Size of the inner step.
    """
    inner, pull_back = vjp(grad(loss), weights)[:2]
    ahead = {name: w - eta * inner[name] for name, w in weights.items()}
    outer, value = gradient_of(loss, ahead)
    with torch.no_grad():
        (curved,) = pull_back(outer, retain_graph=False)
    return {name: g - eta * curved[name] for name, g in outer.items()}, value
