"""Per-example gradients: right, clipped one by one, and bounded whatever an example holds."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from client_app.datasets.dataset import Example
from client_app.gradients import (
    ClippedSums,
    clip_scale,
    clipped_sums,
    example_gradients,
    loss_differences,
)
from client_app.task import Task, Tensors
from client_app.tasks.text_to_text import TextToText
from regionfed.sketch import sketch_signs
from regionfed.vector import Layout
from tests.conftest import (
    FAMILIES,
    Loss,
    ToyTask,
    brute_force,
    clipped,
    linear_loss,
    squared_error,
    tiny_cnn,
    tiny_images,
    toy_example,
)

# Rounding of float32 sums; a bound of C holds up to this.
ROUNDING = 1e-5
K = 4
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Squares of these neither overflow nor vanish in float32.
MODERATE = st.floats(-(2.0**50), 2.0**50, width=32).filter(lambda v: v == 0.0 or abs(v) > 2.0**-50)


def sums_of(
    task: Task,
    examples: Sequence[Example],
    *,
    bound: float = 1.0,
    cap: float = 8.0,
    size: int = K,
    microbatch: int = 3,
    point: torch.Tensor | None = None,
) -> ClippedSums:
    layout = Layout.of(task.module)
    return clipped_sums(
        task,
        layout,
        layout.read(task.module) if point is None else point,
        examples,
        clip_norm=bound,
        loss_cap=cap,
        signs=sketch_signs(layout, size, 0) if size else {},
        microbatch=microbatch,
    )


def toy_examples(n: int, inputs: int = 5, seed: int = 0) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    rows = 3.0 * torch.randn(n, inputs + 1, generator=generator)
    return [toy_example(row[:-1].tolist(), float(row[-1])) for row in rows]


TEXTS = [
    Example("intent", "red shoes", "shoes", "a"),
    Example("intent", "a b", "grocery", "b"),
    Example("entities", "20 l tank for a green car", "size unit other", "c"),
    Example("spelling", "umbrela", "umbrella", "d"),
    Example("spelling", "t", "tea", "e"),
]


# --------------------------------------------------------------------------------------- clip
@settings(max_examples=50)
@given(st.lists(FLOATS, min_size=1, max_size=6), st.floats(1e-6, 1e6))
def test_one_example_never_counts_for_more_than_the_bound(x: list[float], bound: float) -> None:
    """For any finite gradient, zero and huge ones too: ||sum|| <= C, and it is finite."""
    task = ToyTask(len(x), linear_loss)
    sums = sums_of(task, [toy_example(x)], bound=bound)
    assert bool(torch.isfinite(sums.total).all()) and bool(torch.isfinite(sums.sketch).all())
    assert float(sums.total.double().norm()) <= bound * (1.0 + ROUNDING)
    assert float(sums.sketch.double().norm()) <= bound * (1.0 + ROUNDING)


@settings(max_examples=50)
@given(st.lists(MODERATE, min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_clipping_keeps_the_direction_and_what_is_short_already(
    x: list[float], bound: float
) -> None:
    """g * min(1, C / ||g||), and exactly g where ||g|| <= C."""
    task = ToyTask(len(x), linear_loss)
    layout = Layout.of(task.module)
    total = layout.views(sums_of(task, [toy_example(x)], bound=bound).total)["weight"][0]
    gradient = torch.tensor(x, dtype=torch.float32)
    norm = float(gradient.double().norm())
    expected = gradient.double() * min(1.0, bound / max(norm, 1e-12))
    assert torch.allclose(total.double(), expected, rtol=1e-4, atol=1e-6 * min(norm, bound))
    if norm < bound * (1.0 - ROUNDING):
        assert torch.equal(total, gradient)


@given(st.lists(st.floats(0.0, width=32, allow_nan=False, allow_infinity=True), min_size=1))
def test_the_scale_is_between_zero_and_one(norms: list[float]) -> None:
    """min(1, C / max(norm, tiny)): no division by zero, and infinity scales to zero."""
    scale = clip_scale(torch.tensor(norms), 0.5)
    assert bool(((scale >= 0.0) & (scale <= 1.0)).all())
    assert all(s == 1.0 for n, s in zip(norms, scale.tolist(), strict=True) if n <= 0.5)


def test_a_zero_gradient_stays_zero() -> None:
    """A2: and its sketch too."""
    sums = sums_of(ToyTask(3, linear_loss), [toy_example([0.0, 0.0, 0.0])])
    assert not bool(sums.total.any()) and not bool(sums.sketch.any())


def test_the_norm_is_taken_over_the_whole_vector() -> None:
    """D2: not per tensor; weight and bias are scaled alike."""
    task = ToyTask(2)
    point = torch.tensor([0.0, 0.0, 0.0])
    total = sums_of(task, [toy_example([3.0, 4.0], -6.0)], point=point, bound=2.0).total
    gradient = 2.0 * 6.0 * torch.tensor([3.0, 4.0, 1.0])
    assert torch.allclose(total, gradient * 2.0 / gradient.norm())


def test_half_precision_gradients_are_clipped_just_as_well() -> None:
    """bf16 weights: squares must not be rounded to 8 bits before they are added up."""
    inputs = 512
    module = nn.Linear(inputs, 1).to(torch.bfloat16)
    for value in (1.0625, 1.1171875, 1.3984375, 1.4140625):
        example = toy_example([value] * inputs)
        sums = sums_of(ToyTask(inputs, linear_loss, module), [example], bound=1.0, size=0)
        assert float(sums.total.double().norm()) <= 1.0 + 1e-4


def test_a_scalar_parameter_is_clipped_with_the_rest() -> None:
    """0-d parameters have per-example gradients of one axis."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.bias = nn.Parameter(torch.tensor(0.5))

    task = ToyTask(2, squared_error, Scaled())
    examples = toy_examples(4, 2)
    layout = Layout.of(task.module)
    gradients, _ = brute_force(task, layout, layout.read(task.module), task.encode(examples))
    sums = sums_of(task, examples, bound=1.0)
    assert torch.allclose(sums.total.double(), clipped(gradients, 1.0).sum(0), atol=1e-5)


