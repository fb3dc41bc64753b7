"""A Grid whose nodes live in worker processes: one per core, each with its share of the nodes.

Python runs one thread at a time, so two regions use two cores only as two processes. A worker
builds its nodes itself; nothing but messages crosses, as between real regions.
"""

import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from flwr.app import Error, Message

from regionfed.errors import RunError, RunStoppedError
from regionfed.flower import delivered
from server_app.in_process_grid import InProcessGrid, Node
from server_app.local_grid import LocalGrid

# Flower's code for a node that is not there.
_UNAVAILABLE = 3
# Seconds between looks at whether the run should stop.
_POLL = 0.5

# Builds the nodes of these ids; sent to the workers, so a top-level function or a partial of one.
Build = Callable[[list[int]], Mapping[int, Node]]


class ProcessGrid(LocalGrid):
    """Delivers messages to nodes in worker processes, in parallel.

    Parameters
    ----------
    build : callable
        Makes the nodes of some ids, in the worker.
    node_ids : list of int
    workers : int
    run_id : int
    stopping : callable
        Asked while waiting; returns why to stop waiting, or "".
    """

    def __init__(
        self,
        build: Build,
        node_ids: list[int],
        workers: int,
        run_id: int,
        *,
        stopping: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(run_id)
        self._node_ids = node_ids
        self._stopping = stopping
        self._owner: dict[int, Connection] = {}
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._busy: set[Connection] = set()
        self._dead: set[Connection] = set()
        # spawn: a fork would copy locks that other threads of this process hold.
        context = multiprocessing.get_context("spawn")
        for i in range(workers):
            ours, theirs = context.Pipe()
            share = node_ids[i::workers]
            process = context.Process(
                target=_serve, args=(theirs, build, share, run_id), daemon=True
            )
            with _no_main_file():
                process.start()
            theirs.close()  # so that a dead worker is seen as the end of its pipe
            self._workers.append((process, ours))
            self._owner.update(dict.fromkeys(share, ours))

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until every worker has built its nodes.

        Raises
        ------
        RunError
            With what a worker said when it failed.
        """
        deadline = time.monotonic() + timeout
        for process, connection in self._workers:
            try:
                ready = self._wait([connection], deadline)
                failure = connection.recv() if ready else f"not ready after {timeout:g} s"
            except (EOFError, OSError):
                process.join(1.0)
                failure = f"it died with exit code {process.exitcode}"
            if failure is not None:
                self.close()
                raise RunError(f"a simulation worker did not start: {failure}")

    def close(self) -> None:
        """End the workers; they also end by themselves when this process does."""
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(2.0)
            if process.is_alive():
                process.kill()

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(self._node_ids)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Not offered: a worker answers as it goes."""
        raise RunError("ProcessGrid answers by send_and_receive only")

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Not offered: a worker answers as it goes."""
        raise RunError("ProcessGrid answers by send_and_receive only")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send all messages and return the replies that come within `timeout` seconds.

        The nodes of a worker that died are answered for with an error at once.
        """
        waiting: dict[Connection, deque[Message]] = {c: deque() for _, c in self._workers}
        unanswered: dict[str, Message] = {}
        for message in messages:
            sent = delivered(message)
            unanswered[sent.metadata.message_id] = sent
            waiting[self._owner[sent.metadata.dst_node_id]].append(sent)
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while unanswered:
            self._send_next(waiting)
            ready = self._wait(list(self._busy), deadline) if self._busy else []
            if not ready:
                break
            for connection in ready:
                reply = self._receive(connection)
                # A late reply to an earlier round is not in the table, and is dropped.
                if reply and unanswered.pop(reply.metadata.reply_to_message_id, None):
                    replies.append(reply)
        for message in unanswered.values():
            if self._owner[message.metadata.dst_node_id] in self._dead:
                error = Error(_UNAVAILABLE, "its worker process died")
                replies.append(Message(error, reply_to=message))
        return replies

    def _wait(self, connections: list[Connection], deadline: float | None) -> list[Connection]:
        """Return the connections that have something, none at the deadline.

        Raises
        ------
        RunStoppedError
            As soon as the run should stop: a round may be long.
        """
        while deadline is None or time.monotonic() < deadline:
            if why := self._stopping():
                raise RunStoppedError(why)
            left = _POLL if deadline is None else min(_POLL, deadline - time.monotonic())
            if ready := wait(connections, max(left, 0.0)):
                return [c for c in ready if isinstance(c, Connection)]
        return []

    def _send_next(self, waiting: Mapping[Connection, deque[Message]]) -> None:
        """Give each idle worker its next message.

        One at a time: a pipe holds little, and two ends that both send wait for each other.
        """
        for connection, queue in waiting.items():
            if queue and connection not in self._busy and connection not in self._dead:
                try:
                    connection.send(queue.popleft())
                    self._busy.add(connection)
                except OSError:
                    self._dead.add(connection)

    def _receive(self, connection: Connection) -> Message | None:
        self._busy.discard(connection)
        try:
            reply: Message = connection.recv()
        except (EOFError, OSError):
            self._dead.add(connection)
            return None
        return reply


@contextmanager
def _no_main_file() -> Iterator[None]:
    """Let a worker start without importing what this process was started from, a second of CPU."""
    main = sys.modules["__main__"].__dict__
    file = main.pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main["__file__"] = file


def _serve(connection: Connection, build: Build, node_ids: list[int], run_id: int) -> None:
    """Answer messages until the other end closes; the first word is None or what went wrong."""
    try:
        nodes = build(node_ids)
        grid = InProcessGrid(nodes, run_id)
        connection.send(None)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # the run is over; taking the interpreter apart would take seconds
        connection.send(grid.answer(message))
