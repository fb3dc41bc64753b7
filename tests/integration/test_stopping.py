"""Field case F8: Ctrl-C, `flwr stop` and a SuperLink that dies end a run that saved its state."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from flwr.supercore.exit.exit_handler import trigger_exit_handlers

from scripts import run as script
from server_app.stopping import StopWatch

ROOT = Path(__file__).resolve().parents[2]


def test_a_signal_reaches_a_run_in_a_thread_and_waits_for_it() -> None:
    """Flower's handler runs in the main thread; the run is in another."""
    entered, told = threading.Event(), []

    def run() -> None:
        with StopWatch(grace=10.0) as watch:
            entered.set()
            while not watch.reason():
                time.sleep(0.01)
            time.sleep(0.2)  # its last words
            told.append(watch.reason())

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(5.0)
    trigger_exit_handlers(run_before_force_exit=True)
    assert told == ["asked to stop"]
    thread.join()


class Waits(threading.Event):
    """Notes how long it is waited for, and returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.noted.append(timeout)
        return self.is_set()


def watch_that_notes(grace: float) -> tuple[StopWatch, Waits]:
    """Return a watch, and what it waits for."""
    watch, waits = StopWatch(grace), Waits()
    watch._left = waits
    return watch, waits


def test_the_end_of_a_finished_run_is_no_stop() -> None:
    watch, waits = watch_that_notes(60.0)
    with watch:
        pass
    trigger_exit_handlers(run_before_force_exit=True)
    assert waits.noted == []
    assert watch.reason() == ""


def test_a_run_that_does_not_listen_is_not_waited_for_for_ever() -> None:
    watch, waits = watch_that_notes(0.2)
    watch._thread = threading.Thread()  # the run is in another thread than this one
    watch.__enter__()
    trigger_exit_handlers(run_before_force_exit=True)
    assert waits.noted == [0.2]
    assert watch.reason() == "asked to stop"


def test_in_the_main_thread_the_signal_raises_there() -> None:
    """As in a deployment: waiting for ourselves would last for ever."""
    watch, waits = watch_that_notes(60.0)
    with watch:
        trigger_exit_handlers(run_before_force_exit=True)
        assert waits.noted == []
        assert watch.reason() == "asked to stop"


def test_a_superlink_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopWatch() as watch:
        assert watch.reason() == ""
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert watch.reason() == "the SuperLink is gone"


def test_f8_ctrl_c_stops_a_run_and_keeps_its_state(t5_folder: Path, tmp_path: Path) -> None:
    settings = {
        "model": str(t5_folder),
        "run-dir": str(tmp_path),
        **{"rounds": 10_000, "regions": 2, "clients-per-region": 2, "examples-per-client": 24},
        **{"evaluate-every": 100_000, "rho-every": 0, "privacy-mode": "none"},
    }
    run_config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    with subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "run.py"), run_config],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if " 2/10000 " in line:
                process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == script.STOPPED, "".join(seen)
    (summary,) = tmp_path.glob("2*/summary.json")
    assert json.loads(summary.read_text(encoding="utf-8"))["status"] == "stopped"
