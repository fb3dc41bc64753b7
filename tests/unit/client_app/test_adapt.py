"""A user's own part: descent on its own loss, weighted by what sets it apart from its region."""

import math
from dataclasses import replace

import pytest
import torch

from client_app.adapt import (
    RegionModel,
    Settings,
    UserGradient,
    adapt_user,
    local_part,
    user_gradient,
    user_weight,
)
from client_app.datasets.dataset import Example
from client_app.local_steps import BATCH
from client_app.tasks.text_to_text import TextToText
from regionfed.errors import RunError
from regionfed.vector import Layout
from tests.conftest import ToyTask, brute_force, clipped, toy_example

SETTINGS = Settings(
    steps=5,
    learning_rate=0.01,
    clip_norm=0.5,
    alpha_min=0.5,
    alpha_gain=1.0,
    microbatch=16,
    seed=0,
)
POINT = torch.tensor([0.5, -1.0, 0.25, 0.125])


def toy() -> tuple[ToyTask, Layout]:
    task = ToyTask(3)
    return task, Layout.of(task.module)


def toy_examples(count: int, seed: int = 0) -> list[Example]:
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)).tolist()
    return [toy_example(row[:3], row[3]) for row in rows]


def mean_loss(task: ToyTask, layout: Layout, point: torch.Tensor, examples: list[Example]) -> float:
    return float(task.losses(layout.tensors(point), task.encode(examples)).mean())


# ----------------------------------------------------------------------------------- the part
def test_the_part_is_what_adamw_adds_to_the_region_s_model() -> None:
    """Against torch's own AdamW on the whole set, one batch a step."""
    task, layout = toy()
    examples = toy_examples(BATCH)
    expected = POINT.clone().requires_grad_()
    optimiser = torch.optim.AdamW([expected], lr=0.01, weight_decay=0.0)
    for _ in range(5):
        optimiser.zero_grad()
        task.losses(layout.tensors(expected), task.encode(examples)).mean().backward()
        optimiser.step()
    part = local_part(task, layout, POINT, examples, SETTINGS)
    assert torch.allclose(part, expected.detach() - POINT, atol=1e-6)


def test_the_part_lowers_the_user_s_loss_and_leaves_the_start_alone() -> None:
    """More steps lower it further, also in several batches; the model given is not written to."""
    task, layout = toy()
    examples = toy_examples(2 * BATCH + 7)
    start = POINT.clone()
    losses = [mean_loss(task, layout, start, examples)]
    for steps in (5, 50):
        part = local_part(task, layout, start, examples, replace(SETTINGS, steps=steps))
        losses.append(mean_loss(task, layout, start + part, examples))
    assert losses[0] > losses[1] > losses[2]
    assert torch.equal(start, POINT)


def test_a_part_is_the_same_in_every_process() -> None:
    """Seeds are its own: global random state neither enters nor is touched."""
    task, layout = toy()
    examples = toy_examples(3 * BATCH)
    torch.manual_seed(1)
    first = local_part(task, layout, POINT, examples, SETTINGS)
    before = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(local_part(task, layout, POINT, examples, SETTINGS), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)
    other = local_part(task, layout, POINT, examples, replace(SETTINGS, seed=1))
    assert not torch.equal(other, first)


def test_a_user_without_examples_has_the_region_s_model() -> None:
    """Nothing to learn from, nothing learnt."""
    task, layout = toy()
    region = RegionModel(POINT, torch.ones(4), 0.0)
    own = adapt_user(task, layout, region, [], SETTINGS)
    assert torch.equal(own.part, torch.zeros(4)) and math.isfinite(own.alpha)


def test_steps_that_diverge_are_refused() -> None:
    """The error names the setting to change."""
    task, layout = toy()
    with pytest.raises(RunError, match="lower user-lr"):
        local_part(task, layout, POINT, [toy_example([1e38] * 3)], SETTINGS)


def test_a_t5_adapts_where_it_may(t5: TextToText) -> None:
    """Real gradients: the loss on the user's own examples falls, ties and all."""
    layout = Layout.of(t5.module)
    point = layout.read(t5.module)
    examples = [Example("intent", f"query {i}", "shoes", str(i)) for i in range(8)]
    part = local_part(t5, layout, point, examples, SETTINGS)
    batch = t5.encode(examples)
    with torch.no_grad():
        before, after = (t5.losses(layout.tensors(v), batch).mean() for v in (point, point + part))
    assert float(after) < float(before)


# ------------------------------------------------------------------------------- the gradient
def test_the_gradient_is_the_mean_of_clipped_ones() -> None:
    """By one backward pass per example."""
    task, layout = toy()
    examples = toy_examples(20)
    gradients, _ = brute_force(task, layout, POINT, task.encode(examples))
    expected = clipped(gradients, SETTINGS.clip_norm).mean(0).float()
    found = user_gradient(task, layout, POINT, examples, SETTINGS)
    assert torch.allclose(found.mean, expected, atol=1e-6)


def test_chance_is_the_standard_error_of_the_mean() -> None:
    """On average over users of one distribution, its square is the variance of their means."""
    task, layout = toy()
    users = [user_gradient(task, layout, POINT, toy_examples(32, s), SETTINGS) for s in range(300)]
    means = torch.stack([u.mean for u in users])
    variance = float(means.var(0).sum())
    estimate = sum(u.chance**2 for u in users) / len(users)
    assert estimate == pytest.approx(variance, rel=0.2)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_few_examples_are_no_error(count: int) -> None:
    """Fewer than two tell nothing of chance."""
    task, layout = toy()
    found = user_gradient(task, layout, POINT, toy_examples(count), SETTINGS)
    assert bool(torch.isfinite(found.mean).all())
    assert (found.chance == 0.0) is (count < 2)


# --------------------------------------------------------------------------------- the weight
def weight_at(distance: float, chance: float, noise_std: float = 0.0) -> tuple[float, float]:
    """Return d_u and alpha_u of a user so far from its region, in 4 dimensions."""
    gradient = UserGradient(torch.tensor([distance, 0.0, 0.0, 0.0]), chance)
    return user_weight(gradient, RegionModel(POINT, torch.zeros(4), noise_std), SETTINGS)


def test_a_user_whom_chance_explains_stands_in_the_middle() -> None:
    """d_u equal to the standard error: the sigmoid at its centre; further away weighs more."""
    assert weight_at(0.1, 0.1) == pytest.approx((0.1, 0.75))
    alphas = [weight_at(d, 0.1)[1] for d in (0.0, 0.05, 0.1, 0.2, 1.0)]
    assert alphas == sorted(alphas) and len(set(alphas)) == 5
    assert all(0.5 <= a <= 1.0 for a in alphas)
    assert weight_at(0.2, 0.1)[1] == pytest.approx(0.5 + 0.5 / (1.0 + math.exp(-1.0)))


def test_the_noise_on_the_region_s_update_is_no_conflict() -> None:
    """Its expected part of the squared distance is taken off; what is left is never negative."""
    assert weight_at(0.5, 0.1, noise_std=0.15)[0] == pytest.approx(math.sqrt(0.25 - 4 * 0.0225))
    assert weight_at(0.1, 0.1, noise_std=1.0)[0] == 0.0


def test_without_an_idea_of_chance_nothing_is_told_apart() -> None:
    """As where all regions are alike: the sigmoid stands at its middle."""
    assert weight_at(3.0, 0.0)[1] == 0.75
