"""The user's own files: jsonl, csv, tsv or parquet, with a map of their columns.

`data-path` is a file, or a folder. In a folder each file is a client's, named by the file; where
the files lie in subfolders, those name the regions. `columns` says what the columns hold:

========  ===========================================================  =============================
key       what it holds                                                where there is no such column
========  ===========================================================  =============================
source    the text                                                     (needed)
target    the answer                                                   (needed)
task      the task's name                                              one task, ``answer``
region    the region                                                   the subfolder, those within
                                                                       others joined by ``-``;
                                                                       else drawn
client    the client of the region                                     the file; else drawn
group     what must not be on both sides of the split: the query, the  the words of the source
          product
========  ===========================================================  =============================

Either all rows have a region, or none has; so it is with clients. Without a region, clients are
dealt out to `regions` regions; without either, rows are, by a Dirichlet draw over their targets.
``labels.json`` beside the files states the answers of each task, for models with a head, and so
that an unknown one is found:
``{"intent": ["shoes", "tea"]}``, or in full
``{"entities": {"kind": "tags", "labels": ["other", "brand"]}, "spelling": {"kind": "text"}}``.
"""

import json
import math
import shlex
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from client_app.datasets.dataset import DataConfig, Example, query_group
from client_app.datasets.shared import (
    SharedDataset,
    all_named,
    by_owner,
    check_shape,
    devices_of,
    purpose_rng,
    skewed,
)
from client_app.datasets.spaces import Space
from client_app.datasets.table import READERS, name_of, rows_of, suffix_of
from regionfed.errors import DataError
from regionfed.registry import nearest

KEYS = ("source", "target", "task", "region", "client", "group")
NEEDED = ("source", "target")
LABELS = "labels.json"
TASK = "answer"


@dataclass(frozen=True, slots=True)
class Record:
    """A row: its example, where it is, and whose it is; None where nothing says so."""

    example: Example
    where: str
    region: str | None
    client: Hashable | None


def load(config: DataConfig) -> SharedDataset:
    """Read the files and share out what no column and no name says.

    Raises
    ------
    DataError
        Naming file, line, what was expected, what was found and what to do.
    """
    check_shape(config)
    if config.path is None:
        raise DataError("dataset 'files' is read from disk: set data-path to a file or a folder.")
    files = files_of(config.path)
    columns = column_map(config.columns)
    spaces = read_spaces(config.path)
    folders: dict[str, Path] = {}
    records = [r for file in files for r in _records(file, config.path, columns, spaces, folders)]
    if not records:
        raise DataError(f"{config.path} holds no example: expected a line for each.")
    tasks = tuple(dict.fromkeys([*spaces, *(record.example.task for record in records)]))
    return _shared(records, tasks, spaces, config)


def files_of(path: Path) -> list[Path]:
    """Return the files of a path, in a fixed order."""
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.is_file() and suffix_of(p) in READERS)
    if not found:
        raise DataError(
            f"data-path='{path}': no file of the kinds {', '.join(READERS)}. Correct the path."
        )
    return found


def column_map(text: str) -> dict[str, str]:
    """Read ``"source=query target='sub category'"``; a key that is left out names its own column.

    Raises
    ------
    DataError
        If a key is unknown, or a pair is none.
    """
    found = {key: key for key in KEYS}
    try:
        pairs = [part.partition("=") for part in shlex.split(text)]
    except ValueError as error:
        raise DataError(f'columns="{text}" cannot be read ({error}).') from error
    for key, equals, column in pairs:
        if key not in KEYS or not equals or not column:
            raise DataError(
                f"columns: '{key}{equals}{column}'{nearest(key, list(KEYS))} Write key=column, "
                f"with the keys {', '.join(KEYS)}."
            )
        found[key] = column
    return found


def read_spaces(path: Path) -> dict[str, Space]:
    """Return what ``labels.json`` beside the files says; nothing if there is none."""
    file = (path if path.is_dir() else path.parent) / LABELS
    if not file.is_file():
        return {}
    try:
        stated = json.loads(file.read_text("utf-8-sig"))
        return {
            str(task): Space("class", tuple(map(str, space)))
            if isinstance(space, list)
            else Space(space["kind"], tuple(map(str, space.get("labels", ()))))
            for task, space in stated.items()
        }
    except DataError as error:
        raise DataError(f"{file}: {error}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f'{file} cannot be read ({error!r}). Expected {{"task": ["label", ...]}}, or '
            f'{{"task": {{"kind": "tags", "labels": [...]}}}}.'
        ) from error


