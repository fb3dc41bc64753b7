"""The embedded dataset: a generated retail query corpus of eight regions."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from client_app.datasets.dataset import ClientData, DataConfig, Example
from client_app.datasets.retail.generator import (
    REGIONAL_SHARE,
    TASKS,
    Ceiling,
    client_examples,
    client_queries,
    public_examples,
)
from client_app.datasets.retail.generator import region_blind_ceiling as _blind_ceiling
from client_app.datasets.retail.lexicon import INTENTS, REGIONS, TYPES
from client_app.datasets.spaces import Space
from regionfed.errors import DataError
from regionfed.registry import nearest

__all__ = [
    "REGIONAL_SHARE",
    "Ceiling",
    "RetailDataset",
    "load",
    "public_examples",
    "region_blind_ceiling",
]


@dataclass(frozen=True)
class RetailDataset:
    """The corpus in the shape that is configured; a device is generated when it is read."""

    config: DataConfig

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions."""
        return REGIONS[: self.config.regions]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return TASKS

    @property
    def labels(self) -> tuple[str, ...]:
        """The departments that an intent query may belong to."""
        return INTENTS

    @property
    def spaces(self) -> Mapping[str, Space]:
        """The answers of each task."""
        return {
            "intent": Space("class", INTENTS),
            "spelling": Space("text"),
            "entities": Space("tags", ("other", *TYPES)),
        }

    def label(self, example: Example) -> str | None:
        """Return the department of an intent query."""
        return example.target if example.task == "intent" else None

    def clients(self, region: str) -> int:
        """Return the number of devices of a region."""
        self._check(region)
        return self.config.clients_per_region

    def client(self, region: str, index: int) -> ClientData:
        """Return the examples of one device.

        Raises
        ------
        DataError
            If there is no such region or device.
        """
        if not 0 <= index < self.clients(region):
            raise DataError(
                f"region {region} has no device {index}: data.clients_per_region is "
                f"{self.config.clients_per_region}, so devices go from 0 to "
                f"{self.config.clients_per_region - 1}."
            )
        return _client(self.config, region, index)

    def _check(self, region: str) -> None:
        if region not in self.regions:
            raise DataError(
                f"the retail dataset has no region '{region}'{nearest(region, list(self.regions))} "
                f"Known: {', '.join(self.regions)} (data.regions = {self.config.regions})."
            )


def load(config: DataConfig) -> RetailDataset:
    """Make the retail dataset.

    Raises
    ------
    DataError
        If the configuration asks for what the corpus does not have.
    """
    if not 1 <= config.regions <= len(REGIONS):
        raise DataError(
            f"the retail dataset has {len(REGIONS)} regions ({', '.join(REGIONS)}), so "
            f"data.regions must be from 1 to {len(REGIONS)}; found {config.regions}."
        )
    for name in ("clients_per_region", "examples_per_client", "dirichlet"):
        if getattr(config, name) <= 0:
            raise DataError(f"data.{name} must be above 0; found {getattr(config, name)}.")
    return RetailDataset(config)


def held_out(examples_per_client: int) -> int:
    """Return the number of test examples of a device: a tenth of the others, a dozen at least."""
    return max(12, examples_per_client // 10)


def region_blind_ceiling(dataset: RetailDataset) -> dict[str, Ceiling]:
    """Return, by task, the best accuracy on the test examples without being told the region.

    What personalisation can win is bounded by the distance from here to one.

    Examples
    --------
    >>> ceiling = region_blind_ceiling(load(DataConfig(clients_per_region=2)))
    >>> ceiling["intent"].regional < 0.5
    True
    """
    config = dataset.config
    size = held_out(config.examples_per_client)
    return _blind_ceiling(
        {
            region: [
                query
                for client in range(config.clients_per_region)
                for query in client_queries(
                    config.seed, region, client, config.dirichlet, size, test=True
                )
            ]
            for region in dataset.regions
        }
    )


@lru_cache(maxsize=256)
def _client(config: DataConfig, region: str, index: int) -> ClientData:
    """Generate one device; a process keeps its devices (0.3 MB each), each message asks again."""
    size = config.examples_per_client
    train, test = (
        client_examples(config.seed, region, index, config.dirichlet, count, test=side)
        for count, side in ((size, False), (held_out(size), True))
    )
    return ClientData(train, test)
