"""A RoBERTa as a task: classes, tags and corrections as labels of positions."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForTokenClassification

from client_app.datasets.dataset import Example
from client_app.datasets.spaces import Space
from client_app.models import byte_tokenizer
from client_app.tasks.edits import ALPHABET, LABELS, edited, edits
from client_app.tasks.labels import LabelText, labels_of_all, make_task
from regionfed.errors import ConfigurationError, DataError
from regionfed.vector import Layout
from tests.conftest import QUERIES, SPACES, tiny_config, tiny_roberta

SHARED = Path(__file__).resolve().parents[4] / ".." / "shared" / "data"
REAL = Path(os.environ.get("REGIONFED_DATA", SHARED))
ROBERTA = "roberta:hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
TEXTS = st.text(ALPHABET, max_size=8)


def weights_of(task: LabelText) -> dict[str, torch.Tensor]:
    layout = Layout.of(task.module)
    return layout.tensors(layout.read(task.module))


# ---------------------------------------------------------------------------------------- edits
@given(TEXTS, TEXTS)
def test_edits_make_the_target_or_there_are_none(source: str, target: str) -> None:
    """One label of the closed set for the start and each character."""
    found = edits(source, target)
    if found is not None:
        assert len(found) == len(source) + 1 and set(found) <= set(LABELS)
        assert edited(source, found) == target


@given(TEXTS)
def test_a_right_text_is_kept(text: str) -> None:
    """No edit where none is needed."""
    assert set(edits(text, text) or ()) == {"keep"}


@pytest.mark.parametrize(
    ("source", "target", "changes"),
    [
        ("umbrela", "umbrella", 1),
        ("trianers", "trainers", 2),
        ("red shoess", "red shoes", 1),
        ("airtight box", "air tight box", 1),
        ("color", "colour", 1),
        ("ea", "tea", 1),
        ("a b", "ab", 1),
    ],
)
def test_common_slips_are_within_reach(source: str, target: str, changes: int) -> None:
    """Letters omitted, added, replaced, swapped; spaces; the first letter."""
    found = edits(source, target)
    assert found is not None and sum(label != "keep" for label in found) == changes


def test_what_one_label_for_each_character_cannot_say_has_none() -> None:
    """Far more letters than there are, or letters of no label."""
    assert edits("a", "abcd") is None and edits("tee", "thé") is None
    assert edited("thé", ["keep"]) == "thé"


# --------------------------------------------------------------------------------------- encode
def test_labels_are_at_the_positions_of_their_kind() -> None:
    """The start for a class; first tokens for tags; start and characters for a correction."""
    task = tiny_roberta()
    names = labels_of_all(SPACES)
    batch = task.encode(QUERIES)
    rows = [[names[i] if i >= 0 else None for i in row] for row in batch["labels"].tolist()]
    assert rows[0][0] == ("intent", "shoes") and set(rows[0][1:]) == {None}
    tags = [pair[1] for pair in rows[2] if pair]
    assert rows[2][0] is None and tags == QUERIES[2].target.split()
    spelling = [pair[1] for pair in rows[3] if pair]
    assert rows[3][0] == ("spelling", "keep") and spelling == list(
        edits("umbrela", "umbrella") or ()
    )
    # A task's own labels are open to it, and no others.
    for row, query in zip(batch["closed"], QUERIES, strict=True):
        assert [n for n, v in zip(names, row.tolist(), strict=True) if v == 0.0] == [
            n for n in names if n[0] == query.task
        ]


def test_a_513_token_text_is_cut_to_what_the_positions_hold() -> None:
    """M9: of the 66 positions of this model (514 of roberta-base's) two hold no token."""
    task = tiny_roberta()
    long = Example("entities", " ".join(["ab"] * 600), " ".join(["brand"] * 600), "g")
    batch = task.encode([long])
    assert batch["tokens"].shape == (1, 64) and batch["tokens"][0, -1] == 2  # still ended
    assert bool(torch.isfinite(task.losses(weights_of(task), batch)).all())
    assert len(task.answers(weights_of(task), [long])[0].split()) == 600


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (Example("intent", "a", "shoe", "g"), "unknown label 'shoe'; did you mean 'shoes'"),
        (Example("entities", "a b", "brand", "g"), "1 tags for 2 words"),
        (Example("entities", "a", "brnd", "g"), "unknown label 'brnd'"),
    ],
)
def test_a_target_that_is_no_answer_is_refused(example: Example, said: str) -> None:
    """M11: no label beyond the label space gets into a loss."""
    with pytest.raises(DataError, match=said):
        tiny_roberta().encode([QUERIES[0], example])
    with pytest.raises(ConfigurationError, match="no task 'x'"):
        tiny_roberta().encode([Example("x", "a", "b", "g")])


def test_a_task_of_one_class_is_no_regression() -> None:
    """M11: num_labels = 1 is a class like any other: its loss is 0, its score 1."""
    task = tiny_roberta(spaces={"intent": Space("class", ("tea",))})
    example = Example("intent", "a", "tea", "g")
    assert task.losses(weights_of(task), task.encode([example])).tolist() == [0.0]
    assert task.scores(weights_of(task), [example]) == [1.0]


