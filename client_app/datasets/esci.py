"""Three text-to-text tasks on real product queries, shared out over regions and devices.

ESCI itself (Shopping Queries, arXiv:2206.06588) has neither intent, spelling nor entity labels.
The three tasks are a construction, each from the real labels that come nearest:

========  =================================  ===============================================
task      source -> target                   from
========  =================================  ===============================================
intent    query -> department                ``esci_query_category.csv``: the majority
                                             top-level Amazon category of the products that
                                             are judged exact for, or linked to, an ESCI query
spelling  typed query -> corrected query     ``query_typos.csv``: mistyped Home Depot queries
                                             with a search engine's suggestion; these queries
                                             are not ESCI's, and the corrections are silver
entities  query -> one type for each word    ``queryner_esci.jsonl``: gold BIO tags of QueryNER
                                             (arXiv:2405.09507) on ESCI queries; B- and I- are
                                             dropped, O becomes ``other``, and a type is
                                             named by a plain word (`TYPE_WORDS`)
========  =================================  ===============================================

The data has one locale, so its regions are a construction too. Each task is shared out on its
own, over the regions and then over a region's devices, by a Dirichlet draw over what sets its
rows apart: the department (intent), the kind of slip (spelling, see `slip`), the query's
commonest entity type (entities). No part is smaller than half an even share, so that the
tasks with few rows can still be learned and judged in every region.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_app.datasets.dataset import ClientData, DataConfig, Example
from client_app.datasets.partition import Indices, split_by_group
from client_app.datasets.shared import (
    HELD_OUT,
    SharedDataset,
    check_shape,
    purpose_rng,
    skewed,
)
from client_app.datasets.spaces import Space
from client_app.datasets.table import csv_rows, json_rows
from regionfed.errors import DataError

MAX_WORDS = 12
INTENT = ("query", "category")
SPELLING = ("typed", "corrected")
OTHER = "other"

TYPE_WORDS = {
    "core_product_type": "product",
    "product_name": "name",
    "product_number": "number",
    "creator": "brand",
    "modifier": "feature",
    "color": "colour",
    "uom": "size",
    "department": "audience",
    "occasion": "season",
}
"""Words for QueryNER's types: a model answers in words that it has read. No two types share one;
the others keep their names."""


@dataclass(frozen=True, slots=True)
class Row:
    """A usable row of one task; `kind` is what the Dirichlet draw is over."""

    source: str
    target: str
    kind: str


def load(config: DataConfig) -> SharedDataset:
    """Read the three tasks from a folder and share them out.

    Parameters
    ----------
    config : DataConfig
        `path` is the folder; each file may lie in it or in the subfolder named in `SOURCES`.
        `examples_per_client` bounds a device's training set; the tasks take turns until it
        is full, so that a small one is not crowded out.

    Returns
    -------
    SharedDataset
        Regions are named R1, R2, ...; about 18% of the queries are held out.

    Raises
    ------
    DataError
        If a file is missing or malformed (naming the line), or a number in `config` is
        out of range.
    """
    check_shape(config)
    rows = {task: _read(config.path, *source) for task, source in SOURCES.items()}
    kin = _kin((query_key(row.source), query_key(row.target)) for row in rows["spelling"])
    shared = [_share_out(task, rows[task], kin, config) for task in rows]
    devices = tuple(
        tuple(
            _merge(parts, config.examples_per_client, _rng(config.seed, "order", region, client))
            for client, parts in enumerate(zip(*of_region, strict=True))
        )
        for region, of_region in enumerate(zip(*shared, strict=True))
    )
    names = tuple(f"R{n + 1}" for n in range(config.regions))
    return SharedDataset(names, tuple(rows), devices, _spaces(rows))


def _spaces(rows: Mapping[str, Sequence[Row]]) -> dict[str, Space]:
    """Return the answers of each task: the files are published, their labels no secret."""
    types = {word for row in rows["entities"] for word in row.target.split()} - {OTHER}
    return {
        "intent": Space("class", tuple(sorted({row.target for row in rows["intent"]}))),
        "spelling": Space("text"),
        "entities": Space("tags", (OTHER, *sorted(types))),
    }


# Sharing out ------------------------------------------------------------------------------


def _share_out(
    task: str, rows: Sequence[Row], kin: dict[str, str], config: DataConfig
) -> list[list[ClientData]]:
    """Share one task out; the result is indexed by region, then device."""
    keys = [query_key(row.source) for row in rows]
    groups = [kin.get(key, key) for key in keys]
    examples = [
        Example(task, row.source, row.target, group)
        for row, group in zip(rows, groups, strict=True)
    ]
    _, held_out = split_by_group(groups, HELD_OUT, config.seed)
    test = frozenset(held_out.tolist())
    kinds = np.array([row.kind for row in rows])

    def device(indices: Indices) -> ClientData:
        # Split after sharing out: a device is judged on the mixture that it learns from.
        return ClientData(
            train=tuple(examples[i] for i in indices if i not in test),
            test=tuple(examples[i] for i in indices if i in test),
        )

    regions = _skewed(np.arange(len(rows)), kinds, config.regions, config, task)
    return [
        [
            device(part)
            for part in _skewed(region, kinds, config.clients_per_region, config, task, number)
        ]
        for number, region in enumerate(regions)
    ]


def _skewed(
    rows: Indices, kinds: NDArray[Any], parts: int, config: DataConfig, *purpose: str | int
) -> list[Indices]:
    return skewed(rows, kinds, parts, config.dirichlet, _rng(config.seed, "share", *purpose))


def _merge(parts: Sequence[ClientData], limit: int, rng: np.random.Generator) -> ClientData:
    """Join a device's tasks; its training examples come in turns, at most `limit` of them."""
    shuffled = [[part.train[i] for i in rng.permutation(len(part.train))] for part in parts]
    turns = chain.from_iterable(zip_longest(*shuffled))
    train = tuple(example for example in turns if example is not None)
    return ClientData(train[:limit], tuple(chain.from_iterable(part.test for part in parts)))


