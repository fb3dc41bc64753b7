"""A Grid that looks for replies often, and for a reason to stop as often.

Flower's own sleeps three seconds between looks: a round of small messages is mostly sleep, and a
process whose main thread sleeps that long outlives its dead SuperLink by minutes. This one uses
nothing but the public `push_messages` and `pull_messages` of the Grid below.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from regionfed.errors import RunStoppedError

POLL = 0.2  # seconds
# Bytes of replies that one pull may bring, if a reply is as long as what was asked; one at least.
AT_ONCE = 512 * 2**20


class PollingGrid(Grid):
    """Hands everything to another Grid, except waiting.

    Parameters
    ----------
    grid : Grid
    stopping : callable
        Asked while waiting; returns why to stop, or "".
    poll : float
        Seconds between looks.
    """

    def __init__(
        self, grid: Grid, stopping: Callable[[], str] = lambda: "", poll: float = POLL
    ) -> None:
        self._grid = grid
        self._stopping = stopping
        self._poll = poll

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are there."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages and yield the replies that come within `timeout` seconds.

        Raises
        ------
        RunStoppedError
            As soon as the run should stop.
        """
        # None stands for a message that could not be sent: its node counts as silent.
        sent = list(messages)
        some = max(1, AT_ONCE // max([1, *map(size_of, sent)]))
        pushed = self._grid.push_messages(sent)
        waiting = dict.fromkeys(i for i in pushed if i is not None)  # in the order of the messages
        deadline = None if timeout is None else time.monotonic() + timeout
        while waiting:
            asked = list(waiting)
            for start in range(0, len(asked), some):
                for reply in self._grid.pull_messages(asked[start : start + some]):
                    waiting.pop(reply.metadata.reply_to_message_id, None)
                    yield reply
                stop_if(self._stopping)  # one look may be many long pulls
            if not waiting or (deadline is not None and time.monotonic() >= deadline):
                return
            pause(self._stopping, self._poll)


def size_of(message: Message) -> int:
    """Return the bytes of a message's arrays."""
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def pause(stopping: Callable[[], str], seconds: float = POLL) -> None:
    """Sleep less than a second, unless the run should stop.

    Raises
    ------
    RunStoppedError
    """
    stop_if(stopping)
    time.sleep(seconds)


def stop_if(stopping: Callable[[], str]) -> None:
    """Raise if the run should stop.

    Raises
    ------
    RunStoppedError
        Saying why.
    """
    if why := stopping():
        raise RunStoppedError(why)