def test_a_space_states_each_label_once_and_one_at_least() -> None:
    """M11: the label space is checked when it is made."""
    for kind, labels in (("class", ()), ("class", ("a", "a")), ("text", ("a",))):
        with pytest.raises(DataError, match="cannot have the labels"):
            Space(kind, labels)


# --------------------------------------------------------------------------------------- losses
def test_a_loss_is_the_library_s_over_the_task_s_own_labels() -> None:
    """Against the same model called as transformers documents it."""
    task = tiny_roberta()
    names = labels_of_all(SPACES)
    mine = [i for i, (name, _) in enumerate(names) if name == "intent"]
    losses = task.losses(weights_of(task), task.encode(QUERIES[:2]))
    for query, loss in zip(QUERIES[:2], losses, strict=True):
        read = byte_tokenizer()(
            [query.source.split()], is_split_into_words=True, return_tensors="pt"
        )
        logits = task.module(**read).logits[0, 0, mine]
        target = SPACES["intent"].labels.index(query.target)
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(target))
        assert torch.allclose(loss, expected, atol=1e-5)


def test_a_correction_out_of_reach_has_no_loss_and_scores_nothing() -> None:
    """M6: no valid position: 0, not nan."""
    task = tiny_roberta()
    example = Example("spelling", "a", "abcd", "g")
    assert task.losses(weights_of(task), task.encode([example])).tolist() == [0.0]
    assert task.scores(weights_of(task), [example]) == [0.0]


def test_a_model_that_learned_its_examples_answers_and_scores_right() -> None:
    """End to end for the three kinds at once."""
    task = tiny_roberta()
    batch = task.encode(QUERIES)
    weights = {n: w.clone().requires_grad_() for n, w in weights_of(task).items()}
    optimiser = torch.optim.Adam(list(weights.values()), lr=0.02)
    for _ in range(300):
        optimiser.zero_grad()
        task.losses(weights, batch).sum().backward()
        optimiser.step()
    learned = {n: w.detach() for n, w in weights.items()}
    assert task.answers(learned, QUERIES) == [q.target for q in QUERIES]
    assert task.scores(learned, QUERIES) == [1.0] * len(QUERIES)
    assert task.scores(learned, []) == []


# ---------------------------------------------------------------------------------------- files
def test_a_saved_model_loads_elsewhere_and_gives_the_same_logits(tmp_path: Path) -> None:
    """M3: with the labels' names, by transformers alone."""
    task = tiny_roberta()
    task.save(weights_of(tiny_roberta(seed=3)), tmp_path)
    again = AutoModelForTokenClassification.from_pretrained(tmp_path)
    read = byte_tokenizer()([["red", "shoes"]], is_split_into_words=True, return_tensors="pt")
    expected = tiny_roberta(seed=3).module(**read).logits
    assert torch.allclose(again(**read).logits, expected, atol=1e-6)


@pytest.mark.parametrize(("limit", "seed"), [(64, 0), (64, 1), (64, 2), (8, 0)])
def test_the_code_that_is_printed_answers_as_the_task_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: int, seed: int
) -> None:
    """M3: of each kind, by transformers alone; a text that is cut off, too."""
    task = make_task(tiny_config(task="labels", max_length=limit, model=ROBERTA))
    layout = Layout.of(task.module)
    generator = torch.Generator().manual_seed(seed)
    # Far from fresh weights, which give every position the same label.
    point = layout.read(task.module) + torch.randn(layout.size, generator=generator)
    task.save(layout.tensors(point), tmp_path)
    for name in ("intent", "entities", "spelling"):
        exec(task.usage(name), {"folder": str(tmp_path)})
        query = Example(name, "red trainrs size 9", "", "")
        assert capsys.readouterr().out == task.answers(layout.tensors(point), [query])[0] + "\n"


def test_the_embedded_corpus_is_read_by_a_roberta_of_random_weights() -> None:
    """The dataset states its answers; every device draws the same weights from the seed."""
    config = tiny_config(task="labels", model=ROBERTA)
    one, other = make_task(config), make_task(config)
    layout = Layout.of(one.module)
    assert torch.equal(layout.read(one.module), layout.read(other.module))
    assert one.module.config.id2label[0] == "intent:clothing"


def test_the_real_tokenizer_reads_words_characters_and_512_tokens() -> None:
    """M9: 513 tokens and more are cut to 512, the 514 positions of roberta-base less two."""
    folder = REAL / "tokenizers" / "roberta-base"
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set REGIONFED_DATA to the folder of the real rows")
    model = f"{ROBERTA},max_position_embeddings=514,vocab_size=50265,tokenizer={folder}"
    task = make_task(tiny_config(task="labels", model=model, max_length=1000))
    long = Example("intent", " ".join(["shoes"] * 600), "footwear", "g")
    batch = task.encode([long, Example("spelling", "umbrela", "umbrella", "g")])
    assert batch["tokens"].shape == (2, 512) and batch["tokens"][0, 0] == 0
    assert int((batch["labels"][1] >= 0).sum()) == 1 + len("umbrela")
    assert bool(torch.isfinite(task.losses(weights_of(task), batch)).all())
