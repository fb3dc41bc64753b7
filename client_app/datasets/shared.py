"""Examples that are shared out over regions and devices, and the ways to share them out."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_app.datasets.dataset import ClientData, DataConfig, Example
from client_app.datasets.partition import Indices, dirichlet_partition, split_by_group
from client_app.datasets.spaces import Space
from regionfed.errors import DataError
from regionfed.randomness import derive_seed

HELD_OUT = 0.18
"""Share of the groups that devices are judged by."""


@dataclass(frozen=True)
class SharedDataset:
    """The shared-out examples; see `client_app.datasets.dataset.FederatedDataset`."""

    regions: tuple[str, ...]
    tasks: tuple[str, ...]
    devices: tuple[tuple[ClientData, ...], ...]
    spaces: Mapping[str, Space] = field(default_factory=dict)

    def clients(self, region: str) -> int:
        """Return the number of devices of a region."""
        return len(self._of(region))

    def client(self, region: str, index: int) -> ClientData:
        """Return the examples of one device.

        Raises
        ------
        DataError
            If there is no such region or device.
        """
        devices = self._of(region)
        if not 0 <= index < len(devices):
            raise DataError(
                f"region '{region}' has no device {index}; its devices are 0 to {len(devices) - 1}."
            )
        return devices[index]

    def _of(self, region: str) -> tuple[ClientData, ...]:
        if region not in self.regions:
            raise DataError(f"unknown region '{region}'; there are {', '.join(self.regions)}.")
        return self.devices[self.regions.index(region)]


def check_shape(config: DataConfig) -> None:
    """Refuse a federation without regions, devices or examples."""
    for name in ("regions", "clients_per_region", "examples_per_client"):
        if (value := getattr(config, name)) < 1:
            raise DataError(f"{name} is {value}; use at least 1.")


def purpose_rng(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return a generator for one purpose, independent of all others and of their order."""
    return np.random.default_rng(derive_seed(seed, *purpose))


def skewed(
    rows: Indices, kinds: NDArray[Any], parts: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    """Share some rows out by a Dirichlet draw over their kinds.

    Each part gets at least half an even share, and one row if there are as many as parts.
    """
    minimum = max(rows.size // (2 * parts), min(1, rows.size // parts))
    return [rows[part] for part in dirichlet_partition(kinds[rows], parts, alpha, minimum, rng)]


def by_owner(owners: Sequence[Hashable], parts: int) -> list[Indices]:
    """Share rows out by whole owners: all rows of a person are on one device.

    The owner with most rows goes first, each to the part with fewest so far; ties are broken by
    name. There are no more parts than owners, so that none is empty.
    """
    rows: dict[Hashable, list[int]] = {}
    for index, owner in enumerate(owners):
        rows.setdefault(owner, []).append(index)
    out: list[list[int]] = [[] for _ in range(min(parts, len(rows)))]
    for owner in sorted(rows, key=lambda o: (-len(rows[o]), str(o))):
        min(out, key=len).extend(rows[owner])
    return [np.array(sorted(part), dtype=np.intp) for part in out]


def all_named(names: Sequence[Hashable | None], what: str, where: Sequence[str]) -> bool:
    """Say whether all rows name their region, or client; or none of them does.

    Parameters
    ----------
    names : sequence of Hashable or None
        What each row names.
    what : str
        What that is, as the user knows it.
    where : sequence of str
        Where each row is, for the error.

    Raises
    ------
    DataError
        If only some do: to draw the others would put a person's rows on several devices.
    """
    lacking = [line for line, name in zip(where, names, strict=True) if name is None]
    if 0 < len(lacking) < len(names):
        raise DataError(
            f"{lacking[0]}: no {what}, and other rows have one ({len(lacking)} of {len(names)} "
            f"lack it): give all of them one, or none."
        )
    return not lacking


def client_data(examples: Sequence[Example], config: DataConfig, *who: str | int) -> ClientData:
    """Split a device's examples by group, and bound what it learns from.

    A group is on one side for all devices. Which examples are left out, where there are more than
    `examples_per_client`, is drawn. A device of few groups may have nothing on one side.
    """
    train, test = split_by_group([e.group for e in examples], HELD_OUT, config.seed)
    if train.size > config.examples_per_client:
        rng = purpose_rng(config.seed, "bound", *who)
        train = np.sort(rng.permutation(train)[: config.examples_per_client])
    return ClientData(tuple(examples[i] for i in train), tuple(examples[i] for i in test))


def devices_of(
    examples: Sequence[Example], config: DataConfig, region: str, parts: Sequence[Indices]
) -> tuple[ClientData, ...]:
    """Return a region's devices, one for each part of its examples."""
    return tuple(
        client_data([examples[i] for i in part], config, region, number)
        for number, part in enumerate(parts)
    )
