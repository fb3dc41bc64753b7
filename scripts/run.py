"""One `flwr run . --stream` on a SuperLink of its own, started and stopped with the run.

    python scripts/run.py ["rounds=5 seed=1"]

What `make run` does. Against a plain `flwr run . --stream`:

* nothing stays behind, and a SuperLink of another project is never borrowed;
* Ctrl-C ends the run, which then saves its state, instead of the log alone;
* the exit status tells how the run ended: 0 finished, 130 stopped, 1 failed.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

START_SECONDS = 180.0  # until the SuperLink answers; it takes seconds, on a busy machine minutes
STOP_SECONDS = 30.0  # until a run that was asked to stop has ended
LOST_SECONDS = 5.0  # from the end of a run's process to the end of its log
END_SECONDS = 10.0  # until the SuperLink has ended
LEFT_SECONDS = 3.0  # from then until the processes below it have, which have nothing left to do

FINISHED, FAILED, STOPPED = 0, 1, 130

# Flower's own default; it is written out to spare a message about its absence.
CONNECTIONS = """
[superlink]
default = "local"

[superlink.local]
address = ":local:"
"""


def main() -> int:
    """Run once; return the exit status."""
    run_config = [argument for argument in sys.argv[1:] if argument.strip()]
    stop = threading.Event()

    def ask_to_stop(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, ask_to_stop)
    with TemporaryDirectory(prefix="regionfed-", ignore_cleanup_errors=True) as home:
        return _with_superlink(Path(home), run_config, stop)


def _with_superlink(home: Path, run_config: list[str], stop: threading.Event) -> int:
    """Start a SuperLink, run on it, end it."""
    (home / "config.toml").write_text(CONNECTIONS)
    port = str(_free_port())
    environment = _environment(home, port)
    log = home / "superlink.log"
    with log.open("w") as output:
        superlink = subprocess.Popen(
            [
                *(str(BIN / "flower-superlink"), "--insecure", "--simulation"),
                *("--host", "127.0.0.1", "--port", port),
                "--disable-runtime-dependency-installation",
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for this script, which passes it on
        )
    family = Family(superlink.pid)
    try:
        if _answers(superlink, port, stop):
            return _run(descriptor(home), family, environment, run_config, stop)
        if not stop.is_set():
            last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            sys.stderr.write(f"Flower's SuperLink did not start. Its last words:\n{last}\n")
        return STOPPED if stop.is_set() else FAILED
    finally:
        _end(superlink, family)


class Family:
    """The processes below a SuperLink; each run is in a session of its own."""

    def __init__(self, superlink: int) -> None:
        self._superlink = superlink
        self._seen: dict[int, str] = {}

    def look(self) -> list[int]:
        """Note who is there; return those that run an app."""
        parents: dict[int, int] = {}
        commands: dict[int, str] = {}
        for pid, parent, command in _processes():
            parents[pid], commands[pid] = parent, command
        below = {p: c for p, c in commands.items() if self._superlink in _ancestors(p, parents)}
        self._seen.update(below)
        return [pid for pid, command in below.items() if "flwr-simulation" in command]

    def left(self) -> list[int]:
        """Return who was noted and has not ended; a number may be somebody else's by now."""
        now = {pid: command for pid, _, command in _processes()}
        return [pid for pid, command in self._seen.items() if now.get(pid) == command]


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield number, parent and command line of each process of this machine that has not ended."""
    if not Path("/proc/self/stat").exists():
        yield from _processes_by_ps()
        return
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                yield int(folder.name), int(parent), command


def _processes_by_ps() -> Iterator[tuple[int, int, str]]:
    columns = ("pid=", "ppid=", "stat=", "command=")
    options = ["-A", "-ww", *(word for column in columns for word in ("-o", column))]
    listing = subprocess.run(["ps", *options], capture_output=True, text=True, check=True)
    for line in listing.stdout.splitlines():
        pid, parent, state, *command = line.split(maxsplit=3)
        if not state.startswith("Z"):
            yield int(pid), int(parent), command[0] if command else ""


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while (pid := parents.get(pid, 0)) > 1 and pid not in found:
        found.add(pid)
    return found


def _environment(home: Path, port: str) -> dict[str, str]:
    """Return the environment of all that is started here."""
    defaults = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    ours = {
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",  # Flower starts its parts by name
        "PYTHONUNBUFFERED": "1",
    }
    return {**defaults, **os.environ, **ours}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(superlink: "subprocess.Popen[bytes]", port: str, stop: threading.Event) -> bool:
    """Wait until the SuperLink is there."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and superlink.poll() is None and not stop.is_set():
        with suppress(OSError), direct.open(f"http://127.0.0.1:{port}/health", timeout=1.0):
            return True
        time.sleep(0.1)
    return False


