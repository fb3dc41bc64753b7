"""A federation of federations as real processes on loopback, and everything killed on purpose.

TLS, node keys, SuperExec secrets, one `FLWR_HOME` a process; world and regions share nothing but
their links. A run takes minutes, for Flower starts a process per message.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.keys import WORLD, make_node_key
from regionfed.config import Config
from regionfed.privacy.ledger import read_ledger
from scripts.loopback import Deployment
from server_app.checkpoint import load_checkpoint
from server_app.run import execute

pytestmark = pytest.mark.slow

REGIONS, DEVICES = ("US", "UK"), 2
LONG = 3600.0  # seconds until a test gives up; says nothing of how long it takes
COMPLETED = "finished:completed"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    with Deployment(folder, REGIONS, DEVICES, seeded_noise=True) as started:
        yield started


class Run:
    """One training on the deployment: coordinators' runs, then the world's."""

    def __init__(self, deployment: Deployment, name: str, **settings: Any) -> None:
        self.deployment = deployment
        self.folder = deployment.folder / "runs" / name
        self.settings: dict[str, Any] = {
            "run-name": name,
            "run-dir": str(deployment.folder / "runs"),
            "regions": len(REGIONS),
            "clients-per-region": DEVICES,
            "examples-per-client": 24,
            "rounds": 2,
            "task": "tests.integration.bag_of_letters:make_task",
            "trainable": "",
            "noise-seed": 0,
            "rho-every": 0,
            "evaluate-every": 100,
            "user-steps": 0,
            "size-noise-multiplier": 2.0,
            "target-epsilon": 8.0,
            "sampling-rate": 0.5,
            "server-lr": 0.1,
            "residual-step": 0.1,
            "device-timeout": 400.0,
            "join-timeout": 900.0,
            "round-timeout": 1200.0,
            **settings,
        }
        self.coordinators: dict[str, int] = {}
        self.world = 0

    def start(self) -> None:
        self.coordinators = self.deployment.submit_regions(self.settings)
        self.world = self.deployment.submit(WORLD, self.settings)

    def stop_regions(self) -> None:
        for region, run in self.coordinators.items():
            if not self.deployment.status(region, run)[0].startswith("finished"):
                self.deployment.flwr(region, "stop", str(run), "it")
        for region, run in self.coordinators.items():
            self.deployment.await_end(region, run, LONG)

    @property
    def rounds(self) -> int:
        """How many rounds are written down."""
        metrics = self.folder / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def await_round(self, round_: int) -> None:
        self.deployment.wait(f"round {round_}", lambda: self.rounds >= round_, LONG)

    def await_end(self) -> tuple[str, str]:
        return self.deployment.await_end(WORLD, self.world, LONG)

    @property
    def theta(self) -> torch.Tensor:
        return load_checkpoint(self.folder)[1].theta

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def events(self, region: str) -> list[tuple[int, str]]:
        folder = self.deployment.region_folder(region) / self.settings["run-name"]
        return [(e.round, e.release) for e in read_ledger(folder / "ledger.jsonl")]

    def simulate(self, folder: Path) -> torch.Tensor:
        """Return what a simulation with the same settings makes."""
        config = Config.from_run_config({**self.settings, "run-dir": str(folder), "workers": 1})
        execute(config, say=lambda _: None, report=False)
        return load_checkpoint(folder / config.run_name)[1].theta


@contextmanager
def running(deployment: Deployment, name: str, **settings: Any) -> Iterator[Run]:
    """Have a run on the deployment; its coordinators are stopped afterwards."""
    run = Run(deployment, name, **settings)
    run.start()
    try:
        yield run
    finally:
        run.stop_regions()


def once_each(run: Run) -> None:
    """No release was charged twice: no retry has drawn noise again."""
    for region in REGIONS:
        events = run.events(region)
        assert len(set(events)) == len(events), events
        updates = [round_ for round_, release in events if release.startswith("update")]
        assert updates and updates == sorted(updates)


def test_the_result_is_that_of_the_simulation(deployment: Deployment, tmp_path: Path) -> None:
    with running(deployment, "plain", **{"evaluate-every": 1, "rho-every": 1}) as run:
        assert run.await_end()[0] == COMPLETED
    assert not run.summary["failures"]
    assert torch.equal(run.theta, run.simulate(tmp_path))
    once_each(run)


# ----------------------------------------------------------------------------------- kill -9
def kill_world(run: Run) -> None:
    os.kill(run.deployment.serverapp(WORLD), signal.SIGKILL)
    run.deployment.wait("its end", lambda: run.await_end()[0].startswith("finished"), LONG)
    run.world = run.deployment.submit(WORLD, run.settings)


def kill_coordinator(run: Run) -> None:
    os.kill(run.deployment.serverapp("UK"), signal.SIGKILL)
    run.coordinators["UK"] = run.deployment.submit("UK", run.settings)
    run.deployment.await_bridge("UK")


def kill_part(name: str) -> Callable[[Run], None]:
    def kill(run: Run) -> None:
        part = run.deployment.parts[name]
        part.kill()
        part.start()

    return kill


@pytest.mark.parametrize(
    ("who", "kill"),
    [
        ("world", kill_world),
        ("coordinator", kill_coordinator),
        ("device", kill_part("device-UK-0")),
        ("uplink", kill_part("uplink-UK")),
        ("region-superlink", kill_part("superlink-UK")),
        ("world-superlink", kill_part("superlink-world")),
    ],
)
def test_kill_9(who: str, kill: Callable[[Run], None], deployment: Deployment) -> None:
    """After round 1, in the middle of the next: the run completes, nothing is charged twice."""
    with running(deployment, f"kill-{who}", rounds=4) as run:
        run.await_round(1)
        before = {region: run.events(region) for region in REGIONS}
        kill(run)
        assert run.await_end()[0] == COMPLETED
    once_each(run)
    for region, events in before.items():
        assert run.events(region)[: len(events)] == events
    summary = run.summary
    assert summary["status"] == "finished" and summary["rounds"] == 4
    lost = {(f["region"], f["round"]) for f in summary["failures"]}
    assert all(region == "UK" for region, _ in lost) and len(lost) <= 2, lost


def test_a_stalled_device_costs_itself(deployment: Deployment) -> None:
    """F5: the region answers without it after `device-timeout`, the world does not notice."""
    device = deployment.parts["device-UK-1"]
    with running(deployment, "stalled", **{"device-timeout": 60.0}) as run:
        run.await_round(1)
        device.signal(signal.SIGSTOP)
        try:
            assert run.await_end()[0] == COMPLETED
        finally:
            device.signal(signal.SIGCONT)
    assert not [f for f in run.summary["failures"] if f["region"] == "US"]
    once_each(run)


# -------------------------------------------------------------------------------------- keys
def test_a_key_that_is_not_enrolled_is_refused(deployment: Deployment, tmp_path: Path) -> None:
    make_node_key(tmp_path / "key", tmp_path / "stranger.pub")
    refused(deployment, tmp_path / "key")


def test_a_device_of_another_region_is_refused(deployment: Deployment) -> None:
    refused(deployment, deployment.folder / "keys" / "US" / "nodes" / "device-0" / "key")


def refused(deployment: Deployment, key: Path) -> None:
    """Its SuperNode ends by itself."""
    part = deployment.device("UK", 0)
    part.command[part.command.index("--auth-supernode-private-key") + 1] = str(key)
    part.home = deployment.home(f"stranger-{key.parent.name}")
    part.environment["FLWR_HOME"] = str(part.home)
    part.start()
    try:
        assert part.process is not None
        deadline = time.monotonic() + LONG
        while part.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        assert part.process.returncode not in {0, None}, part.log.read_text()
        assert "SuperNode ID" not in part.log.read_text()
    finally:
        part.end()
