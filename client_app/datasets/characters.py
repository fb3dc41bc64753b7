"""Handwritten characters: FEMNIST as LEAF and the hub publish it, and UNIPEN's ten donors.

``femnist`` reads `data-path` in any of these forms. It is a file, or a folder: what is called
``femnist*`` in that, and where there is no such thing, all that is below it.

* LEAF's json: ``users``, and ``user_data`` with ``x`` (784 numbers, 1 is paper) and ``y``;
* parquet of the hub's ``flwrlabs/femnist``: ``image`` (a PNG), ``writer_id``, ``hsf_id``,
  ``character``;
* npz with ``images`` (uint8, 28 x 28, 255 is paper), ``labels`` and ``clients``: the small sample.

A writer's images are on one device. Regions are the hub's ``hsf_id``; elsewhere, whole writers are
dealt out to `regions` regions. The small sample has the ten digits alone, and its clients are mixed
writers.

``unipen`` reads ``unipen62_28x28.npz``: characters that were drawn with a pen on a tablet, rendered
as images. Its regions are the ten institutions that donated them. It has FEMNIST's 62 classes and
size, and is not FEMNIST.
"""

import hashlib
import io
import json
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_app.datasets.dataset import DataConfig, Example
from client_app.datasets.shared import SharedDataset, by_owner, check_shape, devices_of
from client_app.datasets.spaces import Space
from client_app.datasets.table import parquet_rows
from client_app.tasks.image import SIDE, as_source
from regionfed.errors import DataError

TASK = "character"
CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
"""The 62 labels of LEAF, in its order."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Glyph:
    """An image of ink on paper, who wrote it, and where, if that is known."""

    example: Example
    writer: str
    region: str | None


def glyph(ink: Bytes, label: int, writer: str, region: str | None, where: str) -> Glyph:
    """Return a glyph of an image, 0 paper and 255 ink.

    Raises
    ------
    DataError
        If it is not of 28 x 28 bytes, or the label is not from 0 to 61.
    """
    if ink.shape != (SIDE, SIDE) or not 0 <= label < len(CLASSES):
        raise DataError(
            f"{where}: expected an image of {SIDE} x {SIDE} and a label from 0 to "
            f"{len(CLASSES) - 1}; found {ink.shape} and {label}."
        )
    # Two copies of an image are on one side of the split.
    group = hashlib.blake2b(ink.tobytes(), digest_size=8).hexdigest()
    return Glyph(Example(TASK, as_source(ink), CLASSES[label], group), writer, region)


def load_femnist(config: DataConfig) -> SharedDataset:
    """Read FEMNIST, in whatever form it lies there."""
    return _shared([g for file in _files(config.path) for g in FORMS[file.suffix](file)], config)


def load_unipen(config: DataConfig) -> SharedDataset:
    """Read UNIPEN's characters; at most `regions` donors, in order of name."""
    path = config.path
    if path is None:
        raise DataError("dataset 'unipen' is read from disk: set data-path to its folder.")
    found = path if path.is_file() else next(iter(sorted(path.rglob("unipen*.npz"))), None)
    if found is None:
        raise DataError(f"data-path='{path}': no unipen*.npz below it. Correct the path.")
    arrays = _arrays(found, "images", "labels", "writers", "regions")
    rows = zip(*(arrays[name] for name in ("images", "labels", "writers", "regions")), strict=True)
    glyphs = [
        glyph(image, int(label), str(writer), str(region), f"{found}, row {row}")
        for row, (image, label, writer, region) in enumerate(rows, 1)
    ]
    return _shared(glyphs, config)


def _shared(glyphs: list[Glyph], config: DataConfig) -> SharedDataset:
    check_shape(config)
    if None in {g.region for g in glyphs}:
        parts = by_owner([g.writer for g in glyphs], config.regions)
        regions = {f"R{n + 1}": [glyphs[i] for i in part] for n, part in enumerate(parts)}
    else:
        regions = {}
        for one in glyphs:
            regions.setdefault(str(one.region), []).append(one)
    names = sorted(regions, key=lambda name: (len(name), name))[: config.regions]
    devices = [
        devices_of(
            [g.example for g in regions[name]],
            config,
            name,
            by_owner([g.writer for g in regions[name]], config.clients_per_region),
        )
        for name in names
    ]
    # All 62, whatever this file has: a head's rows mean the same on every device.
    return SharedDataset(tuple(names), (TASK,), tuple(devices), {TASK: Space("class", CLASSES)})


# Files ------------------------------------------------------------------------------------


def _files(path: Path | None) -> list[Path]:
    if path is None:
        raise DataError("dataset 'femnist' is read from disk: set data-path to its folder.")
    if path.is_file():
        return [path]
    # A folder of many datasets has other people's json and parquet too.
    found = _below(path.glob("femnist*")) or _below([path])
    if not found:
        raise DataError(
            f"data-path='{path}': no LEAF json, hub parquet or femnist*.npz below it. Correct it."
        )
    return found


def _below(places: Iterable[Path]) -> list[Path]:
    """Return the files of the known forms among some files and below some folders."""
    return sorted(
        file
        for place in places
        for file in (place, *place.rglob("*"))
        if file.is_file()
        and file.suffix in FORMS
        and (file.suffix != ".npz" or file.name.startswith("femnist"))
    )


def _leaf(path: Path) -> Iterator[Glyph]:
    """Yield the images of a LEAF file."""
    try:
        users = json.loads(path.read_text("utf-8"))["user_data"]
        rows = [(u, x, y) for u, d in users.items() for x, y in zip(d["x"], d["y"], strict=True)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is no LEAF file ({error!r}): expected user_data with x and y of each user."
        ) from error
    for row, (user, pixels, label) in enumerate(rows, 1):
        where = f"{path}, user {user}, image {row}"
        try:
            paper = np.asarray(pixels, dtype=np.float64).reshape(SIDE, SIDE)
        except ValueError as error:
            raise DataError(f"{where}: expected {SIDE * SIDE} numbers ({error}).") from error
        ink = np.rint(255.0 * (1.0 - paper.clip(0.0, 1.0))).astype(np.uint8)
        yield glyph(ink, int(label), str(user), None, where)


def _hub(path: Path) -> Iterator[Glyph]:
    """Yield the images of a parquet file of the hub."""
    from PIL import Image  # noqa: PLC0415 - of use here alone

    for number, row in parquet_rows(path):
        where = f"{path}, row {number}"
        try:
            picture = Image.open(io.BytesIO(row["image"]["bytes"])).convert("L")
            writer, region, label = row["writer_id"], row["hsf_id"], int(row["character"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise DataError(
                f"{where}: expected image, writer_id, hsf_id and character ({error!r})."
            ) from error
        yield glyph(255 - np.asarray(picture, np.uint8), label, str(writer), f"hsf{region}", where)


def _sample(path: Path) -> Iterator[Glyph]:
    """Yield the images of the small sample."""
    arrays = _arrays(path, "images", "labels", "clients")
    rows = zip(arrays["images"], arrays["labels"], arrays["clients"], strict=True)
    for row, (image, label, client) in enumerate(rows, 1):
        yield glyph(255 - image, int(label), str(client), None, f"{path}, row {row}")


FORMS: dict[str, Callable[[Path], Iterator[Glyph]]] = {
    ".json": _leaf,
    ".parquet": _hub,
    ".npz": _sample,
}


def _arrays(path: Path, *names: str) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path}: expected the arrays {', '.join(names)} ({error}).") from error