def _rng(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return a generator for one purpose, independent of all others and of their order."""
    return purpose_rng(seed, "esci", *purpose)


# Queries ----------------------------------------------------------------------------------


def normalise(text: str) -> str:
    """Return `text` in lower case, its words separated by single spaces."""
    return " ".join(text.lower().split())


def query_key(query: str) -> str:
    """Return what is the same for all spellings of a query: its letters and digits.

    ``"Air-tight box"``, ``"air - tight box"`` and ``"airtight  box"`` are one query.
    """
    folded = unicodedata.normalize("NFKC", query).casefold()
    return "".join(filter(str.isalnum, folded)) or query


def slip(typed: str, corrected: str) -> str:
    """Name the kind of slip that turned `corrected` into `typed`.

    Kinds of slip differ by keyboard, language and haste, as regions do.

    Returns
    -------
    str
        ``"spacing"`` (only spaces differ), else what the spelling lacks or has once spaces
        are ignored: ``"omitted"`` or ``"added"`` letters, two letters ``"swapped"``, one letter
        ``"replaced"``, or ``"several"`` of these.
    """
    wrong, right = (list(text.replace(" ", "")) for text in (typed, corrected))
    if wrong == right:
        return "spacing"
    for end in (0, -1):
        while wrong and right and wrong[end] == right[end]:
            del wrong[end], right[end]
    if not wrong:
        return "omitted"
    if not right:
        return "added"
    if len(wrong) == len(right) == 1:
        return "replaced"
    return "swapped" if len(wrong) == 2 and wrong == right[::-1] else "several"


def _kin(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Give all keys that are linked, directly or by others, one name: the smallest of them.

    A typed query and its correction are one query to the split, wherever either occurs.
    """
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while (above := parent.setdefault(key, key)) != key:
            key = above
        return key

    for pair in pairs:
        low, high = sorted(map(root, pair))
        parent[high] = low
    return {key: root(key) for key in parent}


# Files ------------------------------------------------------------------------------------


def _read(
    folder: Path | None, subfolder: str, name: str, parse: Callable[[Path], Iterator[Row]]
) -> list[Row]:
    """Return the usable rows of a file.

    Empty texts are left out, and so are long queries: one that is cut no longer has the target
    that it came with.
    """
    if folder is None:
        raise DataError(f"dataset 'esci' is read from disk: set the path of the folder of {name}.")
    places = [folder / subfolder / name, folder / name]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise DataError(
            f"dataset 'esci' needs {name}; looked for {places[0]} and {places[1]}. Put it there, "
            f"or correct the path."
        )
    rows = [row for row in parse(path) if row.target and 0 < len(row.source.split()) <= MAX_WORDS]
    if not rows:
        raise DataError(f"{path} holds no usable row: all are empty or above {MAX_WORDS} words.")
    return rows


def _intent(path: Path) -> Iterator[Row]:
    rows = [(row["query"], row["category"]) for _, row in csv_rows(path, needed=INTENT)]
    names = shortened({category for _, category in rows})
    for query, category in rows:
        # The start of a long query still has its department, and this task's rows are few.
        text = " ".join(normalise(query).split()[:MAX_WORDS])
        yield Row(text, names[category], names[category])


def shortened(names: Iterable[str]) -> dict[str, str]:
    """Shorten each name to the fewest first words, in lower case, that no other name starts with.

    >>> shortened(["Home & Kitchen", "Home & Garden", "Books"])
    {'Books': 'books', 'Home & Garden': 'home-garden', 'Home & Kitchen': 'home-kitchen'}
    """
    words = {name: re.findall(r"[^\W_]+", name.lower()) for name in sorted(names)}
    starts = Counter("-".join(w[:n]) for w in words.values() for n in range(1, len(w) + 1))

    def short(parts: list[str]) -> str:
        prefixes = ["-".join(parts[:n]) for n in range(1, len(parts) + 1)]
        return next((p for p in prefixes if starts[p] == 1), "-".join(parts))

    return {name: short(parts) for name, parts in words.items()}


def _spelling(path: Path) -> Iterator[Row]:
    for _, row in csv_rows(path, needed=SPELLING):
        typed, corrected = (normalise(row[name]) for name in SPELLING)
        if typed != corrected:
            yield Row(typed, corrected, slip(typed, corrected))


def _entities(path: Path) -> Iterator[Row]:
    for number, record in json_rows(path):
        tokens, types = _tagged(record, f"{path}, line {number}")
        if any(len(token.split()) != 1 for token in tokens):
            continue  # A token that is not one word would break the word-for-word target.
        named = Counter(name for name in types if name != OTHER)
        kind = named.most_common(1)[0][0] if named else OTHER
        yield Row(normalise(" ".join(tokens)), " ".join(types), kind)


SOURCES: dict[str, tuple[str, str, Callable[[Path], Iterator[Row]]]] = {
    "intent": ("esci_rows", "esci_query_category.csv", _intent),
    "spelling": ("homedepot_query_typos", "query_typos.csv", _spelling),
    "entities": ("queryner_esci", "queryner_esci.jsonl", _entities),
}
"""For each task: the usual subfolder of its file, the file's name, and its reader."""


def _tagged(record: Mapping[Any, Any], where: str) -> tuple[list[str], list[str]]:
    """Return the tokens of a line and the entity type of each."""
    for key in ("tokens", "labels"):
        value = record.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise DataError(f"{where}: '{key}' must be a list of texts, found {value!r}.")
    tokens, labels = record["tokens"], record["labels"]
    if len(tokens) != len(labels):
        raise DataError(f"{where}: {len(tokens)} tokens but {len(labels)} labels.")
    for label in labels:
        if not re.fullmatch(r"O|[BI]-\S+", label):
            raise DataError(f"{where}: label {label!r} is not O, B-type or I-type.")
    return tokens, [OTHER if label == "O" else _type_word(label[2:].lower()) for label in labels]


def _type_word(name: str) -> str:
    return TYPE_WORDS.get(name, name.replace("_", "-"))
