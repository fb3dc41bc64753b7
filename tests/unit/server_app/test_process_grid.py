"""The grid of worker processes: parallel, bounded, and no worker takes the run with it."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from regionfed.errors import RunError
from server_app.in_process_grid import Node
from server_app.process_grid import ProcessGrid

RUN_ID = 7


def part(content: RecordDict, name: str) -> Any:
    """Return a record of a message (the workers import this file, so it imports little)."""
    return content[name]


# Nothing here takes this long; it only turns a hang into a failure.
PATIENCE = 60.0


def build(node_ids: list[int]) -> dict[int, Node]:
    """Make nodes that tell who and where they are, echo, raise, or die."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        asked = str(message.content.config_records["config"]["do"])
        if asked == "raise":
            raise ValueError("out of memory")
        if asked == "die":
            os._exit(3)
        if asked == "wait":
            gate = Path(str(message.content.config_records["config"]["gate"]))
            while not gate.exists():
                time.sleep(0.05)
        told: dict[str, Any] = {"node": context.node_id, "process": os.getpid(), "did": asked}
        reply = RecordDict({"config": ConfigRecord(told)})
        if asked == "echo":
            reply["arrays"] = ArrayRecord(dict(message.content.array_records["arrays"]))
        return Message(reply, reply_to=message)

    return {
        node: Node(
            app,
            Context(run_id=RUN_ID, node_id=node, node_config={}, state=RecordDict(), run_config={}),
        )
        for node in node_ids
    }


def build_nothing(node_ids: list[int]) -> Mapping[int, Node]:
    """Fail as a worker whose data is missing does."""
    raise FileNotFoundError(f"no data for {node_ids}")


def die_at_once(node_ids: list[int]) -> Mapping[int, Node]:
    """End the worker before it could say anything."""
    os._exit(4)


def to(node: int, do: str = "tell", elements: int = 0) -> Message:
    content = RecordDict({"config": ConfigRecord({"do": do})})
    if do == "echo":
        values = np.full(elements, float(node), dtype=np.float32)
        content["arrays"] = ArrayRecord({"v": Array(values)})
    return Message(content, dst_node_id=node, message_type="train")


@pytest.fixture
def make() -> Iterator[Callable[..., ProcessGrid]]:
    """Start a grid that ends with the test."""
    grids: list[ProcessGrid] = []

    def start(nodes: list[int], workers: int) -> ProcessGrid:
        grids.append(ProcessGrid(build, nodes, workers, RUN_ID))
        grids[-1].wait_until_ready(PATIENCE)
        return grids[-1]

    yield start
    for grid in grids:
        for process, _ in grid._workers:
            process.kill()
        grid.close()


def within_patience(call: Callable[[], list[Message]]) -> list[Message] | None:
    """Return what `call` returns, or None if it hangs."""
    result: list[list[Message]] = []
    thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return result[0] if result else None


def test_nodes_are_shared_out_and_each_answers_for_itself(
    make: Callable[..., ProcessGrid],
) -> None:
    """Three nodes in two other processes; what one raises costs its answer only."""
    grid = make([1, 2, 3], 2)
    assert grid.get_node_ids() == [1, 2, 3]
    replies = grid.send_and_receive([to(1), to(2), to(3)], timeout=PATIENCE)
    by_node = {r.metadata.src_node_id: r for r in replies}
    assert sorted(by_node) == [1, 2, 3]
    assert all(part(r.content, "config")["node"] == n for n, r in by_node.items())
    processes = {n: part(r.content, "config")["process"] for n, r in by_node.items()}
    assert processes[1] == processes[3] != processes[2]
    assert os.getpid() not in processes.values()

    replies = grid.send_and_receive([to(1, "raise"), to(2)], timeout=PATIENCE)
    by_node = {r.metadata.src_node_id: r for r in replies}
    assert "out of memory" in str(by_node[1].error.reason) and not by_node[2].has_error()


def test_a_worker_that_dies_is_answered_for_and_the_others_go_on(
    make: Callable[..., ProcessGrid],
) -> None:
    """At once, not after the timeout; also in the rounds that follow."""
    grid = make([1, 2], 2)
    for do in ("die", "tell"):
        replies = within_patience(lambda do=do: grid.send_and_receive([to(1, do), to(2)]))  # type: ignore[misc]
        assert replies is not None
        by_node = {r.metadata.src_node_id: r for r in replies}
        assert by_node[1].has_error() and "died" in str(by_node[1].error.reason)
        assert not by_node[2].has_error()


def test_a_region_that_is_too_slow_is_left_out_and_its_late_reply_is_dropped(
    make: Callable[..., ProcessGrid], tmp_path: Path
) -> None:
    """F5: the deadline ends the round; the next one gets only answers to its own questions."""
    grid, gate = make([1, 2], 2), tmp_path / "gate"
    slow = to(1, "wait")
    part(slow.content, "config")["gate"] = str(gate)
    replies = grid.send_and_receive([slow, to(2)], timeout=3.0)
    assert [r.metadata.src_node_id for r in replies] == [2]
    gate.touch()
    replies = grid.send_and_receive([to(1), to(2)], timeout=PATIENCE)
    told = sorted((r.metadata.src_node_id, part(r.content, "config")["did"]) for r in replies)
    assert told == [(1, "tell"), (2, "tell")]


def test_large_messages_to_one_worker_do_not_block_each_other(
    make: Callable[..., ProcessGrid],
) -> None:
    """A worker that is writing a reply is not reading: whoever sends must read meanwhile."""
    grid = make([1, 2, 3], 1)
    elements = 1 << 20
    messages = [to(n, "echo", elements) for n in (1, 2, 3)]
    replies = within_patience(lambda: grid.send_and_receive(messages, timeout=PATIENCE))
    assert replies is not None, "deadlock: both ends are sending and neither is reading"
    for reply in replies:
        values = reply.content.array_records["arrays"]["v"].numpy()
        assert values.shape == (elements,) and values[0] == reply.metadata.src_node_id
    assert len(replies) == 3


@pytest.mark.parametrize(
    ("builder", "said"),
    [(build_nothing, r"FileNotFoundError: no data for \[1\]"), (die_at_once, "exit code 4")],
)
def test_a_worker_that_cannot_start_says_why(
    builder: Callable[[list[int]], Mapping[int, Node]], said: str
) -> None:
    """Before the first round; no other worker is left behind."""
    grid = ProcessGrid(builder, [1], 1, RUN_ID)
    with pytest.raises(RunError, match=said):
        grid.wait_until_ready(PATIENCE)
    (process, _) = grid._workers[0]
    process.join(PATIENCE)
    assert not process.is_alive()
