"""``regionfed predict``: answers queries with a region's model, or a user's own."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

import torch

from client_app.datasets.dataset import Example
from client_app.task import Answers
from client_app.user import load_user
from regionfed.errors import ConfigurationError, DataError, RunError
from regionfed.registry import nearest
from server_app.cli.command import Command
from server_app.cli.options import add_model_options, chosen_model
from server_app.result import GLOBAL, RegionModel, RunResult
from server_app.wording import shorten, width

BATCH = 256
QUERY = "query"
_WIDEST = 48


def configure(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("query", nargs="*", help="queries; none = a line each from standard input")
    add_model_options(parser)
    parser.add_argument("--file", type=Path, help="a file with a query on each line")
    parser.add_argument(
        "--user", type=Path, metavar="FOLDER", help="a user's own model, from `regionfed adapt`"
    )
    parser.add_argument(
        "--task", action="append", help="answer this task only; may be given several times"
    )
    parser.add_argument("--json", action="store_true", help="an object a line, not a table")


def run(options: Namespace) -> int:
    """Answer the queries."""
    queries = read_queries(options.query, options.file, sys.stdin)
    result, model = chosen_model(options)
    rows = predict(result, model, queries, user=options.user, only=options.task)
    sys.stdout.write("".join(f"{line}\n" for line in written(rows, as_json=options.json)))
    return 0


def read_queries(given: Sequence[str], file: Path | None, stream: TextIO) -> list[str]:
    """Return the queries that were typed, or stand in the file, or come by the stream.

    Raises
    ------
    DataError
        If there are none, or the file cannot be read.
    """
    lines = list(given)
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {file}: {error}. Give a text file in UTF-8.") from error
    if not lines and not stream.isatty():
        lines = stream.read().splitlines()
    queries = [line.strip() for line in lines if line.strip()]
    if not queries:
        raise DataError('no query: type one ("red trainrs size 9"), give --file, or pipe some in.')
    return queries


def predict(
    result: RunResult,
    model: RegionModel,
    queries: Sequence[str],
    *,
    user: Path | None = None,
    only: Sequence[str] | None = None,
) -> list[dict[str, str]]:
    """Return each query with the model's answer to every task.

    Raises
    ------
    ConfigurationError
        If the run's task cannot answer, or does not know a task in `only`.
    RunError
        If the user's model belongs to another one.
    """
    task, layout = result.load_task()
    if not isinstance(task, Answers):
        raise ConfigurationError(
            f"task '{result.config.task}' cannot answer queries: give it the method of "
            f"client_app.task.Answers."
        )
    known = result.tasks
    for name in only or ():
        if name not in known:
            raise ConfigurationError(
                f"no task '{name}'{nearest(name, list(known))} The model knows {', '.join(known)}."
            )
    weights = layout.tensors(model.point if user is None else user_point(model, user))
    rows = [{QUERY: query} for query in queries]
    for name in only or known:
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            asked = [Example(name, row[QUERY], "", "") for row in part]
            for row, answer in zip(part, task.answers(weights, asked), strict=True):
                row[name] = answer
    return rows


def user_point(model: RegionModel, folder: Path) -> torch.Tensor:
    """Return theta_u, (p,), for a user's model in a folder.

    Raises
    ------
    RunError
        If it was made in another region, or on another model of it.
    """
    user = load_user(folder)
    if user.region != model.name:
        chosen = "no region was chosen" if model.name == GLOBAL else f"found --region {model.name}"
        raise RunError(
            f"the user's model in {folder} is of region {user.region}; {chosen}. "
            f"Say --region {user.region}."
        )
    return user.on(model.point)


def written(rows: Sequence[Mapping[str, str]], *, as_json: bool) -> list[str]:
    """Return the lines of a table, or a JSON object for each row."""
    if as_json:
        return [json.dumps(dict(row), ensure_ascii=False) for row in rows]
    table = [list(rows[0])] + [[_shown(key, row) for key in row] for row in rows]
    widths = [min(max(map(width, column)), _WIDEST) for column in zip(*table, strict=True)]
    return [
        "  ".join(_fit(value, cells) for value, cells in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]


def _shown(key: str, row: Mapping[str, str]) -> str:
    """Return an answer as a person reads it: entity types beside the words that they are of."""
    words, kinds = row[QUERY].split(), row[key].split()
    if key != "entities" or len(words) != len(kinds):
        return row[key]
    pairs = zip(words, kinds, strict=True)
    return " ".join(f"{word}={kind}" for word, kind in pairs if kind != "other") or "none"


def _fit(value: str, cells: int) -> str:
    short = shorten(value, cells)
    return short + " " * (cells - width(short))


COMMAND = Command(
    "Answer queries with the model of a region: intent, spelling and entities.\n\n"
    '  regionfed predict --run runs/latest --region UK "red trainrs size 9"\n'
    "  cat queries.txt | regionfed predict --region UK --json",
    configure,
    run,
)