# --------------------------------------------------------------------------------------- sums
def test_the_total_is_the_sum_of_clipped_gradients() -> None:
    """Against a loop of plain backward passes; the loss sum and its cap too."""
    task = ToyTask(5)
    examples = toy_examples(7)
    layout = Layout.of(task.module)
    gradients, losses = brute_force(task, layout, layout.read(task.module), task.encode(examples))
    sums = sums_of(task, examples, bound=3.0, cap=20.0)
    assert torch.allclose(sums.total.double(), clipped(gradients, 3.0).sum(0), atol=1e-4)
    assert sums.loss == pytest.approx(float(losses.clamp(max=20.0).sum()), rel=1e-5)
    assert float(losses.max()) > 20.0 and float(gradients.norm(dim=1).max()) > 3.0


def test_the_sketch_is_the_sum_of_clipped_sketches_of_clipped_gradients() -> None:
    """A sketch may be longer than its gradient, so it is clipped once more."""
    task = ToyTask(9)
    layout = Layout.of(task.module)
    examples = toy_examples(6, 9)
    gradients, _ = brute_force(task, layout, layout.read(task.module), task.encode(examples))
    signs = sketch_signs(layout, 2, 0)
    rows = []
    for gradient in clipped(gradients, 1.0):
        row = torch.zeros(2, dtype=torch.float64)
        for name, view in layout.views(gradient).items():
            flat = view.reshape(-1)
            for i in range(flat.numel()):
                row[i % 2] += signs[name].reshape(-1)[i] * flat[i]
        rows.append(row)
    sketches = torch.stack(rows)
    assert float(sketches.norm(dim=1).max()) > 1.0  # else the second clip is not tested
    sums = sums_of(task, examples, bound=1.0, size=2)
    assert torch.allclose(sums.sketch.double(), clipped(sketches, 1.0).sum(0), atol=1e-5)