def _records(
    file: Path,
    root: Path,
    columns: Mapping[str, str],
    spaces: Mapping[str, Space],
    folders: dict[str, Path],
) -> list[Record]:
    """Return the records of a file; `folders` are those that gave a region its name so far."""
    # Joined so that a name is one folder, wherever it becomes one.
    below = "-".join(file.relative_to(root).parts[:-1]) if root.is_dir() else ""
    of_file = name_of(file) if root.is_dir() else None
    out = []
    for number, row in rows_of(file):
        where = f"{file}, line {number}"
        for key in NEEDED:
            if columns[key] not in row:
                there = ", ".join(map(str, row)) or "none"
                raise DataError(
                    f"{where}: no column '{columns[key]}' for the {key}"
                    f"{nearest(columns[key], [str(c) for c in row])} There are {there}; say which "
                    f'by columns="{key}=...".'
                )
        source, target = (_text(where, columns[key], row[columns[key]]) for key in NEEDED)
        task, region, client, group = (
            _text(where, columns[key], row[columns[key]]) if columns[key] in row else None
            for key in ("task", "region", "client", "group")
        )
        task = task or TASK
        if spaces:
            if task not in spaces:
                raise DataError(
                    f"{where}: unknown task '{task}'{nearest(task, list(spaces))} "
                    f"{LABELS} has {', '.join(spaces)}."
                )
            if wrong := spaces[task].check(source, target):
                raise DataError(f"{where}: task '{task}': {wrong}.")
        example = Example(task, source, target, group or query_group(task, source, target))
        if not region and (other := folders.setdefault(below, file.parent)) != file.parent:
            raise DataError(
                f"{other} and {file.parent} would both be the region '{below}': rename one, or "
                f"name the regions in a column."
            )
        out.append(Record(example, where, region or below or None, client or of_file))
    return out


def _text(where: str, column: str, value: Any) -> str:
    """Return a value as text; numbers are what labels often are."""
    if isinstance(value, (bool, int)):
        value = str(value)
    elif isinstance(value, float) and math.isfinite(value):
        # In full: two numbers that are not equal must not become one client.
        value = str(int(value)) if value.is_integer() else repr(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: '{column}' must be a text or a number and not empty, found {value!r}: "
            f"fill it in, or leave the line out."
        )
    return value.strip()


def _shared(
    records: Sequence[Record],
    tasks: tuple[str, ...],
    spaces: Mapping[str, Space],
    config: DataConfig,
) -> SharedDataset:
    regions = _regions(records, config)
    named = _named(records, "client")
    devices = []
    for region, rows in regions.items():
        mine = [records[i] for i in rows]
        examples = [record.example for record in mine]
        clients = [record.client for record in mine]
        if named:
            names: dict[Hashable, list[int]] = {}
            for index, client in enumerate(clients):
                names.setdefault(client, []).append(index)
            parts = [np.array(names[name], dtype=np.intp) for name in sorted(names, key=str)]
        else:
            parts = skewed(
                np.arange(len(examples)),
                np.array([f"{e.task} {e.target}" for e in examples]),
                min(config.clients_per_region, len(examples)),
                config.dirichlet,
                purpose_rng(config.seed, "files", "clients", region),
            )
        devices.append(devices_of(examples, config, region, parts))
    return SharedDataset(tuple(regions), tasks, tuple(devices), dict(spaces))


def _regions(records: Sequence[Record], config: DataConfig) -> dict[str, Sequence[int]]:
    """Return the row numbers of each region, by name."""
    if _named(records, "region"):
        named: dict[str, list[int]] = {}
        for index, record in enumerate(records):
            named.setdefault(str(record.region), []).append(index)
        return {name: named[name] for name in sorted(named)}
    if _named(records, "client"):
        parts = by_owner([record.client for record in records], config.regions)
    else:
        parts = skewed(
            np.arange(len(records)),
            np.array([f"{r.example.task} {r.example.target}" for r in records]),
            min(config.regions, len(records)),
            config.dirichlet,
            purpose_rng(config.seed, "files", "regions"),
        )
    return {f"R{n + 1}": part.tolist() for n, part in enumerate(parts)}


def _named(records: Sequence[Record], what: str) -> bool:
    return all_named([getattr(r, what) for r in records], what, [r.where for r in records])
