"""Field cases M1, M2, M5, M6, M7 and M12: models as they are, ties and frozen weights included."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from client_app.datasets.dataset import Example
from client_app.gradients import clipped_sums, loss_differences
from client_app.tasks.text_to_text import TextToText
from regionfed.contract import RegionTrain, encode
from regionfed.vector import Layout
from tests.conftest import brute_force, part, tiny_t5, tiny_tokenizer

TEXTS = [
    Example("intent", "red shoes", "shoes", "a"),
    Example("intent", "a", "grocery", "b"),
    Example("spelling", "umbrela for the rain", "umbrella", "c"),
    Example("entities", "20 l tank", "size unit other", "d"),
]


def total_of(task: TextToText, examples: Sequence[Example], microbatch: int = 4) -> torch.Tensor:
    layout = Layout.of(task.module)
    return clipped_sums(
        task,
        layout,
        layout.read(task.module),
        examples,
        clip_norm=1e6,
        loss_cap=8.0,
        signs={},
        microbatch=microbatch,
    ).total


def bytes_of(model: nn.Module) -> int:
    """Return how many bytes a model's message carries."""
    records = encode(RegionTrain(1, "layout", Layout.of(model).read(model)))
    return sum(len(array.data) for array in part(records, "arrays").values())


# ----------------------------------------------------------------------------------------- M1
def test_m1_each_storage_crosses_once() -> None:
    """M1.

    `state_dict()` of T5 carries the tied matrix four times (439 MB instead of 242). -> only
    unique trainable storage crosses the wire.
    """
    model = tiny_t5()
    unique = 4 * sum(p.numel() for p in model.parameters())
    assert len([n for n in model.state_dict() if "embed_tokens" in n or "lm_head" in n]) == 3
    assert unique <= bytes_of(model) <= unique + 256
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("decoder")
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained < unique
    assert trained <= bytes_of(model) <= trained + 256


# ----------------------------------------------------------------------------------------- M2
def test_m2_a_tie_has_one_name_and_no_last_key_that_wins() -> None:
    """M2.

    Tied keys perturbed differently and loaded back: the last key wins silently. -> one canonical
    name per storage.
    """
    model = tiny_t5()
    layout = Layout.of(model)
    ties = {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
            "lm_head.weight"}  # fmt: skip
    assert len(ties & set(layout.names)) == 1
    vector = layout.read(model) + 1.0
    layout.write(vector, model)
    state = model.state_dict()
    assert len({state[name].data_ptr() for name in ties}) == 1
    assert torch.equal(layout.read(model), vector)


def test_m2_ties_are_found_by_storage_and_not_by_configuration() -> None:
    """M2.

    -> ties are found by storage identity, not by the configuration.
    """
    said_tied = tiny_t5()
    said_tied.lm_head.weight = nn.Parameter(said_tied.lm_head.weight.detach().clone())
    assert said_tied.config.tie_word_embeddings
    assert {"shared.weight", "lm_head.weight"} <= set(Layout.of(said_tied).names)

    silently_tied = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    silently_tied["b"].weight = silently_tied["a"].weight
    assert Layout.of(silently_tied).names == ("a.weight", "a.bias", "b.bias")
    alias = nn.Module()
    alias.one = nn.Parameter(torch.zeros(4))
    alias.two = nn.Parameter(alias.one.data)
    assert Layout.of(alias).names == ("one",)


# ----------------------------------------------------------------------------------------- M5
def test_m5_a_line_search_sees_no_dropout() -> None:
    """M5.

    Dropout left on during a line search makes the objective noisy. -> the rho search runs in eval
    mode and is deterministic.
    """
    model = tiny_t5().train()
    assert model.config.dropout_rate > 0.0
    task = TextToText(model, tiny_tokenizer())
    layout = Layout.of(model)
    base = layout.read(model)
    direction = torch.linspace(-1.0, 1.0, layout.size)

    def votes() -> list[float]:
        return loss_differences(
            task,
            layout,
            base,
            direction,
            steps=[0.1, 0.2, 0.4],
            examples=TEXTS,
            clip_norm=1.0,
            microbatch=4,
        )

    torch.manual_seed(0)
    first = votes()
    torch.manual_seed(1)
    assert votes() == first
    assert torch.equal(total_of(task, TEXTS), total_of(task, TEXTS))


