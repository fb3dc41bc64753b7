"""Gradients, meta-gradients and conflict against brute force: a T5, a RoBERTa and a CNN."""

from collections.abc import Sequence

import pytest
import torch

from client_app.datasets.dataset import Example
from client_app.gradients import clipped_sums, example_gradients, meta_gradient
from client_app.task import Batch, Task, Tensors
from regionfed.conflict import conflict
from regionfed.vector import Layout
from tests.conftest import FAMILIES, ToyTask, brute_force, clipped, toy_example

ETA = 0.3


@pytest.fixture(params=list(FAMILIES))
def case(request: pytest.FixtureRequest) -> tuple[Task, list[Example]]:
    """A model with a few thousand weights, and examples for it."""
    make, examples = FAMILIES[request.param]
    return make(0), examples[:4]


def composed(
    task: Task, layout: Layout, point: torch.Tensor, batch: Batch, eta: float
) -> torch.Tensor:
    """Return M(w) = L(w - eta grad L(w)) of the first example, by plain autograd; w is `point`."""
    weights = layout.views(point)
    example = {k: v[:1] for k, v in batch.items()}
    loss = task.losses(weights, example)[0]
    inner = torch.autograd.grad(loss, point, create_graph=True)[0]
    return task.losses(layout.views(point - eta * inner), example)[0]


def vectors(
    task: Task, layout: Layout, examples: Sequence[Example], eta: float = 0.0
) -> torch.Tensor:
    weights = layout.tensors(layout.read(task.module))
    gradients, _ = example_gradients(task, weights, task.encode(examples), eta)
    return torch.stack(
        [layout.flatten({n: g[i] for n, g in gradients.items()}) for i in range(len(examples))]
    )


def test_meta_gradients_equal_autograd_on_the_composed_loss(
    case: tuple[Task, list[Example]],
) -> None:
    """M4: (I - eta H) g' is the gradient of L(w - eta grad L(w)), example by example."""
    task, examples = case
    layout = Layout.of(task.module)
    found = vectors(task, layout, examples, ETA)
    batch = task.encode(examples)
    for i, row in enumerate(found):
        point = layout.read(task.module).requires_grad_()
        one = {k: v[i : i + 1] for k, v in batch.items()}
        meta = composed(task, layout, point, one, ETA)
        expected = torch.autograd.grad(meta, point)[0]
        assert torch.allclose(row, expected, atol=1e-5)
    # The curvature matters, else this tests nothing beyond the gradient ahead.
    plain = vectors(task, layout, examples)
    assert float((found - plain).norm()) > 1e-2 * float(plain.norm())


def test_meta_gradients_equal_finite_differences(case: tuple[Task, list[Example]]) -> None:
    """Along a few directions; T5 norms in single precision, which bounds what can be seen."""
    task, examples = case
    task.module.double()
    layout = Layout.of(task.module)
    batch = {
        k: v.double() if v.is_floating_point() else v for k, v in task.encode(examples).items()
    }
    w = {n: p.detach().double() for n, p in task.module.named_parameters() if n in layout.names}

    def loss(weights: Tensors) -> torch.Tensor:
        return task.losses(weights, {k: v[:1] for k, v in batch.items()})[0]

    def after(weights: dict[str, torch.Tensor]) -> float:
        return float(loss({n: t - ETA * g for (n, t), g in zip(
            weights.items(), torch.func.grad(loss)(weights).values(), strict=True)}))  # fmt: skip

    meta, value = meta_gradient(loss, w, ETA)
    assert float(value) == pytest.approx(after(w), rel=1e-6)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        v = {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in w.items()}
        h = 1e-5
        there, back = ({n: w[n] + s * h * v[n] for n in w} for s in (1.0, -1.0))
        slope = (after(there) - after(back)) / (2.0 * h)
        assert float(sum((meta[n] * v[n]).sum() for n in w)) == pytest.approx(slope, rel=1e-2)


def test_a_meta_gradient_of_a_quadratic_is_known() -> None:
    """L = (w x - y)^2: H = 2 x^2, so grad M = (1 - 2 eta x^2)^2 * grad L."""
    x, y, w, eta = 2.0, 1.0, 3.0, 0.05
    found, _ = meta_gradient(
        lambda t: (t["w"] * x - y) ** 2, {"w": torch.tensor(w, dtype=torch.float64)}, eta
    )
    assert float(found["w"]) == pytest.approx((1 - 2 * eta * x**2) ** 2 * 2 * x * (w * x - y))


def test_clipped_meta_gradients_are_bounded_one_by_one() -> None:
    """What one example adds is at most C, however steep its step; the sum is that of the rows."""
    task = ToyTask(2)
    layout = Layout.of(task.module)
    examples = [toy_example([3.0, -1.0], 2.0), toy_example([0.1, 0.2]), toy_example([50.0, 9.0])]

    def total(chosen: Sequence[Example], bound: float) -> torch.Tensor:
        return clipped_sums(
            task,
            layout,
            layout.read(task.module),
            chosen,
            clip_norm=bound,
            loss_cap=8.0,
            signs={},
            microbatch=2,
            inner_step=ETA,
        ).total

    rows = vectors(task, layout, examples, ETA)
    assert torch.allclose(total(examples, 1.0).double(), clipped(rows, 1.0).sum(0), atol=1e-4)
    for i, example in enumerate(examples):
        others = [*examples[:i], *examples[i + 1 :]]
        assert float((total(examples, 1.0) - total(others, 1.0)).norm()) <= 1.0 + 1e-4
        assert float(total([example], 1e9).norm()) > 0.0


def test_conflict_is_the_distance_of_brute_force_gradients(
    case: tuple[Task, list[Example]],
) -> None:
    """d_r = ||g_r - g|| of two regions' clipped sums; half of their distance from each other."""
    task, examples = case
    layout = Layout.of(task.module)
    point, batch = layout.read(task.module), task.encode(examples)
    rows = clipped(brute_force(task, layout, point, batch)[0], 0.5)
    regions = [examples[:1], examples[1:]]
    sums = [
        clipped_sums(
            task, layout, point, region, clip_norm=0.5, loss_cap=8.0, signs={}, microbatch=8
        ).total
        for region in regions
    ]
    mean = torch.stack(sums).mean(0)
    for own in sums:
        d = conflict(float((own - mean).square().sum()), 0.0)
        expected = float((rows[0] - rows[1:].sum(0)).norm()) / 2.0
        assert d == pytest.approx(expected, rel=1e-4)