@pytest.mark.parametrize("loss", [squared_error, linear_loss])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_adding_one_example_changes_each_sum_by_at_most_its_bound(loss: Loss, scale: float) -> None:
    """The sensitivity that the noise is calibrated to, for every example of a set."""
    bound, cap = 0.5, 2.0
    task = ToyTask(5, loss)
    base = toy_examples(8)
    without = sums_of(task, base, bound=bound, cap=cap)
    for extra in toy_examples(10, seed=1):
        x = [scale * float(v) for v in extra.source.split()]
        more = sums_of(task, [*base, toy_example(x, float(extra.target))], bound=bound, cap=cap)
        assert float((more.total - without.total).norm()) <= bound * (1.0 + 1e-4)
        assert float((more.sketch - without.sketch).norm()) <= bound * (1.0 + 1e-4)
        assert -1e-4 <= more.loss - without.loss <= cap + 1e-4


def test_adding_one_text_changes_each_sum_by_at_most_its_bound(t5: TextToText) -> None:
    """The same on the transformer."""
    without = sums_of(t5, TEXTS[:-1], bound=0.1)
    for extra in (TEXTS[2], TEXTS[4]):
        more = sums_of(t5, [*TEXTS[:-1], extra], bound=0.1)
        assert float((more.total - without.total).norm()) <= 0.1 * (1.0 + 1e-4)
        assert float((more.sketch - without.sketch).norm()) <= 0.1 * (1.0 + 1e-4)


@pytest.mark.parametrize("size", [0, K])
def test_an_empty_sample_is_zero(size: int) -> None:
    """D5: of the right shapes, so that the region can add it up and noise it."""
    sums = sums_of(ToyTask(5), [], size=size)
    assert torch.equal(sums.total, torch.zeros(6))
    assert torch.equal(sums.sketch, torch.zeros(size))
    assert sums.loss == 0.0


def test_the_order_of_the_examples_does_not_matter() -> None:
    """F7: bit for bit: a sample is a set."""
    task, examples = ToyTask(5), toy_examples(9)
    one, other = sums_of(task, examples), sums_of(task, examples[::-1])
    assert torch.equal(one.total, other.total) and torch.equal(one.sketch, other.sketch)


