"""A device's log says which device speaks, in which round."""

import json
import logging
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.logged import logged
from regionfed.logs import JsonFormatter
from server_app.in_process_grid import InProcessGrid, Node
from tests.conftest import RUN_ID, context_of, tiny_config


def told_by(node_config: dict[str, Any], asked: RecordDict) -> dict[str, Any]:
    """Return what a device that logs within its app says."""
    said: list[str] = []

    def speak(message: Message, context: Context) -> Message:
        record = logging.makeLogRecord({"name": "client_app.app", "msg": "hello"})
        said.append(JsonFormatter().format(record))
        return Message(RecordDict(), reply_to=message)

    app = ClientApp(mods=[logged])
    app.query()(speak)
    node = Node(app, context_of(1, node_config, tiny_config(run_name="trial-1")))
    grid = InProcessGrid({1: node}, RUN_ID)
    (reply,) = grid.send_and_receive([Message(asked, dst_node_id=1, message_type="query")])
    assert reply.has_content()
    found: dict[str, Any] = json.loads(said[0])
    return found


def test_it_says_run_region_device_and_round() -> None:
    asked = RecordDict({"config": ConfigRecord({"round": 3})})
    said = told_by({"region": "UK", "partition-id": 4}, asked)
    assert said.items() >= {"run": "trial-1", "region": "UK", "device": "4", "round": 3}.items()


@pytest.mark.parametrize(
    "asked", [RecordDict(), RecordDict({"config": ConfigRecord({"round": "soon"})})]
)
def test_what_is_missing_is_left_out(asked: RecordDict) -> None:
    """A message or a node that does not say is for the app to refuse."""
    assert not {"region", "device", "round"} & set(told_by({}, asked))