# ----------------------------------------------------------------------------------------- M6
def test_m6_padding_is_never_a_label_and_no_label_is_no_loss(t5: TextToText) -> None:
    """M6.

    All labels -100 -> NaN loss; pad id 0 left in T5 labels changes the loss; decoding -100
    overflows. -> collator tests; valid tokens are counted; such batches contribute zero.
    """
    batch = t5.encode(TEXTS)
    assert not bool((batch["labels"] == 0).any())
    layout = Layout.of(t5.module)
    point = layout.read(t5.module)
    counted = (batch["labels"] != -100).sum(1).tolist()
    lengths = [len(tiny_tokenizer()(e.target)["input_ids"]) for e in TEXTS]
    assert counted == lengths
    batch["labels"][:] = -100
    gradients, losses = brute_force(t5, layout, point, batch)
    assert torch.equal(losses, torch.zeros(len(TEXTS)))
    assert torch.equal(gradients, torch.zeros(len(TEXTS), layout.size))


def test_m6_more_padding_changes_no_loss(t5: TextToText) -> None:
    """M6.

    -> an example's loss is the same next to a longer one.
    """
    layout = Layout.of(t5.module)
    weights = layout.tensors(layout.read(t5.module))
    together = t5.losses(weights, t5.encode(TEXTS))
    alone = torch.cat([t5.losses(weights, t5.encode([e])) for e in TEXTS])
    assert torch.allclose(together, alone, atol=1e-5)


# ----------------------------------------------------------------------------------------- M7
@pytest.mark.parametrize("microbatch", [1, 2, 3])
def test_m7_a_gradient_does_not_depend_on_how_it_was_batched(
    t5: TextToText, microbatch: int
) -> None:
    """M7.

    The library's loss is a mean over tokens: batch loss differs from the mean of per-example
    losses. -> a client's gradient is defined once (mean over its examples) and is independent of
    how it was batched.
    """
    assert torch.allclose(total_of(t5, TEXTS, microbatch), total_of(t5, TEXTS), atol=1e-5)


def test_m7_the_gradient_is_that_of_the_sum_of_example_losses(t5: TextToText) -> None:
    """M7.

    -> one plain backward pass of the summed per-example losses gives the same vector.
    """
    layout = Layout.of(t5.module)
    weights = {
        n: t.clone().requires_grad_() for n, t in layout.tensors(layout.read(t5.module)).items()
    }
    t5.losses(weights, t5.encode(TEXTS)).sum().backward()
    expected = layout.flatten({n: w.grad for n, w in weights.items() if w.grad is not None})
    assert torch.allclose(total_of(t5, TEXTS), expected, atol=1e-4)


# ---------------------------------------------------------------------------------------- M12
def test_m12_frozen_parameters_keep_positions(t5: TextToText) -> None:
    """M12.

    Frozen parameters have grad None; flattening must keep positions.
    """
    whole = Layout.of(t5.module)
    before = whole.views(total_of(t5, TEXTS))
    frozen = [n for n, _ in t5.module.named_parameters() if "layer_norm" in n]
    for name, parameter in t5.module.named_parameters():
        parameter.requires_grad = name not in frozen
    part = Layout.of(t5.module)
    assert set(part.names) == set(whole.names) - set(frozen)
    after = part.views(total_of(t5, TEXTS))
    assert all(torch.allclose(after[n], before[n], atol=1e-5) for n in part.names)

    # A gradient that is missing is a hole of zeros: what stands behind it does not move up.
    missing = part.names[1]
    flat = part.views(part.flatten({n: g for n, g in after.items() if n != missing}))
    assert not bool(flat[missing].any())
    assert all(torch.equal(flat[n], after[n]) for n in part.names if n != missing)
    kept = {n: p.detach().clone() for n, p in t5.module.named_parameters() if n in frozen}
    part.write(torch.zeros(part.size), t5.module)
    assert all(torch.equal(dict(t5.module.named_parameters())[n], v) for n, v in kept.items())
