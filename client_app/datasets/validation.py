"""Validation examples: settings are chosen on them, so that test examples stay unseen."""

from collections.abc import Mapping
from dataclasses import dataclass

from client_app.datasets.dataset import (
    ClientData,
    Example,
    FederatedDataset,
    LabelledDataset,
    labels_of,
)
from client_app.datasets.partition import split_by_group
from client_app.datasets.spaces import Space, StatesSpaces

SHARE = 0.1
"""Share of the kinds of query that are kept out of training; like test, about a tenth."""

# Fixed: which kinds are kept out must not be one more thing to choose. No run has a seed below 0,
# so that no dataset splits off its test examples by the same hash.
_SPLIT_SEED = -1


def is_validation(group: str) -> bool:
    """Say whether a group is kept for validation, the same for every device and dataset."""
    return split_by_group([group], SHARE, _SPLIT_SEED)[1].size > 0


@dataclass(frozen=True)
class ValidationDataset:
    """A dataset whose devices learn from a part of their training examples, judged on the rest.

    A group of examples lies on one side for all devices. No test example is in it.
    """

    dataset: FederatedDataset

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions."""
        return self.dataset.regions

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return self.dataset.tasks

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the dataset, if it states any."""
        return labels_of(self.dataset)

    @property
    def spaces(self) -> Mapping[str, Space]:
        """Answers of each task, if the dataset states any."""
        return self.dataset.spaces if isinstance(self.dataset, StatesSpaces) else {}

    def label(self, example: Example) -> str | None:
        """Return the label of an example."""
        return self.dataset.label(example) if isinstance(self.dataset, LabelledDataset) else None

    def clients(self, region: str) -> int:
        """Return the number of devices of a region."""
        return self.dataset.clients(region)

    def client(self, region: str, index: int) -> ClientData:
        """Return the examples of one device."""
        examples = self.dataset.client(region, index).train
        kept, held_out = split_by_group([e.group for e in examples], SHARE, _SPLIT_SEED)
        return ClientData(
            train=tuple(examples[i] for i in kept), test=tuple(examples[i] for i in held_out)
        )
