"""A dataset whose devices hold no example, or one: ``client_app.datasets.few:0:retail``.

For checks of how a device behaves that has next to nothing (`client_app.conformance`). The number
of examples and the dataset's own name stand behind the module's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from client_app.datasets.dataset import (
    DATASETS,
    ClientData,
    DataConfig,
    Example,
    FederatedDataset,
    LabelledDataset,
    Loader,
    labels_of,
)
from client_app.datasets.spaces import Space, StatesSpaces


@dataclass(frozen=True)
class Few:
    """A dataset, less most of its examples; all else is the dataset's own."""

    inner: FederatedDataset
    count: int

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions."""
        return self.inner.regions

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return self.inner.tasks

    @property
    def spaces(self) -> Mapping[str, Space]:
        """Answers of each task, if the dataset states any."""
        return self.inner.spaces if isinstance(self.inner, StatesSpaces) else {}

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the dataset, if it states any."""
        return labels_of(self.inner)

    def label(self, example: Example) -> str | None:
        """Return the label of an example."""
        return self.inner.label(example) if isinstance(self.inner, LabelledDataset) else None

    def clients(self, region: str) -> int:
        """Return the number of devices of a region."""
        return self.inner.clients(region)

    def client(self, region: str, index: int) -> ClientData:
        """Return the first examples of a device; a device without any has none held out either."""
        data = self.inner.client(region, index)
        return ClientData(data.train[: self.count], data.test[: self.count])


def __getattr__(name: str) -> Loader:
    count, colon, inner = name.partition(":")
    if not colon or not count.isdigit():
        raise AttributeError(name)

    def load(config: DataConfig) -> FederatedDataset:
        return Few(DATASETS.load(inner)(config), int(count))

    return load


def few(count: int, dataset: str) -> str:
    """Return the name of a dataset with at most `count` examples a device."""
    return f"{__name__}:{count}:{dataset}"
