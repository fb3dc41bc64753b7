"""A federation of federations as real processes on loopback, and everything killed on purpose.

TLS, node keys, SuperExec secrets, one `FLWR_HOME` a process; world and regions share nothing but
their links. A run takes minutes, for Flower starts a process per message.
"""

import json
import math
import os
import shutil
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from client_app.datasets.load import dataset_of
from deploy.keys import WORLD, make_node_key
from regionfed.config import Config
from regionfed.privacy.ledger import Ledger, read_ledger
from regionfed.privacy.plan import TRAIN
from scripts.loopback import BUNDLES, ROOT, Deployment
from server_app.checkpoint import load_checkpoint
from server_app.cli.new import write_project
from server_app.run import execute
from tests.integration.hostile import HUGE, NONSENSE

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

    def __init__(
        self, deployment: Deployment, name: str, bundles: Path = BUNDLES, **settings: Any
    ) -> None:
        self.deployment = deployment
        self.bundles = bundles
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
        self.coordinators = self.deployment.submit_regions(self.settings, self.bundles)
        self.world = self.deployment.submit(WORLD, self.settings, self.bundles)

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

    def epsilon(self, region: str) -> float:
        """Return what the region's ledger adds up to."""
        folder = self.deployment.region_folder(region) / self.settings["run-name"]
        config = Config.from_run_config(self.settings)
        ledger = Ledger(folder / "ledger.jsonl", config.delta, {TRAIN: math.inf})
        return ledger.epsilon(TRAIN)

    def simulate(self, folder: Path) -> torch.Tensor:
        """Return what a simulation with the same settings makes."""
        config = Config.from_run_config({**self.settings, "run-dir": str(folder), "workers": 1})
        execute(config, say=lambda _: None, report=False)
        return load_checkpoint(folder / config.run_name)[1].theta


@contextmanager
def running(
    deployment: Deployment, name: str, bundles: Path = BUNDLES, **settings: Any
) -> Iterator[Run]:
    """Have a run on the deployment; its coordinators are stopped afterwards."""
    run = Run(deployment, name, bundles, **settings)
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
def test_kill_9(
    who: str,
    kill: Callable[[Run], None],
    deployment: Deployment,
    record_property: Callable[[str, object], None],
) -> None:
    """After round 1, in the middle of the next: the run completes, nothing is charged twice.

    What was lost is a property of the test: `--junitxml` writes it down for docs/deployment.md.
    """
    with running(deployment, f"kill-{who}", rounds=4) as run:
        run.await_round(1)
        before = {region: run.events(region) for region in REGIONS}
        spent = {region: run.epsilon(region) for region in REGIONS}
        kill(run)
        assert run.await_end()[0] == COMPLETED
    once_each(run)
    for region, events in before.items():
        assert run.events(region)[: len(events)] == events
        assert 0 < spent[region] <= run.epsilon(region)
    summary = run.summary
    assert summary["status"] == "finished" and summary["rounds"] == 4
    lost = {(f["region"], f["round"]) for f in summary["failures"]}
    record_property("rounds lost", f"{who}: {sorted(lost)}")
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
    assert not run.summary["failures"]
    once_each(run)


def test_a_device_that_was_taken_over_costs_itself(deployment: Deployment, tmp_path: Path) -> None:
    """No number, a wrong shape, a million times too much, another run's reply: one each round."""
    for name in ("world", "region"):
        shutil.copytree(BUNDLES / name, tmp_path / name)
    project = tmp_path / "region" / "pyproject.toml"
    project.write_text(
        project.read_text().replace("client_app.app:app", "tests.integration.hostile:app")
    )
    with running(deployment, "hostile", tmp_path, rounds=len(NONSENSE)) as run:
        assert run.await_end()[0] == COMPLETED
    assert not run.summary["failures"]
    assert bool(torch.isfinite(run.theta).all())
    once_each(run)
    said = deployment.flwr("UK", "log", str(run.coordinators["UK"]), "it", "--show")
    for reason in ("holds nan or inf", "got 3.", f"got {HUGE}.", "lacks record 'arrays'"):
        assert reason in said, said


def test_a_project_made_by_regionfed_new_trains_on_real_nodes(tmp_path: Path) -> None:
    """Its own Task and ClientApp, installed beside RegionFed; nothing else was changed."""
    project = tmp_path / "my_app"
    write_project("my_app", project)
    settings = tomllib.loads((project / "settings.toml").read_text()) | {
        "run-name": "own",
        "run-dir": str(tmp_path / "runs"),
        "rounds": 2,
        "device-timeout": 400.0,
        "join-timeout": 900.0,
        "round-timeout": 1200.0,
    }
    dataset = dataset_of(Config.from_run_config(settings))
    regions = dataset.regions
    devices = dataset.clients(regions[0])
    path = {"PYTHONPATH": os.pathsep.join(map(str, (project, ROOT)))}
    with Deployment(tmp_path / "parts", regions, devices, path) as deployment:
        deployment.submit_regions(settings, project)
        run = deployment.submit(WORLD, settings, project)
        assert deployment.await_end(WORLD, run, LONG)[0] == COMPLETED, deployment.last_words()
    summary = json.loads((tmp_path / "runs" / "own" / "summary.json").read_text())
    assert summary["status"] == "finished" and not summary["failures"]


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
