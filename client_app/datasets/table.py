"""Rows of a file, each with the number that an error names: jsonl, csv, tsv or parquet."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from regionfed.errors import DataError

Row = tuple[int, Mapping[Any, Any]]
"""A line's number, from 1 (in parquet: the row's), and its values by column."""


def read_text(path: Path) -> str:
    """Return the text of a file, packed by gzip or not, without a byte order mark.

    Raises
    ------
    DataError
        If it cannot be read, or is not UTF-8; names the line.
    """
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {said}. Give an existing file.") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8; save the file as UTF-8.") from error


def json_rows(path: Path) -> Iterator[Row]:
    """Yield one JSON object a line."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number}: not JSON ({error}). Expected one object a line."
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object, found {line.strip()!r}.")
        yield number, row


def csv_rows(path: Path, delimiter: str = ",", needed: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows of a table with a header; every row has as many fields as that.

    Parameters
    ----------
    path : Path
    delimiter : str
    needed : sequence of str
        Columns without which nothing can be read, not even a table without rows.
    """
    text = io.StringIO(read_text(path), newline="")
    reader = csv.DictReader(text, strict=True, delimiter=delimiter)
    lines = reader.reader  # DictReader's own line number stands still at faults and blank lines
    try:
        header = reader.fieldnames or []
        if missing := [name for name in needed if name not in header]:
            raise DataError(
                f"{path}, line 1: no column {', '.join(missing)}; found {', '.join(header)}."
            )
        for row in reader:
            # DictReader files surplus fields under None, and None for fields that lack.
            if None in row or None in row.values():
                raise DataError(
                    f"{path}, line {lines.line_num}: expected {len(header)} fields; is there a "
                    f"'{delimiter}' or a quote that is not quoted?"
                )
            yield lines.line_num, row
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.line_num}: not CSV ({error}).") from error


def parquet_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file; needs pyarrow."""
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            f"{path}: reading parquet needs pyarrow: pip install 'regionfed[parquet]'."
        ) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, ArrowException) as error:
        raise DataError(f"{path} is no parquet file that can be read ({error}).") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": json_rows,
    ".csv": csv_rows,
    ".tsv": lambda path: csv_rows(path, "\t"),
    ".parquet": parquet_rows,
}
"""By the file's suffix; ``.gz`` may follow it."""


def suffix_of(path: Path) -> str:
    """Return the suffix that says what a file is: that before ``.gz``."""
    return _unpacked(path).suffix.lower()


def name_of(path: Path) -> str:
    """Return a file's name without what says its kind: ``ann.smith`` of ``ann.smith.csv.gz``."""
    return _unpacked(path).stem


def _unpacked(path: Path) -> Path:
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name)


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a file.

    Raises
    ------
    DataError
        If its kind is unknown, or it cannot be read; names the line.
    """
    reader = READERS.get(suffix_of(path))
    if reader is None:
        raise DataError(f"{path}: unknown kind of file; give one of {', '.join(READERS)}.")
    return reader(path)
