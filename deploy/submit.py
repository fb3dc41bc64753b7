"""Enrols nodes and submits runs by Flower's own command, from where its Control API is reached.

    python -m deploy.submit enrol KEY.pub ...           enrol SuperNodes; those that are, stay
    python -m deploy.submit run APP SETTINGS.toml       submit, show the log, end as the run ends
    python -m deploy.submit keep APP SETTINGS.toml      submit, and again when the run has failed

The environment says which SuperLink: `SUPERLINK` (host:port) and `AUTHORITY` (its certificate
authority's file). A coordinator's run is kept; the world's run is submitted again by a person, and
goes on where it was.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

POLL = 15.0  # seconds between looks at a run: each starts Flower's command, a second's work
AGAIN = 5.0  # before a SuperLink that does not answer is asked again
LAST_WORDS = 3.0  # that a log has, once its run has ended
FAILURES = 30  # in a row, before giving up

COMPLETED, STOPPED = "finished:completed", "finished:stopped"


def write_connection(home: Path, address: str, authority: str) -> None:
    """Let ``flwr`` find the SuperLink under the name ``it``."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "it"\n\n[superlink.it]\naddress = {json.dumps(address)}\n'
        f"root-certificates = {json.dumps(authority)}\n"
    )


def flwr(*arguments: str) -> dict[str, Any]:
    """Run a command of Flower's; return its JSON, with ``success`` false where it has none.

    Its exit status says nothing: it is 0 even where the command failed.
    """
    done = subprocess.run(
        ["flwr", *arguments, "--format", "json"], capture_output=True, text=True, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        return {"success": False, "error-message": (done.stdout + done.stderr).strip()}
    return found


def enrol(keys: Sequence[str]) -> None:
    """Register public keys; one that is registered already is left as it is."""
    for key in keys:
        name = Path(key).stem
        found = _until_answered("supernode", "register", key, "it", "--name", name)
        known = "already" in str(found.get("error-message", "")).lower()
        say(f"{name}: {'enrolled' if found.get('success') else 'known' if known else found}")
        if not found.get("success") and not known:
            raise SystemExit(1)


def submit(app: str, settings: str) -> str:
    """Submit a run; return its number."""
    found = _until_answered("run", app, "it", "--run-config", settings)
    if not found.get("success"):
        raise SystemExit(f"not accepted: {found.get('error-message', found)}")
    say(f"run {found['run-id']}")
    return str(found["run-id"])


def status_of(run: str) -> tuple[str, str]:
    """Return a run's status and what Flower says of it; empty where nobody answers."""
    found = flwr("ls", "it", "--run-id", run)
    if not found.get("success"):
        return "", ""
    return found["runs"][0]["status"], str(found["runs"][0].get("status-details", ""))


def await_end(run: str, wait: Callable[[float], object] | None = None) -> str:
    """Wait until a run has ended; return how."""
    while not (status := status_of(run))[0].startswith("finished"):
        (wait or time.sleep)(POLL)
    say(" ".join(status))
    return status[0]


def keep(app: str, settings: str) -> None:
    """Have a run until it is stopped."""
    while await_end(submit(app, settings)) not in {COMPLETED, STOPPED}:
        time.sleep(AGAIN)


def run_once(app: str, settings: str) -> int:
    """Submit a run, show its log until it ends; return the exit status."""
    run = submit(app, settings)
    with subprocess.Popen(["flwr", "log", run, "it", "--stream"]) as log:
        ending = await_end(run, partial(_wait_for, log))
        _wait_for(log, LAST_WORDS)
        log.terminate()
    return 0 if ending == COMPLETED else 1


def _wait_for(log: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait, but no longer than a log that has something to say goes on: it ends with its run."""
    if log.poll() is not None:  # ended before: its SuperLink was gone
        time.sleep(seconds)
        return
    with suppress(subprocess.TimeoutExpired):
        log.wait(seconds)


def _until_answered(*arguments: str) -> dict[str, Any]:
    """Ask again while the SuperLink cannot be reached."""
    found: dict[str, Any] = {}
    for _ in range(FAILURES):
        found = flwr(*arguments)
        words = str(found.get("error-message", "")).lower()
        if found.get("success") or not ("connect" in words or "unavailable" in words):
            return found
        time.sleep(AGAIN)
    return found


def say(text: str) -> None:
    """Tell the container's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Read the command line."""
    what, *rest = sys.argv[1:] or [""]
    home = Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr"))
    if what in {"enrol", "run", "keep"}:
        write_connection(home, os.environ["SUPERLINK"], os.environ["AUTHORITY"])
    match what, rest:
        case "enrol", [*keys]:
            enrol(keys)
        case "keep", [app, settings]:
            keep(app, settings)
        case "run", [app, settings]:
            return run_once(app, settings)
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
