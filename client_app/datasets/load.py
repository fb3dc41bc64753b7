"""The dataset that a configuration names."""

import os
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PureWindowsPath

from client_app.datasets.dataset import DATASETS, DataConfig, FederatedDataset
from client_app.datasets.validation import ValidationDataset
from regionfed.config import Config
from regionfed.errors import DataError

FOLDER = "REGIONFED_DATA"
"""Environment variable: the folder of the files where `data-path` is empty."""

LONGEST_NAME = 100
"""Bytes of a region's name: it becomes part of paths, and those have an end."""


@lru_cache(maxsize=1)
def dataset_of(config: Config) -> FederatedDataset:
    """Load the dataset that a configuration names; the last one is kept.

    Raises
    ------
    DataError
        If it cannot be read, or a region could not have a folder of its name, or not one alone.
    """
    path = config.data_path or os.environ.get(FOLDER, "")
    dataset = DATASETS.load(config.dataset)(
        DataConfig(
            path=Path(path).expanduser() if path else None,
            regions=config.regions,
            clients_per_region=config.clients_per_region,
            examples_per_client=config.examples_per_client,
            dirichlet=config.dirichlet_alpha,
            seed=config.seed,
            columns=config.columns,
        )
    )
    check_regions(dataset.regions)
    return ValidationDataset(dataset) if config.held_out == "validation" else dataset


def check_regions(names: Sequence[str]) -> None:
    """Refuse names of regions that are no folders, or of which two are one folder somewhere.

    Two regions in one folder would charge one ledger and go on from one state.

    Raises
    ------
    DataError
        Naming the region, or both.
    """
    folders: dict[str, str] = {}
    for name in names:
        check_region(name)
        # Some systems fold case, or write an accent apart from its letter.
        folder = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        if folder in folders:
            raise DataError(
                f"the regions {folders[folder]!r} and {name!r} would share a folder on some "
                f"systems: rename one where the data names it, or give both the same name."
            )
        folders[folder] = name


def check_region(name: str) -> None:
    """Refuse a name of a region that is not that of one folder, here and on other systems.

    Names come from files, and a region's ledger, state and devices lie in folders of that name.

    Raises
    ------
    DataError
        Naming the region, what is wrong and what to do.
    """
    # Windows' rules have Unix's in them: both separators, drives, "" and ".".
    is_path = PureWindowsPath(name).name != name or name in {"", ".."}
    unwritable = any(unicodedata.category(char) in {"Cc", "Cs"} for char in name)
    wrong = {
        "it is a path, not a name": is_path,
        "it has a control character": unwritable,
        f"it is longer than {LONGEST_NAME} bytes": len(name.encode(errors="replace"))
        > LONGEST_NAME,
    }
    for why, holds in wrong.items():
        if holds:
            raise DataError(
                f"the region {name!r} cannot have a folder: {why}. Rename it where the data names "
                f"it: a name without '/' and '\\', of {LONGEST_NAME} bytes at most."
            )
