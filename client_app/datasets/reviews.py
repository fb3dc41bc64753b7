"""Product reviews and their stars: a category of products is a region.

`data-path` is a folder of Amazon Reviews 2023 (Hou et al. 2024, arXiv:2403.03952) as published: a
file for each category, ``Books.jsonl`` or ``Books.jsonl.gz``, with the columns rating, title, text,
parent_asin and user_id. All reviews of a user are on one device; those of a product are on one
side of the split.

Where the folder has none of these, two older sets stand in: the four domains of Blitzer et al.
(2007) in ``blitzer_amazon_reviews/`` and Datafiniti's reviews of Amazon devices in
``amazon_devices_datafiniti/``. They name no user, so that their reviews are shared out by a
Dirichlet draw over stars. **Blitzer's four domains have no review of 3 stars**; `missing` says
which stars a region lacks.

The target is the number of stars, ``"1"`` to ``"5"``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from client_app.datasets.dataset import DataConfig, Example
from client_app.datasets.partition import Indices
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
from client_app.datasets.table import json_rows, name_of, suffix_of
from regionfed.errors import DataError

TASK = "stars"
STARS = ("1", "2", "3", "4", "5")
STAND_INS = (
    "blitzer_amazon_reviews/reviews.jsonl.gz",
    "amazon_devices_datafiniti/reviews.jsonl.gz",
)
# A region of the stand-in that names no domain.
_DEVICES = "devices"


@dataclass(frozen=True, slots=True)
class Review:
    """An example, where it is, and its user if the file names one."""

    example: Example
    where: str
    user: str | None


def load(config: DataConfig) -> SharedDataset:
    """Read the reviews; at most `regions` categories, in order of name.

    Raises
    ------
    DataError
        If there is no file, or a line is no review; names the line.
    """
    check_shape(config)
    by_region = read(config.path)
    names = sorted(by_region)[: config.regions]
    devices = [
        devices_of(
            [review.example for review in by_region[name]],
            config,
            name,
            _parts(by_region[name], name, config),
        )
        for name in names
    ]
    return SharedDataset(tuple(names), (TASK,), tuple(devices), {TASK: Space("class", STARS)})


def missing(dataset: SharedDataset) -> dict[str, list[str]]:
    """Return, by region, the stars that none of its reviews has; for those that lack any."""
    lacking = {}
    for region in dataset.regions:
        clients = [dataset.client(region, i) for i in range(dataset.clients(region))]
        seen = {e.target for client in clients for e in (*client.train, *client.test)}
        if absent := [star for star in STARS if star not in seen]:
            lacking[region] = absent
    return lacking


def read(path: Path | None) -> dict[str, list[Review]]:
    """Return the reviews of each region."""
    if path is None:
        raise DataError("dataset 'reviews' is read from disk: set data-path to its folder.")
    published = sorted(p for p in path.glob("*.jsonl*") if suffix_of(p) == ".jsonl")
    files = published or [path / name for name in STAND_INS if (path / name).is_file()]
    if not files:
        raise DataError(
            f"data-path='{path}' has no <Category>.jsonl of Amazon Reviews 2023, nor "
            f"{' or '.join(STAND_INS)}. Correct the path."
        )
    regions: dict[str, list[Review]] = {}
    for file in files:
        name = name_of(file) if published else _DEVICES
        for region, review in _reviews(file, name):
            regions.setdefault(region, []).append(review)
    return regions


def _reviews(file: Path, name: str) -> Iterator[tuple[str, Review]]:
    """Yield each review with text, and its region."""
    for number, row in json_rows(file):
        where = f"{file}, line {number}"
        stars = row.get("rating", row.get("stars"))
        if not isinstance(stars, (int, float)) or f"{stars:g}" not in STARS:
            raise DataError(f"{where}: 'rating' must be 1 to 5, found {stars!r}.")
        title, text = (_words(where, row, key) for key in ("title", "text"))
        if not (source := f"{title} {text}".strip()):
            continue  # a star without a word tells nothing; the published sets have some
        product = row.get("parent_asin") or row.get("asin")
        user = row.get("user_id")
        # Without a product the text itself: copies of a review stay on one side.
        group = str(product) if product else source.casefold()
        example = Example(TASK, source, f"{stars:g}", group)
        yield str(row.get("domain", name)), Review(example, where, str(user) if user else None)


def _words(where: str, row: Mapping[Any, Any], key: str) -> str:
    if not isinstance(value := row.get(key), str):
        raise DataError(f"{where}: '{key}' must be a text, found {value!r}.")
    return " ".join(value.replace("<br />", " ").split())


def _parts(reviews: Sequence[Review], region: str, config: DataConfig) -> list[Indices]:
    users = [review.user for review in reviews]
    if all_named(users, "user_id", [review.where for review in reviews]):
        return by_owner(users, config.clients_per_region)
    return skewed(
        np.arange(len(reviews)),
        np.array([review.example.target for review in reviews]),
        min(config.clients_per_region, len(reviews)),
        config.dirichlet,
        purpose_rng(config.seed, TASK, region),
    )
