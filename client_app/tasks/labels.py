"""Text in, labels out, by a RoBERTa: every task labels positions of its text.

There is one head over the labels of all tasks; a task is a slice of them and a choice of positions.

=========  ========================  ==========================================================
space      labelled positions        answer
=========  ========================  ==========================================================
``class``  the start, ``<s>``        its label (sequence classification)
``tags``   each word's first token   a label for each word (token classification)
``text``   the start, each           the text that the labels make of the source, character by
           character's first token   character (`client_app.tasks.edits`): so spelling is solved
=========  ========================  ==========================================================

Entity tags are those of the dataset: one type for a word, ``other`` for none; B- and I- are not
told apart. A text that one edit per character cannot make is out of reach: it has no loss, and
scores 0.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call

from client_app.datasets.dataset import Example
from client_app.datasets.load import dataset_of
from client_app.datasets.spaces import Kind, Space, checked, spaces_of
from client_app.models import load, merge_lora, prepared
from client_app.task import Batch, Tensors
from client_app.tasks.edits import KEEP, LABELS, edited, edits
from client_app.tasks.text_to_text import token_f1
from regionfed.config import Config
from regionfed.errors import ConfigurationError

MAX_LENGTH = 128
HEAD = r"^classifier\."
# Added to what must not be seen or answered; finite, so that a row that is all hidden is no nan.
_HIDDEN = -1e9
_IGNORED = -100
_SCORING_BATCH = 256
# A space has no token of its own where words are split at it.
_SPACE = "_"


@dataclass(frozen=True)
class Reading:
    """How a kind of space is read: units of the text, labels of the start and the units.

    `usage` is code that does the same with `transformers` alone; it has places for ``task`` and
    ``limit``.
    """

    units: Callable[[str], list[str]]
    labels: Callable[[Example], Sequence[str | None]]
    answer: Callable[[str, Sequence[str]], str]
    score: Callable[[str, str], float]
    usage: str


def _class_labels(example: Example) -> Sequence[str | None]:
    return [example.target]


def _tag_labels(example: Example) -> Sequence[str | None]:
    return [None, *example.target.split()]


def _edit_labels(example: Example) -> Sequence[str | None]:
    return edits(example.source, example.target) or ()


def _characters(source: str) -> list[str]:
    return [_SPACE if c.isspace() else c for c in source]


def _exact(answer: str, target: str) -> float:
    return float(answer == target)


_LOAD = """\
from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder, add_prefix_space=True)
model = AutoModelForTokenClassification.from_pretrained(folder).eval()

source = "red trainrs size 9"
"""
_WORDS = """\
units = source.split()
"""
_CHARACTERS = """\
units = ["_" if c.isspace() else c for c in source]
"""
_ASK = """\
query = tokenizer(
    units, is_split_into_words=True, truncation=True, max_length={limit}, return_tensors="pt"
)
logits = model(**query).logits[0]
# One head has the labels of all tasks, each behind its task's name.
names = model.config.id2label
mine = [i for i, name in names.items() if name.startswith("{task}:")]


def label(place):
    return names[mine[int(logits[place, mine].argmax())]].removeprefix("{task}:")


"""
_UNITS = """\
# A unit's label is that of its first token; of one that was cut off, the first that there is.
first = {{unit: place for place, unit in reversed(list(enumerate(query.word_ids())))}}
silent = names[mine[0]].removeprefix("{task}:")
labels = [label(first[n]) if n in first else silent for n in range(len(units))]
"""
_CLASS = """\
# A class is the label of the start.
print(label(0))"""
_TAGS = """\
print(" ".join(labels))"""
_EDITS = """\
# A label keeps its character, deletes it, replaces it (=x), or puts one behind it (+x); that of the
# start, which is no character, can only put one.
answer = label(0)[1:] if label(0).startswith("+") else ""
for character, edit in zip(source, labels):
    answer += {{"k": character, "d": "", "=": edit[1:], "+": character + edit[1:]}}[edit[0]]
