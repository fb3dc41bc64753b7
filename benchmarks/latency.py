"""How long a round takes in a deployment of real processes, and how much memory each part of it.

    python -m benchmarks.latency --json benchmarks/results/latency.json

One region with two devices: SuperLinks, SuperExecs, uplink, coordinator and devices, each a process
of its own on this machine, TLS and node keys (`scripts.loopback`); then the same run in simulation.
A vector of 641 parameters says what a round costs without a model, one of 60,506,624 (T5-small)
what the way of a model adds. The ratio is the result; seconds say how loaded the machine was. A
round is what ``metrics.jsonl`` says it took, the first left out: processes warm up in it. Memory is
the most that any one process of a part was resident with (Linux: ``VmHWM``, libraries included).
"""

import argparse
import json
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deploy.keys import WORLD
from regionfed.config import Config
from regionfed.durable import write_atomic
from scripts.loopback import Deployment, Part
from server_app.run import execute

SIZES = {"tiny": 641, "T5-small": 60_506_624}
REGION, DEVICES, SECONDS = "US", 2, 7200.0
# What the processes of a part do, by the beginning of its name.
ROLES = {
    f"superexec-{WORLD}": "world",
    "superexec-": "coordinator",
    "uplink-": "uplink",
    "device-": "device",
    f"superlink-{WORLD}": "SuperLink of the world",
    "superlink-": "SuperLink of a region",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"rounds": options.rounds, "devices": DEVICES, "sizes": {}}
    with tempfile.TemporaryDirectory() as name, Deployment(Path(name), [REGION], DEVICES) as parts:
        for label, size in SIZES.items():
            settings = settings_of(label, size, options.rounds, Path(name))
            with watched(parts) as peaks:
                deployed = seconds(deploy(parts, settings))
            simulated = seconds(simulate({**settings, "run-name": f"{label}-simulated"}))
            found["sizes"][label] = {
                "parameters": size,
                "deployed_s": round(deployed, 3),
                "simulated_s": round(simulated, 3),
                "ratio": round(deployed / simulated, 1),
                "peak_mib": peaks,
            }
            print(f"{label}: {found['sizes'][label]}", flush=True)
    if options.json:
        write_atomic(options.json, json.dumps(found, indent=1).encode() + b"\n")


def settings_of(label: str, size: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Return a run's settings: nothing but training rounds."""
    return {
        "run-name": label,
        "run-dir": str(folder / "runs"),
        "regions": 1,
        "clients-per-region": DEVICES,
        "examples-per-client": 24,
        "rounds": rounds,
        "task": "benchmarks.long_vector:make_task",
        "model": str(size),
        "trainable": "",
        "microbatch": 2,
        "workers": 1,
        "rho-every": 0,
        "evaluate-every": 1000,
        "user-steps": 0,
        "target-epsilon": 8.0,
        "sampling-rate": 0.2,
        "size-noise-multiplier": 2.0,
        "device-timeout": 1200.0,
        "join-timeout": 900.0,
        "round-timeout": 3000.0,
    }


def deploy(parts: Deployment, settings: Mapping[str, Any]) -> Path:
    """Run on the real processes; return the run's folder."""
    coordinators = parts.submit_regions(settings)
    status, why = parts.await_end(WORLD, parts.submit(WORLD, settings), SECONDS)
    if status != "finished:completed":
        raise RuntimeError(f"{status} {why}\n{parts.last_words()}")
    for region, run in coordinators.items():
        parts.flwr(region, "stop", str(run), "it")
        parts.await_end(region, run, SECONDS)
    return Path(settings["run-dir"], settings["run-name"])


def simulate(settings: Mapping[str, Any]) -> Path:
    """Run the same in simulation; return the run's folder."""
    config = Config.from_run_config(dict(settings))
    execute(config, say=lambda _: None, report=False)
    return Path(config.run_dir, config.run_name)


@contextmanager
def watched(parts: Deployment) -> Iterator[dict[str, int]]:
    """Look every fifth of a second; the dictionary has the peaks (MiB) by role."""
    peaks: dict[str, int] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            for name, part in list(parts.parts.items()):
                role = next((role for start, role in ROLES.items() if name.startswith(start)), name)
                peaks[role] = max(peaks.get(role, 0), resident(part))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def resident(part: Part) -> int:
    """Return the peak (MiB) of the largest process that a part has now."""
    found = [0]
    for pid in part.processes():
        with suppress(OSError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            found.append(int(status.partition("VmHWM:")[2].split()[0]) // 1024)
    return max(found)


def seconds(folder: Path) -> float:
    """Return the median duration of a run's rounds, the first left out."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float(statistics.median(row["seconds"] for row in rows[1:]))


if __name__ == "__main__":
    main()
