"""The desk behind a bridge: one request after the other, and each answered once for all time.

A reply is on the disk before it leaves, under its round and phase. Whoever asks again, after a
crash of either end or because an answer got lost, gets the very same bytes: no second draw of
noise. It is kept until the same phase of a later round is answered: asking acknowledges it.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path

from region_app.bridge.protocol import Buffer, Request
from regionfed.durable import replacing
from regionfed.errors import RunError

log = logging.getLogger(__name__)

Step = tuple[int, str]  # round and phase
Answer = Callable[[Request, Buffer], Iterable[Buffer]]

POLL = 0.2  # seconds between looks at whether to stop; Flower wants every wait below one


class ReplyStore:
    """The last reply of each phase, on the disk of the region's run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, step: Step) -> Path | None:
        """Return the reply to a step if it is kept.

        Raises
        ------
        RunError
            If a later round of the phase was answered: this is a replay, or the world has gone
            back further than one round.
        """
        round_, phase = step
        newest = self._newest(phase)
        if newest > round_:
            raise RunError(
                f"round {round_} ({phase}) was answered long ago, and round {newest} since: a "
                f"replay, or the world was restored from an old state. Start a run of a new name."
            )
        return self._path(step) if newest == round_ else None

    def save(self, step: Step, body: Iterable[Buffer]) -> Path:
        """Keep a reply; it is on the disk when this returns."""
        path = self._path(step)
        with replacing(path) as new, new.open("wb") as file:
            file.writelines(body)
        for old in self._folder.glob(f"{step[1]}-*.reply"):
            if old != path:
                old.unlink()
        return path

    def _newest(self, phase: str) -> int:
        rounds = (path.stem.partition("-")[2] for path in self._folder.glob(f"{phase}-*.reply"))
        return max((int(text) for text in rounds), default=-1)

    def _path(self, step: Step) -> Path:
        return self._folder / f"{step[1]}-{step[0]}.reply"


class Desk:
    """Takes requests from any thread; the one that calls `serve` answers them, one at a time.

    Parameters
    ----------
    answer : callable
        Returns the body of the reply to a request.
    store : ReplyStore
    """

    def __init__(self, answer: Answer, store: ReplyStore) -> None:
        self._answer = answer
        self._store = store
        self._lock = threading.Lock()
        self._open: dict[Step, Future[Path]] = {}
        self._queue: queue.SimpleQueue[tuple[Request, Buffer, Future[Path]]] = queue.SimpleQueue()

    def ask(self, request: Request, body: Buffer, patient: Callable[[], bool]) -> Path:
        """Return the file with the reply; several who ask for one step share the work.

        Raises
        ------
        TimeoutError
            If whoever asks is no longer `patient`. The work goes on, and its reply is there for the
            next who asks.
        Exception
            What the answer raised.
        """
        step = (request.round, request.phase)
        with self._lock:
            if (path := self._store.find(step)) is not None:
                return path
            if (work := self._open.get(step)) is None:
                work = self._open[step] = Future()
                self._queue.put((request, body, work))
        while not work.done():
            if not patient():
                raise TimeoutError
            wait([work], timeout=POLL)
        return work.result()

    def serve(self, stopping: Callable[[], str]) -> str:
        """Answer until `stopping` says why to stop; return that."""
        while not (why := stopping()):
            try:
                request, body, work = self._queue.get(timeout=POLL)
            except queue.Empty:
                continue
            self._serve_one(request, body, work)
        return why

    def _serve_one(self, request: Request, body: Buffer, work: "Future[Path]") -> None:
        step = (request.round, request.phase)
        try:
            path = self._store.save(step, self._answer(request, body))
        except Exception as error:
            with self._lock:
                del self._open[step]  # whoever asks again has it tried again
            work.set_exception(error)
        else:
            with self._lock:
                del self._open[step]
            work.set_result(path)
