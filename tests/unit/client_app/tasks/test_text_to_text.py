"""A T5 as a task: its loss is each example's own, and agrees with the library's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from client_app.datasets.dataset import Example
from client_app.task import score_sums
from client_app.tasks.text_to_text import (
    MAX_SOURCE,
    MAX_TARGET,
    TextToText,
    make_task,
    token_f1,
)
from regionfed.vector import Layout
from tests.conftest import tiny_config, tiny_t5, tiny_tokenizer

TEXTS = [
    Example("intent", "red shoes", "shoes", "a"),
    Example("intent", "a b", "grocery", "b"),
    Example("spelling", "a considerably longer query", "t", "c"),
]


def weights_of(task: TextToText) -> dict[str, torch.Tensor]:
    layout = Layout.of(task.module)
    return layout.tensors(layout.read(task.module))


# ------------------------------------------------------------------------------------- encode
def test_a_batch_holds_what_the_model_reads(t5: TextToText) -> None:
    """Task and source in, target out, each ended; the decoder reads the target shifted right."""
    batch = t5.encode(TEXTS)
    tokenizer = tiny_tokenizer()
    assert {k: v.shape[0] for k, v in batch.items()} == dict.fromkeys(batch, len(TEXTS))
    for i, text in enumerate(TEXTS):
        source = tokenizer(f"{text.task}: {text.source}")["input_ids"][: MAX_SOURCE - 1]
        assert batch["source"][i, : len(source)].tolist() == source
        target = tokenizer(text.target)["input_ids"]
        assert batch["labels"][i, : len(target)].tolist() == target and target[-1] == 1
        assert batch["inputs"][i, : len(target)].tolist() == [0, *target[:-1]]


def test_padding_is_never_a_label(t5: TextToText) -> None:
    """M6: pad id 0 left in T5 labels would change the loss; it is -100, and hidden in sources."""
    batch = t5.encode(TEXTS)
    assert 0 not in batch["labels"]
    assert (batch["labels"] == -100).any()
    hidden = batch["source_hidden"]
    assert torch.equal(hidden < -1e8, batch["source"] == 0)
    assert torch.equal(hidden[batch["source"] != 0], torch.zeros(int((batch["source"] != 0).sum())))


def test_long_texts_are_cut_and_still_end(t5: TextToText) -> None:
    """No sequence is longer than the limits; the end token survives."""
    batch = t5.encode([Example("t", "a" * 500, "b" * 500, "g"), TEXTS[0]])
    assert batch["source"].shape[1] == MAX_SOURCE and batch["labels"].shape[1] == MAX_TARGET
    assert batch["source"][0, -1] == 1 and batch["labels"][0, -1] == 1


def test_an_empty_target_is_still_an_example(t5: TextToText) -> None:
    """Its only token is the end token."""
    loss = t5.losses(weights_of(t5), t5.encode([Example("t", "", "", "g")]))
    assert loss.shape == (1,) and bool(torch.isfinite(loss).all()) and float(loss) > 0.0


# ------------------------------------------------------------------------------------- losses
def test_a_loss_is_the_library_s_own_loss_of_that_example(t5: TextToText) -> None:
    """Against transformers, one example at a time, in eval mode."""
    model = tiny_t5().eval()
    tokenizer = tiny_tokenizer()
    losses = t5.losses(weights_of(t5), t5.encode(TEXTS))
    assert losses.shape == (len(TEXTS),)
    for text, loss in zip(TEXTS, losses, strict=True):
        source = tokenizer(
            [f"{text.task}: {text.source}"],
            return_tensors="pt",
            truncation=True,
            max_length=MAX_SOURCE,
        )
        labels = tokenizer([text.target], return_tensors="pt")["input_ids"]
        expected = model(
            input_ids=source["input_ids"], attention_mask=source["attention_mask"], labels=labels
        ).loss
        assert torch.allclose(loss, expected, atol=1e-5)


def test_a_batch_s_mean_over_tokens_is_something_else(t5: TextToText) -> None:
    """M7: which is why a loss is each example's mean over its own tokens."""
    batch = t5.encode(TEXTS)
    ours = t5.losses(weights_of(t5), batch).mean().detach()
    theirs = (
        tiny_t5()
        .eval()(
            input_ids=batch["source"],
            attention_mask=(batch["source"] != 0).long(),
            labels=batch["labels"],
        )
        .loss.detach()
    )
    assert abs(float(ours - theirs)) > 1e-4


def test_losses_follow_the_weights_that_are_given(t5: TextToText) -> None:
    """Not the module's own: devices share one module."""
    batch = t5.encode(TEXTS)
    other = Layout.of(t5.module)
    vector = other.read(tiny_t5(seed=1))
    before = other.read(t5.module)
    expected = TextToText(tiny_t5(seed=1), tiny_tokenizer())
    assert torch.allclose(
        t5.losses(other.tensors(vector), batch), expected.losses(weights_of(expected), batch)
    )
    assert torch.equal(other.read(t5.module), before)


def test_one_entry_moves_all_names_of_a_tie(t5: TextToText) -> None:
    """Embedding, decoder embedding and head follow `shared.weight`."""
    weights = weights_of(t5)
    assert "lm_head.weight" not in weights
    batch = t5.encode(TEXTS)
    moved = {**weights, "shared.weight": weights["shared.weight"] + 0.1}
    model = tiny_t5()
    with torch.no_grad():
        model.shared.weight.add_(0.1)
    expected = TextToText(model, tiny_tokenizer())
    assert torch.allclose(
        t5.losses(moved, batch), expected.losses(weights_of(expected), batch), atol=1e-5
    )


