"""The results of a benchmark: a row for each run, kept as soon as it is there, never made twice."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from regionfed.durable import write_atomic

Row = dict[str, Any]


def fill(path: Path, keys: Iterable[Row], measure: Callable[[Row], Row]) -> list[Row]:
    """Return all rows of a file, after the runs that it lacks.

    Parameters
    ----------
    path : Path
        JSON; written anew after each run, so that an interruption costs one.
    keys : iterable of dict
        What tells one run from the others: a row has it, and what was measured.
    measure : callable
        Makes the run of a key.
    """
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    for key in keys:
        if any(key.items() <= row.items() for row in rows):
            continue
        print("--- " + ", ".join(f"{name} {value}" for name, value in key.items()), flush=True)
        rows.append({**key, **measure(key)})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(rows, indent=1) + "\n").encode())
    return rows
