"""A user's own examples from a local file; nothing here ever leaves the device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client_app.datasets.dataset import ClientData, Example, query_group
from client_app.datasets.partition import split_by_group
from client_app.datasets.table import csv_rows, json_rows
from regionfed.errors import DataError
from regionfed.registry import nearest

COLUMNS = ("task", "source", "target")
LEAST_TRAIN = 2  # conflict is measured by two halves
_TRIES = 1000


def read_examples(path: Path, tasks: Sequence[str]) -> list[Example]:
    """Read examples with the columns task, source and target.

    Parameters
    ----------
    path : Path
        ``.csv`` with a header, or else one JSON object a line; UTF-8.
    tasks : sequence of str
        The tasks that the model knows.

    Raises
    ------
    DataError
        If the file cannot be read; names the line, what was expected and what was found.
    """
    reader = csv_rows if path.suffix.lower() == ".csv" else json_rows
    examples = [_example(f"{path}, line {number}", row, tasks) for number, row in reader(path)]
    if not examples:
        raise DataError(f"{path} holds no example: expected a line per example.")
    return examples


def keep_apart(examples: Sequence[Example], share: float) -> ClientData:
    """Keep a share of the examples out of training, to judge by; a query is on one side only.

    Which ones depends on the queries alone: there is nothing to choose, and the same file is
    always split alike.

    Raises
    ------
    DataError
        If there are too few different queries for both sides.
    """
    groups = [example.group for example in examples]
    for seed in range(_TRIES):  # a small file may have all its queries on one side
        train, kept = split_by_group(groups, share, seed)
        if len(train) >= LEAST_TRAIN and len(kept):
            return ClientData(
                train=tuple(examples[i] for i in train), test=tuple(examples[i] for i in kept)
            )
    raise DataError(
        f"{len(examples)} examples of {len(set(groups))} different queries are too few: a part is "
        f"kept to judge by, and {LEAST_TRAIN} at least have to be left to learn from. Add some."
    )


def _example(where: str, row: Mapping[Any, Any], tasks: Sequence[str]) -> Example:
    values = []
    for column in COLUMNS:
        value = row.get(column)
        if not isinstance(value, str) or not value.strip():
            found = ", ".join(map(str, row)) or "nothing"
            raise DataError(
                f"{where}: '{column}' must be a text that is not empty, found {value!r} "
                f"(columns: {found}; expected {', '.join(COLUMNS)})."
            )
        values.append(value.strip())
    task, source, target = values
    if task not in tasks:
        raise DataError(
            f"{where}: unknown task '{task}'{nearest(task, list(tasks))} "
            f"The model knows {', '.join(tasks)}."
        )
    return Example(task, source, target, query_group(task, source, target))