def _run(
    app: Path,
    family: Family,
    environment: dict[str, str],
    run_config: list[str],
    stop: threading.Event,
) -> int:
    """Submit the run, show its log, pass a wish to stop on; return the exit status."""
    overrides = [word for text in run_config for word in ("--run-config", text)]
    flwr = subprocess.Popen(
        [str(BIN / "flwr"), "run", str(app), "--stream", *overrides],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    run_ids: list[str] = []
    show = threading.Thread(target=_show, args=(flwr, run_ids), daemon=True)
    show.start()
    while show.is_alive() and not stop.is_set():
        show.join(0.2)
    if show.is_alive():
        sys.stderr.write("\nStopping; the state of the last round is kept.\n")
        _stop(family, show)
        flwr.kill()
    flwr.wait()
    show.join(1.0)
    if stop.is_set():
        return STOPPED
    return _status(run_ids[0], environment) if run_ids and flwr.returncode == 0 else FAILED


def _show(flwr: "subprocess.Popen[str]", run_ids: list[str]) -> None:
    """Copy what Flower says, and note the number of the run."""
    assert flwr.stdout is not None
    for line in flwr.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        run_ids += re.findall(r"^Successfully started run (\d+)", line)


def _stop(family: Family, show: threading.Thread) -> None:
    """Ask whatever runs an app to stop, and wait for its last words."""
    asked: set[int] = set()
    last_seen = began = time.monotonic()
    while show.is_alive():
        now = time.monotonic()
        runs = family.look()
        _signal([pid for pid in runs if pid not in asked], signal.SIGINT)
        asked.update(runs)
        last_seen = now if runs else last_seen
        if now - last_seen > LOST_SECONDS or now - began > STOP_SECONDS:
            return
        show.join(0.2)


def _status(run_id: str, environment: dict[str, str]) -> int:
    """Return how a run ended: `flwr run` itself exits with 0 even if it failed."""
    asked = subprocess.run(
        [str(BIN / "flwr"), "ls", "--run-id", run_id, "--format", "json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        status = json.loads(asked.stdout[asked.stdout.index("{") :])["runs"][0]["status"]
    except (ValueError, LookupError):
        sys.stderr.write(f"Flower does not tell how the run ended: {asked.stdout}{asked.stderr}\n")
        return FAILED
    return {"finished:completed": FINISHED, "finished:stopped": STOPPED}.get(status, FAILED)


def descriptor(home: Path) -> Path:
    """Return a folder with nothing but what the app bundle holds.

    Flower looks at each file below an app's folder; a virtual environment has 50,000.
    """
    pyproject = ROOT / "pyproject.toml"
    include = tomllib.loads(pyproject.read_text())["tool"]["flwr"]["app"]["fab-include"]
    names = [str(pattern).lstrip("/") for pattern in include]
    if not all((ROOT / name).is_file() for name in names):
        return ROOT
    folder = home / "regionfed"
    for source in [pyproject, *(ROOT / name for name in names)]:
        target = folder / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return folder


def _signal(processes: list[int], number: int) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _end(superlink: "subprocess.Popen[bytes]", family: Family) -> None:
    """Stop the SuperLink and all that runs below it."""
    family.look()
    superlink.terminate()
    try:
        superlink.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        superlink.kill()
        superlink.wait()
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := family.left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal(left, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
