"""Field cases M1, M2, M4 to M9, M11 and M12: models as they are, ties and frozen weights included.

M3 is in `tests/unit/client_app/tasks`, M10 in `tests/integration/test_offline.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from client_app.datasets.dataset import Example
from client_app.gradients import clipped_sums, example_gradients, loss_differences
from client_app.local_steps import Steps, clipped_delta, mean_differences
from client_app.models import byte_tokenizer, load
from client_app.task import Batch, Task, Tensors, score_sums, task_of
from client_app.tasks import text_to_text
from client_app.tasks.labels import LabelText, labels_of_all, make_task
from client_app.tasks.text_to_text import TextToText
from regionfed.config import Config
from regionfed.contract import RegionTrain, encode
from regionfed.errors import ConfigurationError
from regionfed.vector import Layout
from tests.conftest import (
    FAMILIES,
    SPACES,
    ToyTask,
    brute_force,
    part,
    tiny_config,
    tiny_roberta,
    tiny_t5,
    tiny_tokenizer,
    toy_example,
)

TEXTS = [
    Example("intent", "red shoes", "shoes", "a"),
    Example("intent", "a", "grocery", "b"),
    Example("spelling", "umbrela for the rain", "umbrella", "c"),
    Example("entities", "20 l tank", "size unit other", "d"),
]


def total_of(task: Task, examples: Sequence[Example], microbatch: int = 4) -> torch.Tensor:
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


# ----------------------------------------------------------------------------------------- M4
def loaded_t5(folder: Path) -> TextToText:
    """Return a T5 as a run loads it from a folder, which says nothing of its attention."""
    tiny_t5().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return text_to_text.make_task(tiny_config(model=str(folder)))


def loaded_roberta(folder: Path) -> LabelText:
    """Return the same of a RoBERTa."""
    tiny_roberta().module.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    names = len(labels_of_all(SPACES))
    loaded = load(tiny_config(task="labels", model=str(folder)), "roberta", num_labels=names)
    return LabelText(loaded.module, loaded.tokenizer, SPACES, 64)


@pytest.mark.parametrize("loaded", [loaded_t5, loaded_roberta])
def test_m4_a_loaded_model_is_differentiated_twice(
    loaded: Callable[[Path], TextToText | LabelText], tmp_path: Path
) -> None:
    """M4.

    Second-order gradients through SDPA attention (still fails on CPU for T5 and RoBERTa). -> exact
    MAML switches to eager attention; first order needs neither. (The values:
    tests/unit/client_app/test_meta_gradient.py.)
    """
    task = loaded(tmp_path)
    layout = Layout.of(task.module)
    batch = task.encode(TEXTS[:2])
    weights = layout.tensors(layout.read(task.module))
    first, _ = example_gradients(task, weights, batch)
    second, _ = example_gradients(task, weights, batch, inner_step=0.3)
    assert all(bool(torch.isfinite(g).all()) for g in second.values())
    assert any(not torch.allclose(second[n], first[n], atol=1e-4) for n in first)


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


# ----------------------------------------------------------------------------------------- M8
def test_m8_a_model_that_was_saved_in_fp16_computes_in_the_precision_that_is_set(
    tmp_path: Path,
) -> None:
    """M8.

    fp16 T5 overflows. -> fp32 or bf16, whatever the folder holds; what is saved is of that
    precision, too. (fp16 as a setting is refused: tests/unit/client_app/test_models.py.)
    """
    tiny_t5().half().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        task = text_to_text.make_task(tiny_config(model=str(tmp_path), precision=precision))
        layout = Layout.of(task.module)
        assert set(layout.dtypes) == {dtype}
        weights = layout.tensors(layout.read(task.module))
        assert bool(torch.isfinite(task.losses(weights, task.encode(TEXTS))).all())
        task.save(weights, tmp_path / precision)
        assert f'"dtype": "{str(dtype).removeprefix("torch.")}"' in (
            tmp_path / precision / "config.json"
        ).read_text("utf-8")


# ----------------------------------------------------------------------------------------- M9
@pytest.mark.parametrize("letters", [510, 511, 600])
def test_m9_513_tokens_fit_514_positions(letters: int) -> None:
    """M9.

    RoBERTa's 514 positions hold 512 tokens. -> truncation at max - 2; a 513-token input works.
    """
    small = "hidden_size=8,num_hidden_layers=1,num_attention_heads=1,intermediate_size=8"
    model = f"roberta:{small},max_position_embeddings=514"
    task = make_task(tiny_config(task="labels", model=model, max_length=1000))
    layout = Layout.of(task.module)
    weights = layout.tensors(layout.read(task.module))
    long = Example("spelling", "a" * letters, "a" * letters, "g")
    batch = task.encode([long])
    assert batch["tokens"].shape == (1, 512)
    assert bool(torch.isfinite(task.losses(weights, batch)).all())
    (answer,) = task.answers(weights, [long])
    assert answer.endswith("a" * (letters - 510))  # what was cut off is kept as it is


# ---------------------------------------------------------------------------------------- M11
@pytest.mark.parametrize("family", list(FAMILIES))
def test_m11_labels_are_int64_and_within_what_the_model_can_say(family: str) -> None:
    """M11.

    label >= num_labels; int32 labels; token id >= vocabulary. -> inputs are made here, of a label
    space that is global. (What is no label: tests/unit/client_app/tasks; a tokenizer of another
    model: tests/unit/client_app/test_models.py.)
    """
    make, examples = FAMILIES[family]
    task = make(0)
    batch = task.encode(examples)
    labels = batch["labels"]
    rows = {"t5": len(tiny_tokenizer()), "roberta": len(labels_of_all(SPACES)), "cnn": 3}[family]
    assert labels.dtype == torch.int64
    assert bool((labels < rows).all()) and set(labels[labels < 0].tolist()) <= {-100}
    for name in {"source", "inputs", "tokens"} & set(batch):
        assert batch[name].dtype == torch.int64
        assert 0 <= int(batch[name].min()) <= int(batch[name].max()) < vocabulary(task)


def vocabulary(task: Any) -> int:
    """Return how many tokens a model has embeddings for."""
    return int(task.module.config.vocab_size)


class NeverEmpty(ToyTask):
    """A task that is handed no batch without rows."""

    def encode(self, examples: Sequence[Example]) -> Batch:
        assert examples
        return super().encode(examples)


def test_m11_no_batch_has_zero_rows() -> None:
    """M11.

    a batch of zero rows. -> a device, or a sample, without examples is zero of the right length,
    and the model is not asked.
    """
    task = NeverEmpty(2)
    layout = Layout.of(task.module)
    point = layout.read(task.module)
    bounds: dict[str, Any] = {"clip_norm": 1.0, "microbatch": 4}
    steps = Steps(count=2, learning_rate=0.1, seed=0)
    for sums in (
        clipped_sums(task, layout, point, [], loss_cap=8.0, signs={}, **bounds),
        clipped_delta(task, layout, point, [], steps=steps, loss_cap=8.0, signs={}, **bounds),
    ):
        assert torch.equal(sums.total, torch.zeros(layout.size)) and sums.loss == 0.0
    for differences in (loss_differences, mean_differences):
        found = differences(task, layout, point, point, steps=[0.1, 1.0], examples=[], **bounds)
        assert found == [0.0, 0.0]
    scores = score_sums(task, layout.tensors(point), [], ("toy",))
    assert scores.counts == scores.sums == (0.0,)


class Normalised(nn.Module):
    """A linear model behind dropout and a BatchNorm."""

    def __init__(self, *, tracked: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(2, track_running_stats=tracked)
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.drop(x)))
        return out


def normalised(*, tracked: bool) -> ToyTask:
    """Return a task of one's own whose model was left in train mode."""
    module = Normalised(tracked=tracked).train()

    def loss(weights: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional_call(module, dict(weights), (x,))
        return (out[:, 0] - y) ** 2

    return ToyTask(2, loss, module)


def tracked(config: Config) -> ToyTask:
    return normalised(tracked=True)


def untracked(config: Config) -> ToyTask:
    return normalised(tracked=False)


def test_m11_a_batchnorm_has_a_batch_of_one_or_is_refused() -> None:
    """M11, M5.

    BatchNorm with batch 1. -> a model of one's own is put into eval mode, its dropout with it: an
    example's gradient is its own, alone or not. A layer without statistics is refused by name.
    """
    task = task_of(tiny_config(task="tests.field.test_models:tracked"))
    examples = [toy_example([n, 1.0], n) for n in (1.0, -2.0, 30.0)]
    alone = torch.stack([total_of(task, [example]) for example in examples]).sum(0)
    assert bool(alone.any()) and torch.allclose(total_of(task, examples), alone, rtol=1e-5)
    with pytest.raises(ConfigurationError, match=r"'norm' \(BatchNorm1d\) mixes.*GroupNorm"):
        task_of(tiny_config(task="tests.field.test_models:untracked"))


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
