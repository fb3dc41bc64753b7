"""The dataset that a configuration names."""

import os
from functools import lru_cache
from pathlib import Path

from client_app.datasets.dataset import DATASETS, DataConfig, FederatedDataset
from client_app.datasets.validation import ValidationDataset
from regionfed.config import Config

FOLDER = "REGIONFED_DATA"
"""Environment variable: the folder of the files where `data-path` is empty."""


@lru_cache(maxsize=1)
def dataset_of(config: Config) -> FederatedDataset:
    """Load the dataset that a configuration names; the last one is kept."""
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
    return ValidationDataset(dataset) if config.held_out == "validation" else dataset