def poisoned(weights: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Loss that is nan where the target is 99, else squared error."""
    return squared_error(weights, x, y) + torch.where(y == 99.0, math.nan, 0.0) * weights["bias"]


@pytest.mark.parametrize("size", [0, K])
@pytest.mark.parametrize("others", [0, 1, 4])
def test_an_example_whose_gradient_is_not_finite_is_left_out(others: int, size: int) -> None:
    """A4: it must not take the sum with it, nor the device, even if its batch holds no other."""
    task, good = ToyTask(5, poisoned), toy_examples(others)
    bad = toy_example([1.0] * 5, 99.0)
    sums = sums_of(task, [*good, bad], size=size)
    clean = sums_of(task, good, size=size)
    assert torch.allclose(sums.total, clean.total, atol=1e-5)
    assert torch.allclose(sums.sketch, clean.sketch, atol=1e-5)
    assert 0.0 <= sums.loss <= clean.loss + 8.0 + 1e-4


# ---------------------------------------------------------------------------- the transformer
def per_example(task: Task, examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    layout = Layout.of(task.module)
    weights = layout.tensors(layout.read(task.module))
    gradients, losses = example_gradients(task, weights, task.encode(examples))
    rows = [layout.flatten({n: g[i] for n, g in gradients.items()}) for i in range(len(examples))]
    return torch.stack(rows), losses


def mixed(size: int, length: int) -> list[Example]:
    """Return queries for RoBERTa, padded and of all tasks, the longest of `length` tokens."""
    # A character has a token of its own here; start and end are two more.
    long = Example("intent", "a" * (length - 2), "shoes", "g")
    short = [
        Example("entities", "b", "brand", "g"),
        Example("intent", "c d", "car", "g"),
        Example("spelling", "e", "f", "g"),
    ]
    return [long, *(short[i % 3] for i in range(size - 1))]


@pytest.mark.parametrize("relation", ["length", "other", "one"])
def test_gradients_of_a_roberta_equal_a_brute_force_loop(relation: str) -> None:
    """D7: at batch == length and batch != length; three tasks in one batch."""
    task = FAMILIES["roberta"][0](0)
    batch = mixed({"length": 8, "other": 5, "one": 1}[relation], 8)
    shapes = task.encode(batch)
    assert shapes["tokens"].shape == (len(batch), 8)
    layout = Layout.of(task.module)
    expected, losses = brute_force(task, layout, layout.read(task.module), shapes)
    found, found_losses = per_example(task, batch)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(found_losses, losses, atol=1e-5)
    assert all(float(row.norm()) > 1e-3 for row in found)


@pytest.mark.parametrize("size", [1, 3, 4, 8, 28])
def test_gradients_of_a_cnn_equal_a_brute_force_loop(size: int) -> None:
    """D7: also where the batch has as many images as there are channels, units, rows or columns."""
    task, images = tiny_cnn(), tiny_images(size)
    layout = Layout.of(task.module)
    expected, losses = brute_force(task, layout, layout.read(task.module), task.encode(images))
    found, found_losses = per_example(task, images)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(found_losses, losses, atol=1e-5)
    assert all(float(row.norm()) > 1e-3 for row in found)


@pytest.mark.parametrize("family", ["roberta", "cnn"])
def test_batching_and_padding_change_no_gradient_of_any_family(family: str) -> None:
    """M7: an example has the same gradient alone, among others, and in any microbatch."""
    make, examples = FAMILIES[family]
    task = make(0)
    together, _ = per_example(task, examples)
    for row, example in zip(together, examples, strict=True):
        assert torch.allclose(per_example(task, [example])[0][0], row, atol=1e-5)
    reference = sums_of(task, examples, bound=0.5, microbatch=8)
    for microbatch in (1, 2):
        sums = sums_of(task, examples, bound=0.5, microbatch=microbatch)
        assert torch.allclose(sums.total, reference.total, atol=1e-5)
        assert torch.allclose(sums.sketch, reference.sketch, atol=1e-5)


@pytest.mark.parametrize("family", ["roberta", "cnn"])
def test_every_parameter_of_a_family_gets_its_gradient(family: str) -> None:
    """D7: the heads of all tasks as well as any other."""
    make, examples = FAMILIES[family]
    task = make(0)
    named = Layout.of(task.module).views(per_example(task, examples)[0].abs().sum(0))
    assert all(bool(g.any()) for g in named.values()), [n for n, g in named.items() if not g.any()]


@pytest.mark.parametrize("family", ["roberta", "cnn"])
def test_half_precision_of_a_family_is_near_the_truth(family: str) -> None:
    """M8: bf16 is offered for every family."""
    make, examples = FAMILIES[family]
    reference = sums_of(make(0), examples, bound=1e3).total
    task = make(0)
    task.module.to(torch.bfloat16)
    found = sums_of(task, examples, bound=1e3).total
    assert float(torch.nn.functional.cosine_similarity(reference, found, dim=0)) > 0.97


@pytest.mark.parametrize("relation", ["length", "other", "target", "one"])
def test_gradients_of_a_t5_equal_a_brute_force_loop(t5: TextToText, relation: str) -> None:
    """D7: also where batch size == source length, which elsewhere is silently wrong."""
    texts = [Example("t", "a" * (1 + i % 2), "bcd"[: 1 + i % 3], "g") for i in range(16)]
    lengths = t5.encode(texts)
    size = {
        "length": lengths["source"].shape[1],
        "target": lengths["labels"].shape[1],
        "other": 5,
        "one": 1,
    }[relation]
    batch = texts[:size] if size > 1 else [texts[1]]
    shapes = t5.encode(batch)
    if relation == "length":
        assert len(batch) == shapes["source"].shape[1]
    if relation == "target":
        assert len(batch) == shapes["labels"].shape[1]
    layout = Layout.of(t5.module)
    expected, losses = brute_force(t5, layout, layout.read(t5.module), shapes)
    found, found_losses = per_example(t5, batch)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(found_losses, losses, atol=1e-5)
    assert all(float(row.norm()) > 1e-3 for row in found)


def test_every_parameter_of_a_t5_gets_its_gradient(t5: TextToText) -> None:
    """D7: relative_attention_bias and the tied matrix as well as any other."""
    layout = Layout.of(t5.module)
    found, _ = per_example(t5, TEXTS)
    named = layout.views(found.abs().sum(0))
    assert any("relative_attention_bias" in name for name in named)
    assert all(bool(g.any()) for g in named.values()), [n for n, g in named.items() if not g.any()]


def test_a_gradient_does_not_depend_on_padding(t5: TextToText) -> None:
    """M7: an example has the same gradient alone as among longer ones."""
    together, losses = per_example(t5, TEXTS)
    for row, loss, text in zip(together, losses, TEXTS, strict=True):
        alone, alone_loss = per_example(t5, [text])
        assert torch.allclose(alone[0], row, atol=1e-5)
        assert torch.allclose(alone_loss[0], loss, atol=1e-5)


@pytest.mark.parametrize("microbatch", [1, 2, 4, 64])
def test_the_sums_do_not_depend_on_the_batching(t5: TextToText, microbatch: int) -> None:
    """M7: any microbatch gives the sum over examples."""
    reference = sums_of(t5, TEXTS, bound=0.5, microbatch=5)
    sums = sums_of(t5, TEXTS, bound=0.5, microbatch=microbatch)
    assert torch.allclose(sums.total, reference.total, atol=1e-5)
    assert torch.allclose(sums.sketch, reference.sketch, atol=1e-5)
    assert sums.loss == pytest.approx(reference.loss, rel=1e-5)


def test_an_example_without_valid_tokens_contributes_zero(t5: TextToText) -> None:
    """M6: all labels -100: loss 0 and gradient 0, not nan, in a batch and alone."""
    layout = Layout.of(t5.module)
    weights = layout.tensors(layout.read(t5.module))
    batch = t5.encode(TEXTS)
    batch["labels"][1] = -100
    gradients, losses = example_gradients(t5, weights, batch)
    assert losses[1] == 0.0 and all(not bool(g[1].any()) for g in gradients.values())
    assert bool((losses[[0, 2, 3, 4]] > 0.0).all())
    batch["labels"][:] = -100
    gradients, losses = example_gradients(t5, weights, batch)
    assert not bool(losses.any()) and all(not bool(g.any()) for g in gradients.values())


def test_frozen_weights_get_no_gradient_and_the_rest_is_unchanged(t5: TextToText) -> None:
    """M12: freezing the encoder leaves the decoder's gradients as they were."""
    layout = Layout.of(t5.module)
    before = layout.views(per_example(t5, TEXTS)[0])
    for name, parameter in t5.module.named_parameters():
        parameter.requires_grad = not name.startswith("encoder.block")
    frozen = Layout.of(t5.module)
    after = frozen.views(per_example(t5, TEXTS)[0])
    assert 0 < len(after) < len(before)
    assert all(torch.allclose(after[n], before[n], atol=1e-6) for n in after)


def test_half_precision_weights_give_finite_gradients_near_the_true_ones(t5: TextToText) -> None:
    """M8: bf16 is offered in place of fp16, so it has to work."""
    reference = sums_of(t5, TEXTS, bound=1e3).total
    half = TextToText(t5._module.to(torch.bfloat16), t5._tokenizer)
    found = sums_of(half, TEXTS, bound=1e3).total
    similarity = torch.nn.functional.cosine_similarity(reference, found, dim=0)
    assert float(similarity) > 0.98


# ----------------------------------------------------------------------------- loss_differences
STEPS = [0.25, 0.5, 1.0]


def differences_of(
    task: Task, examples: Sequence[Example], *, bound: float = 1e9, microbatch: int = 4
) -> torch.Tensor:
    layout = Layout.of(task.module)
    base = layout.read(task.module)
    return torch.tensor(
        loss_differences(
            task,
            layout,
            base,
            torch.linspace(-1.0, 1.0, layout.size),
            steps=STEPS,
            examples=examples,
            clip_norm=bound,
            microbatch=microbatch,
        )
    )


def test_differences_are_relative_to_no_step() -> None:
    """Loss at base + t * direction minus loss at base, summed over examples."""
    task, examples = ToyTask(5), toy_examples(7)
    layout = Layout.of(task.module)
    base, direction = layout.read(task.module), torch.linspace(-1.0, 1.0, layout.size)
    batch = task.encode(examples)

    def total(t: float) -> torch.Tensor:
        return task.losses(layout.tensors(base + t * direction), batch).sum()

    expected = torch.stack([total(t) - total(0.0) for t in STEPS])
    assert torch.allclose(differences_of(task, examples), expected, rtol=1e-3)


def test_one_example_changes_the_vote_by_at_most_its_bound() -> None:
    """In L2 over all steps, whatever the example."""
    task, base = ToyTask(5), toy_examples(6)
    without = differences_of(task, base, bound=1.0)
    for scale in (1.0, 1e3, 1e12):
        for extra in toy_examples(4, seed=2):
            x = [scale * float(v) for v in extra.source.split()]
            more = differences_of(task, [*base, toy_example(x)], bound=1.0)
            assert float((more - without).norm()) <= 1.0 + 1e-4


def test_an_empty_vote_is_zero() -> None:
    """D5: of the right length."""
    assert differences_of(ToyTask(5), []).tolist() == [0.0] * len(STEPS)


def test_votes_are_deterministic_and_independent_of_batching(t5: TextToText) -> None:
    """M5: no dropout: the same losses every time, bit for bit."""
    t5.module.train()
    assert t5.module.training
    t5 = TextToText(t5._module, t5._tokenizer)
    first = differences_of(t5, TEXTS)
    assert torch.equal(first, differences_of(t5, TEXTS))
    assert torch.allclose(first, differences_of(t5, TEXTS, microbatch=1), rtol=1e-3, atol=1e-4)


def overflowing(weights: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Loss that grows along the line and is no number from half a step on."""
    moved = weights["weight"].reshape(-1)[-1]
    return x[:, 0] * 0.0 + torch.where(moved > LIMIT, math.nan, 1.0) * (moved + 10.0)


LIMIT = 0.0


def test_a_step_that_breaks_the_model_never_looks_better_than_one_that_does_not() -> None:
    """A loss of nan is a bad loss: its vote must not be that of a step without effect."""
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.0, -0.3]]))
    task = ToyTask(2, overflowing, module)
    layout = Layout.of(module)
    direction = layout.flatten({"weight": torch.tensor([[0.0, 1.0]])})
    votes = loss_differences(
        task,
        layout,
        layout.read(module),
        direction,
        steps=[0.1, 0.2, 0.5],
        examples=[toy_example([1.0, 1.0])],
        clip_norm=1e3,
        microbatch=4,
    )
    assert all(math.isfinite(v) for v in votes)
    assert votes[2] > votes[1] > 0.0