print(answer)"""

READINGS: dict[Kind, Reading] = {
    "class": Reading(
        str.split, _class_labels, lambda _, found: found[0], _exact, _LOAD + _WORDS + _ASK + _CLASS
    ),
    "tags": Reading(
        str.split,
        _tag_labels,
        lambda _, found: " ".join(found[1:]),
        token_f1,
        _LOAD + _WORDS + _ASK + _UNITS + _TAGS,
    ),
    "text": Reading(
        _characters, _edit_labels, edited, _exact, _LOAD + _CHARACTERS + _ASK + _UNITS + _EDITS
    ),
}


class LabelText:
    """A RoBERTa with one head over the labels of all tasks.

    Parameters
    ----------
    module : RobertaForTokenClassification
        With as many labels as `labels_of_all` has for `spaces`.
    tokenizer
        Puts a start token first, and can tell which word a token is of.
    spaces : Mapping[str, Space]
        The answers of each task: the same on every device.
    limit : int
        Tokens that are read; longer texts are cut. Never more than the model has positions for.
    """

    def __init__(
        self, module: nn.Module, tokenizer: Any, spaces: Mapping[str, Space], limit: int
    ) -> None:
        self._module = module.eval()
        self._tokenizer = tokenizer
        self._spaces = dict(spaces)
        self._labels = labels_of_all(spaces)
        self._index = {pair: i for i, pair in enumerate(self._labels)}
        self._closed = {
            task: torch.tensor([0.0 if name == task else _HIDDEN for name, _ in self._labels])
            for task in self._spaces
        }
        config = cast(Any, module).config
        # Positions count from the padding's number on: of 514 two hold no token.
        self._first = int(config.pad_token_id) + 1
        self._pad = int(config.pad_token_id)
        self._limit = min(limit, int(config.max_position_embeddings) - self._first)
        if config.num_labels != len(self._labels):
            raise ConfigurationError(
                f"the model has {config.num_labels} labels, its tasks {len(self._labels)}."
            )

    @property
    def module(self) -> nn.Module:
        """The RoBERTa."""
        return self._module

    def encode(self, examples: Sequence[Example]) -> Batch:
        """Return the batch that the model reads.

        Returns
        -------
        Batch
            ``tokens`` and ``labels`` (-100 where there is none), (B, length); ``hidden``, added to
            attention scores, (B, length); ``closed``, added to logits, (B, labels).

        Raises
        ------
        DataError
            If a target is none of its task's answers.
        """
        batch, starts = self._read(examples)
        labels = torch.full_like(batch["tokens"], _IGNORED)
        for row, (example, places) in enumerate(zip(examples, starts, strict=True)):
            space = self._spaces[example.task]
            given = READINGS[space.kind].labels(checked(space, example))
            for place, label in zip(places, given, strict=False):
                if label is not None and place >= 0:
                    labels[row, place] = self._index[(example.task, label)]
        return {**batch, "labels": labels}

    def _read(self, examples: Sequence[Example]) -> tuple[Batch, list[list[int]]]:
        """Return what does not depend on targets, and the position of the start and each unit.

        A unit that was cut off, or has no token, has position -1.
        """
        units = [READINGS[self._space(e).kind].units(e.source) for e in examples]
        found = self._tokenizer(
            units, is_split_into_words=True, truncation=True, max_length=self._limit
        )
        ids = found["input_ids"]
        longest = max(map(len, ids))
        tokens = torch.tensor([row + [self._pad] * (longest - len(row)) for row in ids])
        lengths = torch.tensor([len(row) for row in ids])
        hidden = (torch.arange(longest)[None] >= lengths[:, None]).float() * _HIDDEN
        starts = [
            [0, *_first_tokens(found.word_ids(row), len(words))] for row, words in enumerate(units)
        ]
        closed = torch.stack([self._closed[e.task] for e in examples])
        device = next(self._module.parameters()).device
        batch = {"tokens": tokens, "hidden": hidden, "closed": closed}
        return {name: value.to(device) for name, value in batch.items()}, starts

    def _space(self, example: Example) -> Space:
        if example.task not in self._spaces:
            known = ", ".join(self._spaces)
            raise ConfigurationError(f"no task '{example.task}'; the model knows {known}.")
        return self._spaces[example.task]

    def losses(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy over each example's labelled positions, (B,)."""
        labels = batch["labels"]
        valid = labels >= 0
        loss = nn.functional.cross_entropy(
            self._logits(weights, batch).transpose(1, 2), labels.clamp(min=0), reduction="none"
        )
        # The label that stands for none may be closed to this task: its loss is huge, and unused.
        return torch.where(valid, loss, 0.0).sum(1) / valid.sum(1).clamp(min=1)

    def _logits(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        tokens = batch["tokens"]
        dtype = next(self._module.parameters()).dtype  # adapters are float32 whatever that is
        positions = self._first + torch.arange(tokens.shape[1], device=tokens.device)
        logits: torch.Tensor = functional_call(
            self._module,
            dict(weights),
            kwargs={
                "input_ids": tokens,
                # Given: to make positions and masks branches on values, which vmap cannot.
                "position_ids": positions[None].expand(tokens.shape[0], -1),
                "attention_mask": batch["hidden"][:, None, None, :].to(dtype),
            },
        ).logits
        if logits.dtype == torch.bfloat16:
            logits = logits.float()
        return logits + batch["closed"][:, None, :]

    def answers(self, weights: Tensors, examples: Sequence[Example]) -> list[str]:
        """Return the model's answers; the examples' targets are not looked at."""
        out: list[str] = []
        for start in range(0, len(examples), _SCORING_BATCH):
            part = examples[start : start + _SCORING_BATCH]
            batch, places = self._read(part)
            with torch.no_grad():
                best = self._logits(weights, batch).argmax(-1).tolist()
            for example, row, positions in zip(part, best, places, strict=True):
                space = self._spaces[example.task]
                silent = KEEP if space.kind == "text" else space.labels[0]
                labels = [self._labels[row[p]][1] if p >= 0 else silent for p in positions]
                out.append(READINGS[space.kind].answer(example.source, labels))
        return out

    def scores(self, weights: Tensors, examples: Sequence[Example]) -> list[float]:
        """Return each example's score: 1 for the right answer; for tags the F1 of its entities."""
        return [
            READINGS[self._spaces[example.task].kind].score(answer, example.target)
            for example, answer in zip(examples, self.answers(weights, examples), strict=True)
        ]

    def save(self, weights: Tensors, folder: Path) -> None:
        """Write a Hugging Face folder: configuration with the labels' names, weights, tokenizer."""
        module = copy.deepcopy(self._module)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
        merged = cast(Any, merge_lora(module).requires_grad_(True))
        merged.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)

    def usage(self, task: str) -> str:
        """Return code that needs `transformers` and nothing of this package."""
        return READINGS[self._spaces[task].kind].usage.format(task=task, limit=self._limit)


def _first_tokens(words: Sequence[int | None], count: int) -> list[int]:
    """Return each word's first position; -1 for a word that has none."""
    places = [-1] * count
    for position, word in reversed(list(enumerate(words))):
        if word is not None:
            places[word] = position
    return places


def labels_of_all(spaces: Mapping[str, Space]) -> list[tuple[str, str]]:
    """Return (task, label) for every label of every task, in a fixed order."""
    return [
        (task, label)
        for task, space in spaces.items()
        for label in (LABELS if space.kind == "text" else space.labels)
    ]


def make_task(config: Config) -> LabelText:
    """Load the RoBERTa that a configuration names, with a head for the dataset's labels."""
    spaces = spaces_of(dataset_of(config))
    names = {i: f"{task}:{label}" for i, (task, label) in enumerate(labels_of_all(spaces))}
    # The library makes one label a regression; here it is a class like any other.
    loaded = load(
        config,
        "roberta",
        num_labels=len(names),
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    module = prepared(loaded.module, config, HEAD)
    return LabelText(module, loaded.tokenizer, spaces, config.max_length or MAX_LENGTH)
