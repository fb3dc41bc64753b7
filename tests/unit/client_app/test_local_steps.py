"""A device as one: K steps against torch's own optimisers, bounded as a whole."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from client_app.datasets.dataset import Example
from client_app.gradients import ClippedSums
from client_app.local_steps import BATCH, Steps, clipped_delta, mean_differences, walk
from client_app.task import Tensors
from client_app.tasks.text_to_text import TextToText, make_task
from regionfed.sketch import sketch_signs
from regionfed.vector import Layout
from tests.conftest import ToyTask, linear_loss, tiny_config, toy_example

POINT = torch.tensor([0.5, -1.0, 0.25, 0.125])
CAP = 8.0


def toy(loss: Any = None) -> tuple[ToyTask, Layout]:
    task = ToyTask(3, loss) if loss else ToyTask(3)
    return task, Layout.of(task.module)


def examples_of(count: int, scale: float = 1.0) -> list[Example]:
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(1)) * scale
    return [toy_example(row[:3], row[3]) for row in rows.tolist()]


def said(
    task: Any, layout: Layout, examples: list[Example], *, bound: float = 0.5, **steps: Any
) -> ClippedSums:
    settings = {"count": 3, "learning_rate": 0.1, "seed": 0, **steps}
    return clipped_delta(
        task,
        layout,
        POINT,
        examples,
        steps=Steps(**settings),
        clip_norm=bound,
        loss_cap=CAP,
        signs=sketch_signs(layout, 4, 7),
        microbatch=16,
    )


# --------------------------------------------------------------------------------------- K steps
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_the_walk_is_torch_s_own(optimiser: str) -> None:
    """K full batches of one device, against the optimiser on a leaf."""
    task, layout = toy()
    examples = examples_of(BATCH)
    expected = POINT.clone().requires_grad_()
    one: Any = {
        "sgd": torch.optim.SGD([expected], lr=0.05),
        "adamw": torch.optim.AdamW([expected], lr=0.05, weight_decay=0.0),
    }[optimiser]
    for _ in range(4):
        one.zero_grad()
        task.losses(layout.tensors(expected), task.encode(examples)).mean().backward()
        one.step()
    found = walk(task, layout, POINT, examples, Steps(4, 0.05, 0, optimiser))
    assert torch.allclose(found, expected.detach() - POINT, atol=1e-5)


def test_one_step_of_sgd_is_a_gradient() -> None:
    """start - end = lr * grad: it points uphill, like what other units return."""
    task, layout = toy()
    examples = examples_of(BATCH)
    point = POINT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        task.losses(layout.tensors(point), task.encode(examples)).mean(), point
    )
    found = said(task, layout, examples, bound=1e9, count=1, optimiser="sgd")
    assert torch.allclose(found.total, 0.1 * gradient, atol=1e-5)


def test_nothing_shared_is_changed_and_a_rerun_is_equal(t5: TextToText) -> None:
    """Neither the point nor the model, dropout or not; the same seed is the same walk."""
    layout = Layout.of(t5.module)
    before = {name: v.clone() for name, v in t5.module.state_dict().items()}
    point = layout.read(t5.module)
    kept = point.clone()
    examples = [Example("spelling", f"spell: {w}", w, w) for w in ("cat", "horse", "ox")]
    walks = [walk(t5, layout, point, examples, Steps(2, 1e-2, 3)) for _ in range(2)]
    assert torch.equal(*walks) and bool(walks[0].any())
    assert torch.equal(point, kept)
    assert all(torch.equal(v, before[name]) for name, v in t5.module.state_dict().items())


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_a_walk_in_bf16_starts_where_it_was_told(optimiser: str) -> None:
    """The vector stays float32: no step is no change, and a small one is not rounded away."""
    model = "t5:d_model=16,d_kv=8,d_ff=16,num_layers=1,num_decoder_layers=1,num_heads=2"
    examples = [Example("spelling", w, w, w) for w in ("cat", "horse", "ox")]
    small = []
    for precision in ("bf16", "fp32"):
        task = make_task(tiny_config(model=model, precision=precision))
        layout = Layout.of(task.module)
        # Points that a run reaches are not those that bf16 can write.
        point = layout.read(task.module) + 1e-5
        for steps in (Steps(0, 0.1, 0, optimiser), Steps(3, 1e-30, 0, optimiser)):
            assert not bool(walk(task, layout, point, examples, steps).any())
        small.append(walk(task, layout, point, examples, Steps(1, 1e-5, 0, optimiser)))
    assert float(torch.nn.functional.cosine_similarity(*small, dim=0)) > 0.9


def test_a3_buffers_never_cross() -> None:
    """A3: a model with integer and float buffers: the delta has its trainable weights alone."""

    class Buffered(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.register_buffer("seen", torch.tensor(7))
            self.register_buffer("running", torch.ones(5))

    task = ToyTask(3, module=Buffered())
    layout = Layout.of(task.module)
    found = walk(task, layout, POINT, examples_of(4), Steps(2, 0.1, 0))
    assert found.shape == (4,) and int(task.module.seen) == 7


# ----------------------------------------------------------------------------- bounded as a whole
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e8])
@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_whatever_a_device_holds_it_stays_within_its_bounds(
    scale: float, count: int, optimiser: str
) -> None:
    """Delta and sketch within C, the loss within its cap: that is the sensitivity."""
    task, layout = toy()
    found = said(task, layout, examples_of(count, scale), optimiser=optimiser, count=5)
    assert float(found.total.double().norm()) <= 0.5 * (1 + 1e-6)
    assert float(found.sketch.double().norm()) <= 0.5 * (1 + 1e-6)
    assert 0.0 <= found.loss <= CAP
    assert bool(torch.isfinite(found.total).all())


def test_a4_a_diverged_device_contributes_zero() -> None:
    """A4: steps that overflow leave nothing in the sum, and no nan."""
    task, layout = toy()
    found = said(task, layout, examples_of(4, 1e12), optimiser="sgd", learning_rate=1e6, count=20)
    assert not bool(found.total.any()) and not bool(found.sketch.any())
    assert found.loss == CAP


def test_a2_a_device_that_does_not_move_contributes_zero() -> None:
    """A2, D5: no examples, or no gradient: zero stays zero under the clip."""

    def flat(weights: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.0 * (weights["weight"].sum() + weights["bias"].sum()) + 0.0 * y

    for examples, loss in (([], None), (examples_of(3), flat)):
        found = said(*toy(loss), examples, optimiser="sgd")
        assert not bool(found.total.any()) and not bool(found.sketch.any()) and found.loss == 0.0


def test_the_loss_is_the_mean_at_the_start() -> None:
    """Each cut to the cap, however they are batched."""
    task, layout = toy()
    examples = examples_of(20)
    losses = task.losses(layout.tensors(POINT), task.encode(examples)).clamp(0.0, CAP)
    assert said(task, layout, examples).loss == pytest.approx(float(losses.mean()), rel=1e-5)


@pytest.mark.parametrize("bound", [1e-3, 1e3])
def test_votes_of_a_device_are_a_mean_within_its_bound(bound: float) -> None:
    """The mean over its examples, clipped; nothing without examples."""
    task, layout = toy(linear_loss)
    examples = examples_of(9)
    direction = torch.tensor([1.0, 0.0, 0.0, 0.0])
    given: dict[str, Any] = {"steps": [0.5, 1.0], "clip_norm": bound, "microbatch": 4}
    found = mean_differences(task, layout, POINT, direction, examples=examples, **given)
    mean = sum(float(e.source.split()[0]) for e in examples) / 9
    norm = math.hypot(*found)
    assert norm <= bound * (1 + 1e-6)
    if bound > 1.0:
        assert found == pytest.approx([0.5 * mean, mean], abs=1e-5)
    empty = mean_differences(task, layout, POINT, direction, examples=[], **given)
    assert empty == [0.0, 0.0]
