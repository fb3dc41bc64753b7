"""Learns that a run should stop, and keeps the process alive until it has."""

import os
import threading
from types import TracebackType
from typing import Self

from flwr.supercore.exit import add_exit_handler


class StopWatch:
    """Notices that this run should end: a signal, `flwr stop`, or a SuperLink that is gone.

    In a simulation Flower runs a ServerApp in a thread, where no signal can be handled: Flower
    handles them in the main thread, and calls what `add_exit_handler` registered. In a deployment
    a ServerApp runs in the main thread, and the same signal raises SystemExit in it.

    Use as a context around the run. Whoever leaves it in time lets the process end at once; the
    handler waits `grace` seconds for that.
    """

    def __init__(self, grace: float = 20.0) -> None:
        self._grace = grace
        self._reason = ""
        self._left = threading.Event()
        self._thread = threading.current_thread()
        self._parent = os.getppid()

    def __enter__(self) -> Self:
        # Not public, and the only way: a thread can handle no signal, and Flower leaves by os._exit
        # five seconds after one. Handlers of this kind run before that time begins.
        add_exit_handler(self._on_exit, run_before_force_exit=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()

    def reason(self) -> str:
        """Return why the run should stop, or "" if it should go on."""
        if not self._reason and os.getppid() != self._parent:
            self._reason = "the SuperLink is gone"
        return self._reason

    def _on_exit(self) -> None:
        if self._left.is_set():  # the process ends because the run has
            return
        self._reason = self._reason or "asked to stop"
        if threading.current_thread() is not self._thread:
            self._left.wait(self._grace)