def test_dropout_is_off_for_good() -> None:
    """M5: even when a module in train mode is handed over."""
    task = TextToText(tiny_t5().train(), tiny_tokenizer())
    batch = task.encode(TEXTS)
    assert not any(module.training for module in task.module.modules())
    first = task.losses(weights_of(task), batch)
    assert torch.equal(first, task.losses(weights_of(task), batch))


# -------------------------------------------------------------------------------------- scores
def test_answers_are_the_library_s_greedy_answers(t5: TextToText) -> None:
    """The same text as `generate` of a model with these weights; the module keeps its own."""
    layout = Layout.of(t5.module)
    vector = layout.read(tiny_t5(seed=3))
    before = layout.read(t5.module)
    model = tiny_t5(seed=3).eval()
    batch = t5.encode(TEXTS)
    ids = model.generate(
        input_ids=batch["source"],
        attention_mask=batch["source"] != 0,
        max_new_tokens=MAX_TARGET,
        do_sample=False,
    )
    expected = [s.strip() for s in tiny_tokenizer().batch_decode(ids, skip_special_tokens=True)]
    assert t5.answers(layout.tensors(vector), TEXTS) == expected
    assert torch.equal(layout.read(t5.module), before)


EXAMPLES = [Example("t", "a", "b", "g"), Example("t", "c", "de", "g")]


def learned(task: TextToText) -> dict[str, torch.Tensor]:
    """Return weights that know `EXAMPLES` by heart."""
    batch = task.encode(EXAMPLES)
    weights = {n: w.clone().requires_grad_() for n, w in weights_of(task).items()}
    optimiser = torch.optim.Adam(list(weights.values()), lr=0.03)
    for _ in range(40):
        optimiser.zero_grad()
        task.losses(weights, batch).sum().backward()
        optimiser.step()
    return {n: w.detach() for n, w in weights.items()}


def test_a_model_that_learned_its_examples_scores_one(t5: TextToText) -> None:
    """End to end: losses train it, answers are decoded, and a score is that of the answer."""
    weights = learned(t5)
    assert t5.answers(weights, EXAMPLES) == ["b", "de"]
    assert t5.scores(weights, EXAMPLES) == [1.0, 1.0]
    assert t5.scores(weights_of(t5), EXAMPLES) == [0.0, 0.0]
    # Neither a beginning of the answer, nor more than it, nor its padding in a batch is right.
    for target in ("d", "def", "", "e", "ed", "d e"):
        wrong = replace(EXAMPLES[1], target=target)
        assert t5.scores(weights, [EXAMPLES[0], wrong]) == [1.0, 0.0], target


def test_no_examples_have_no_scores(t5: TextToText) -> None:
    """E6: nothing is divided by."""
    assert t5.scores(weights_of(t5), []) == []
    sums = score_sums(t5, weights_of(t5), [], ("intent", "spelling"))
    assert sums.counts == sums.sums == (0.0, 0.0)


def test_a_wrong_answer_about_entities_has_partial_credit(
    t5: TextToText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token F1 of the very answer, and only where the task has it; order is kept."""
    monkeypatch.setattr(t5, "answers", lambda _, examples: ["brand other"] * len(examples))
    examples = [
        Example("intent", "a", "brand size", "g"),
        Example("entities", "a b", "brand size", "g"),
        Example("entities", "a b", "size brand", "g"),
    ]
    assert t5.scores(weights_of(t5), examples) == pytest.approx([0.0, 2 / 3, 0.0])


@pytest.mark.parametrize(
    ("answer", "target", "score"),
    [
        ("brand other size", "brand other size", 1.0),
        ("brand other other", "brand other size", 2 / 3),
        ("other brand", "brand other", 0.0),
        ("other other", "other other", 1.0),
        ("brand", "other", 0.0),
        ("", "brand", 0.0),
        ("brand brand brand", "brand", 0.5),
    ],
)
def test_token_f1(answer: str, target: str, score: float) -> None:
    """Position and type have to be right; `other` is no entity."""
    assert token_f1(answer, target) == pytest.approx(score)


# --------------------------------------------------------------------------------------- files
def test_a_folder_of_save_pretrained_is_loaded(t5_folder: Path, t5: TextToText) -> None:
    """The same losses as the model that was saved."""
    task = make_task(tiny_config(model=str(t5_folder)))
    assert Layout.of(task.module).fingerprint == Layout.of(t5.module).fingerprint
    batch = t5.encode(TEXTS)
    loaded = task.encode(TEXTS)
    assert all(torch.equal(loaded[k], batch[k]) for k in batch)
    assert torch.allclose(
        task.losses(weights_of(task), loaded), t5.losses(weights_of(t5), batch), atol=1e-6
    )


def test_the_vector_written_into_a_model_is_exported_and_loads_the_same(
    tmp_path: Path, t5: TextToText
) -> None:
    """M3: tied weights survive save_pretrained; the folder gives the same logits."""
    layout = Layout.of(t5.module)
    vector = layout.read(tiny_t5(seed=5))
    layout.write(vector, t5.module)
    t5._module.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    again = make_task(tiny_config(model=str(tmp_path)))
    assert torch.equal(layout.read(again.module), vector)
    batch = t5.encode(TEXTS)
    inputs = {"input_ids": batch["source"], "decoder_input_ids": batch["inputs"]}
    logits = [functional_call(m, {}, kwargs=inputs).logits for m in (t5.module, again.module)]
    assert torch.equal(*logits)
