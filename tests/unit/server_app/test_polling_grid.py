"""Waiting for replies: often, bounded, and stoppable."""

from collections.abc import Iterable

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from regionfed.errors import RunStoppedError
from regionfed.vector import to_arrays
from server_app.in_process_grid import InProcessGrid, Node
from server_app.polling_grid import POLL, PollingGrid
from tests.conftest import RUN_ID, context_of

app = ClientApp()


@app.train()
def echo(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


class SlowGrid(InProcessGrid):
    """Shows each reply only when it is looked for the second time, and loses some messages."""

    def __init__(self, silent: tuple[int, ...] = ()) -> None:
        super().__init__({i: Node(app, context_of(i)) for i in (1, 2, 3)}, RUN_ID)
        self.silent = silent
        self.looks = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids: list[str] = []
        for message in messages:
            sent = message.metadata.dst_node_id not in self.silent
            ids += super().push_messages([message]) if sent else [None]  # type: ignore[list-item]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.looks += 1
        return super().pull_messages(list(message_ids)[:1]) if self.looks % 2 == 0 else []


def messages() -> list[Message]:
    return [
        Message(RecordDict({"c": ConfigRecord({"n": n})}), dst_node_id=n, message_type="train")
        for n in (1, 2, 3)
    ]


def nodes(grid: PollingGrid, timeout: float | None) -> list[int]:
    replies = grid.send_and_receive(messages(), timeout=timeout)
    return sorted(reply.metadata.src_node_id for reply in replies)


def test_every_reply_comes_once() -> None:
    assert nodes(PollingGrid(SlowGrid(), poll=0.0), 30.0) == [1, 2, 3]
    assert nodes(PollingGrid(SlowGrid(), poll=0.0), None) == [1, 2, 3]


@pytest.mark.parametrize(
    ("at_once", "pulls"), [(10**6, [7]), (3 * 4096, [2, 2, 2, 1]), (1, [1] * 7)]
)
def test_long_replies_are_pulled_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch, at_once: int, pulls: list[int]
) -> None:
    """Each may be as long as the model; all come, in the order of the messages."""
    monkeypatch.setattr("server_app.polling_grid.AT_ONCE", at_once)
    asked: list[int] = []

    class Counting(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            asked.append(len(list(message_ids)))
            return super().pull_messages(message_ids)

    nodes = range(1, 8)
    grid = Counting({i: Node(app, context_of(i)) for i in nodes}, RUN_ID)
    vector = ArrayRecord(to_arrays("v", torch.ones(1024)))
    sent = [Message(RecordDict({"a": vector}), dst_node_id=n, message_type="train") for n in nodes]
    replies = PollingGrid(grid, poll=0.0).send_and_receive(sent)
    assert [reply.metadata.src_node_id for reply in replies] == list(nodes)
    assert asked == pulls


def test_a_message_that_could_not_be_sent_is_not_waited_for() -> None:
    """Flower's Grid says None for it."""
    assert nodes(PollingGrid(SlowGrid(silent=(2,)), poll=0.0), None) == [1, 3]


def test_a_deadline_ends_the_wait() -> None:
    class Never(SlowGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            return []

    assert nodes(PollingGrid(Never(), poll=0.0), 0.05) == []


def test_a_stop_ends_the_wait_at_once() -> None:
    class Never(SlowGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            return []

    with pytest.raises(RunStoppedError, match="asked to stop"):
        nodes(PollingGrid(Never(), stopping=lambda: "asked to stop"), None)


def test_no_wait_is_longer_than_a_second() -> None:
    """A process whose main thread sleeps longer outlives its dead SuperLink by minutes."""
    assert POLL < 1.0


def test_everything_else_is_the_grids_own() -> None:
    inner = SlowGrid()
    grid = PollingGrid(inner)
    assert list(grid.get_node_ids()) == [1, 2, 3]
    assert grid.run is inner.run
