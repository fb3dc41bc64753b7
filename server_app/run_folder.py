"""The folder of a run, and how files are written so that a crash leaves them whole.

A file is replaced as a whole or gains a whole line; whoever reads it meanwhile, or after a power
failure, sees the old state or the new one. JSON here has no NaN: it would stop other readers.
"""

import json
import math
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Self

from regionfed.durable import append_line, encode_text, read_lines, write_atomic
from regionfed.errors import RunError

LATEST = "latest"
LATEST_TEXT = "latest.txt"  # where the system has no symbolic links
SHOWN = 10  # runs listed in an error


def new_run_id(now: datetime | None = None) -> str:
    """Return an id that sorts by time (UTC) and that two runs of one second do not share."""
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    return f"{moment:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where one run keeps its files; `path` is absolute."""

    path: Path

    @classmethod
    def create(cls, root: Path, run_id: str | None = None) -> Self:
        """Make ``root/<run id>`` and let ``root/latest`` name it.

        Raises
        ------
        RunError
            If that run exists: its files would be mixed with another's.
        """
        root = root.absolute()
        name = run_id or new_run_id()
        if Path(name).name != name or name in {LATEST, LATEST_TEXT} or name.startswith("."):
            raise RunError(f"'{name}' cannot name a run: expected one plain folder name")
        folder = cls(root / name)
        root.mkdir(parents=True, exist_ok=True)
        try:
            folder.path.mkdir()
        except FileExistsError as error:
            raise RunError(
                f"run '{name}' exists in {root}: resume it, or choose another run id"
            ) from error
        _point_latest(root, name)
        return folder

    @classmethod
    def open(cls, name: str | Path = LATEST, root: Path = Path("runs")) -> Self:
        """Find a run by its path, by its id under `root`, or as ``"latest"``.

        Raises
        ------
        RunError
            If there is none; the message lists the newest that exist.
        """
        wanted = str(name).strip()
        for candidate in (root / wanted, Path(wanted)) if wanted else ():
            path = _follow_latest(candidate)
            if path.is_dir():
                return cls(path.resolve())
        found = list_runs(root)
        listing = f"newest first: {', '.join(found[:SHOWN])}" if found else "there are none"
        raise RunError(
            f"no run '{wanted}': expected a run folder, an id or '{LATEST}'. "
            f"Runs in {root.absolute()}, {listing}."
        )

    @property
    def metrics(self) -> Path:
        """One line per round."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The result of the run."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The page for people."""
        return self.path / "report.html"


def list_runs(root: Path) -> list[str]:
    """Return the ids of the runs under `root`, newest first."""
    if not root.is_dir():
        return []
    folders = (path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted((path.name for path in folders if path.name != LATEST), reverse=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a file at once; after a crash it holds the old text or the new, never a part."""
    write_atomic(path, encode_text(text))


def write_json_atomic(path: Path, obj: object) -> None:
    """Replace a file at once by `obj` as JSON."""
    write_text_atomic(path, json.dumps(plain(obj), ensure_ascii=False, indent=2) + "\n")


def append_jsonl(path: Path, row: object) -> None:
    """Add one line of JSON and return when it is on the disk.

    A last line that a crash cut short is dropped first: it never was a row.
    """
    append_line(path, json.dumps(plain(row), ensure_ascii=False))


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``: one row per round, in order.

    A round that a resumed run did again counts as it was the last time; a last line that a
    crash cut short is passed over; a missing file has no rows.
    """
    rows = {row["round"]: row for row in map(json.loads, read_lines(path))}
    return [rows[number] for number in sorted(rows)]


def plain(obj: object) -> Any:  # noqa: PLR0911 (one line per kind of value reads best)
    """Turn records, paths, and scalars and arrays of any library into what JSON can hold.

    NaN and infinities become null, sets become sorted lists, and the trailing underscore of a
    dataclass field is dropped.

    Raises
    ------
    TypeError
        For anything else: better than a report that quotes an object's address.
    """
    if isinstance(obj, Enum):
        return plain(obj.value)
    if obj is None or isinstance(obj, str | bool):
        return obj
    if isinstance(obj, int):
        return int(obj)
    if isinstance(obj, float):
        return float(obj) if math.isfinite(obj) else None
    if isinstance(obj, Path):
        return str(obj)
    if is_dataclass(obj) and not isinstance(obj, type):
        return {f.name.rstrip("_"): plain(getattr(obj, f.name)) for f in fields(obj)}
    if isinstance(obj, Mapping):
        return {str(plain(key)): plain(value) for key, value in obj.items()}
    if isinstance(obj, set | frozenset):
        return sorted(plain(item) for item in obj)
    if isinstance(obj, list | tuple):
        return [plain(item) for item in obj]
    if callable(tolist := getattr(obj, "tolist", None)):  # numpy and torch, arrays and scalars
        return plain(tolist())
    raise TypeError(f"cannot write a {type(obj).__name__} as JSON: convert it to numbers or text")


def _point_latest(root: Path, name: str) -> None:
    """Let ``latest`` name a run, by a symbolic link or, where there are none, by a text file."""
    temporary = root / f".{LATEST}.{secrets.token_hex(4)}"
    try:
        temporary.symlink_to(name, target_is_directory=True)
        temporary.replace(root / LATEST)
    except (OSError, NotImplementedError):
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        write_text_atomic(root / LATEST_TEXT, name + "\n")
    else:
        # The text file is believed first, because it is there only when the link failed last.
        (root / LATEST_TEXT).unlink(missing_ok=True)


def _follow_latest(path: Path) -> Path:
    text = path.with_name(LATEST_TEXT) if path.name == LATEST else None
    if text is not None and text.is_file():
        return path.with_name(text.read_text(encoding="utf-8").strip())
    return path
