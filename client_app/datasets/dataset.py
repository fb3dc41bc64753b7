"""What a federated dataset is to the rest of RegionFed, and the names of those we have."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from regionfed.registry import Registry


@dataclass(frozen=True, slots=True)
class Example:
    """One example.

    Attributes
    ----------
    task : str
        Name of the task, for instance ``"intent"``; it scores the example.
    source, target : str
        Input (without a task prefix) and expected output. An image is the base64 text of its
        pixels, a byte each, row by row (`client_app.tasks.image`).
    group : str
        Queries of one kind share a group; a group is never on both sides of a split.
    """

    task: str
    source: str
    target: str
    group: str


def query_group(task: str, source: str, target: str) -> str:
    """Return the group of a query: its words, in whatever order.

    A mistyped query and its correction are one query: what was meant is the target.
    """
    meant = target if task == "spelling" else source
    return " ".join(sorted(meant.casefold().split()))


@dataclass(frozen=True)
class ClientData:
    """The examples of one device: what it learns from, and what it is judged on."""

    train: tuple[Example, ...]
    test: tuple[Example, ...]


@dataclass(frozen=True)
class DataConfig:
    """What a loader needs to know.

    Attributes
    ----------
    path : Path or None
        Folder of the files, for datasets that are read from disk.
    regions, clients_per_region, examples_per_client : int
        The shape of the federation; `examples_per_client` bounds a device's training set
        (a dataset that is read from disk shares out what it has).
    dirichlet : float
        Concentration of the labels over the devices; small is skewed.
    seed : int
        Everything that is drawn is drawn from this seed.
    columns : str
        Which column of a file holds what, for datasets of the user's own files.
    """

    path: Path | None = None
    regions: int = 8
    clients_per_region: int = 10
    examples_per_client: int = 600
    dirichlet: float = 0.3
    seed: int = 0
    columns: str = ""


class FederatedDataset(Protocol):
    """A dataset that is already shared out over regions and devices."""

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions, in a fixed order."""
        ...

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in a fixed order; the score of a model is the mean over them."""
        ...

    def clients(self, region: str) -> int:
        """Return the number of devices of a region."""
        ...

    def client(self, region: str, index: int) -> ClientData:
        """Return the examples of one device; loads no other region's examples if it can."""
        ...


@runtime_checkable
class LabelledDataset(Protocol):
    """What a dataset may state besides: public labels, by which regions can be compared."""

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, in a fixed order; public knowledge, not read from anybody's examples."""
        ...

    def label(self, example: Example) -> str | None:
        """Return the label of an example, one at most."""
        ...


def labels_of(dataset: FederatedDataset) -> tuple[str, ...]:
    """Return the labels that a dataset states; none if it states none."""
    return dataset.labels if isinstance(dataset, LabelledDataset) else ()


def histogram(dataset: FederatedDataset, examples: Iterable[Example]) -> list[float]:
    """Count examples by label, in the order of the labels; each example counts once at most."""
    if not isinstance(dataset, LabelledDataset):
        return []
    counts = dict.fromkeys(dataset.labels, 0.0)
    for example in examples:
        if (label := dataset.label(example)) in counts:
            counts[label] += 1.0
    return list(counts.values())


Loader = Callable[[DataConfig], FederatedDataset]

DATASETS: Registry[Loader] = Registry(
    "dataset",
    {
        "retail": "client_app.datasets.retail:load",
        "esci": "client_app.datasets.esci:load",
        "reviews": "client_app.datasets.reviews:load",
        "femnist": "client_app.datasets.characters:load_femnist",
        "unipen": "client_app.datasets.characters:load_unipen",
        "files": "client_app.datasets.files:load",
    },
)
