"""Who a node is: one resolver for simulation and for real SuperNodes."""

from pathlib import Path
from typing import Any

import pytest

from client_app.identity import Identity, identity_of, state_folder
from regionfed.errors import ConfigurationError
from tests.conftest import context_of


def test_a_node_is_its_region_and_its_number() -> None:
    """What the node was started with."""
    context = context_of(123456789, {"region": "UK", "partition-id": 3, "num-partitions": 10})
    assert identity_of(context) == Identity("UK", 3)


@pytest.mark.parametrize(
    "node_config",
    [
        {},
        {"region": "UK"},
        {"partition-id": 0},
        {"region": 1, "partition-id": 0},
        {"region": "UK", "partition-id": "0"},
        {"region": "UK", "partition-id": 0.0},
        {"region": "UK", "partition-id": True},
    ],
)
def test_a_node_that_does_not_know_is_told_which_flag_to_use(node_config: dict[str, Any]) -> None:
    """F1: a partition-id exists by itself in Flower's simulation only."""
    with pytest.raises(ConfigurationError, match="--node-config 'region="):
        identity_of(context_of(1, node_config))


def test_the_node_id_never_decides() -> None:
    """Virtual node ids are random: two nodes of one identity are one device."""
    config = {"region": "UK", "partition-id": 1}
    assert identity_of(context_of(1, config)) == identity_of(context_of(2**62, config))


def test_a_device_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was told, or one that no other region or device has."""
    told = context_of(1, {"region": "UK", "partition-id": 1, "state-folder": str(tmp_path / "x")})
    assert state_folder(told) == tmp_path / "x"
    monkeypatch.setenv("HOME", str(tmp_path))
    devices = [("UK", 0), ("UK", 1), ("US", 0)]
    folders = {
        state_folder(context_of(1, {"region": region, "partition-id": index}))
        for region, index in devices
    }
    assert len(folders) == 3 and all(tmp_path in folder.parents for folder in folders)
