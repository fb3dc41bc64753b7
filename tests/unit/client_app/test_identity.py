"""Who a node is: one resolver for simulation and for real SuperNodes."""

from typing import Any

import pytest

from client_app.identity import Identity, identity_of
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
