"""The deployed uplink: what it must be told, and what it must not import."""

import subprocess
import sys
from typing import Any

import pytest

from region_app.app import app, bridge_of, limit_of
from regionfed.contract import RegionQuery, encode
from regionfed.errors import ConfigurationError
from server_app.in_process_grid import InProcessGrid, Node
from tests.conftest import RUN_ID, context_of, tiny_config


def test_it_imports_no_pytorch() -> None:
    """Flower starts a process per message: importing PyTorch would cost each seconds."""
    program = "import sys, region_app.app; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "node_config",
    [{}, {"bridge": "127.0.0.1:1"}, {"bridge-token": "x"}, {"bridge": 1, "bridge-token": "x"}],
)
def test_f1_a_node_that_does_not_know_its_bridge_is_told_the_flag(node_config: Any) -> None:
    """F1: an error names the flag."""
    with pytest.raises(ConfigurationError, match="--node-config 'bridge="):
        bridge_of(context_of(1, node_config))


@pytest.mark.parametrize("limit", [0, -1, 1.5, "1", True])
def test_a_limit_is_a_whole_number(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit-mib"):
        limit_of(context_of(1, {"limit-mib": limit}))
    assert limit_of(context_of(1, {"limit-mib": 3})) == 3 << 20


def test_what_goes_wrong_is_an_error_reply() -> None:
    """It costs the region's answer, never the node."""
    from flwr.app import Message

    grid = InProcessGrid({1: Node(app, context_of(1, {}, tiny_config()))}, RUN_ID)
    message = Message(encode(RegionQuery()), dst_node_id=1, message_type="query")
    (reply,) = grid.send_and_receive([message])
    assert reply.has_error() and "--node-config" in reply.error.reason
