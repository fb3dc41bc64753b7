"""The parts of a deployment as they are, bridge and all; only Flower's own processes are left out.

Regions behind real bridges on loopback, the deployed uplink, the deployed ServerApps' wiring. What
comes out is what a simulation makes, bit for bit, whatever breaks on the way. With real processes:
tests/integration/test_deployment.py.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client_app.app import app as device_app
from client_app.app import workbench
from region_app.app import app as uplink_app
from region_app.bridge.client import BridgeClient
from region_app.bridge.endpoint import Endpoint
from region_app.bridge.protocol import pack
from region_app.site import Site
from regionfed.config import Config
from regionfed.contract import RegionTrain, encode
from regionfed.errors import (
    ConfigurationError,
    PrivacyError,
    RegionFedError,
    RunError,
)
from regionfed.privacy.ledger import read_ledger
from regionfed.records import Summary
from scripts.loopback import free_port
from server_app.checkpoint import load_checkpoint
from server_app.federation import prepare
from server_app.in_process_grid import InProcessGrid, Node
from server_app.polling_grid import PollingGrid
from server_app.region import RegionService
from server_app.run import execute
from server_app.simulation import load_client_app
from server_app.world import deployed
from tests.conftest import RUN_ID, context_of, tiny_config

REGIONS = ("US", "UK")
TOKEN = "t" * 64
# What the ledger calls the releases of this run.
SIZE, UPDATE, VOTE, SCORES = "region size", "update+loss+sketch", "rho vote", "held-out scores"


def config_of(folder: Path, **settings: Any) -> Config:
    base: dict[str, Any] = {
        "task": "tests.integration.bag_of_letters:make_task",
        "run_name": "trial",
        "run_dir": str(folder / "runs"),
        "rounds": 2,
        "examples_per_client": 24,
        "size_noise_multiplier": 2.0,
        "rho_every": 1,
        "rho_evaluations": 2,
        "evaluate_every": 1,
        "evaluation_privacy": "noised",
        "server_lr": 0.1,
        "residual_step": 0.1,
        "join_timeout": 20.0,
        "round_timeout": 60.0,
    }
    return tiny_config(**{**base, **settings})


class DeployedRegion:
    """A region: its site on this machine, and a coordinator that can die and come back."""

    def __init__(
        self, name: str, folder: Path, config: Config, app: ClientApp = device_app
    ) -> None:
        token = folder / f"{name}.token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        endpoint = Endpoint(f"127.0.0.1:{free_port()}", token)
        self.name = name
        self.site = Site(name, folder / "regions" / name, endpoint, seeded_noise=True)
        self.config = config
        self.app = app
        self._folder = folder
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.service: RegionService | None = None

    def start(self, **settings: Any) -> None:
        """Start its coordinator's run."""
        config = replace(self.config, **settings)
        devices = {
            i + 1: Node(self.app, context_of(i + 1, self._device(i), config)) for i in range(2)
        }
        grid = PollingGrid(InProcessGrid(devices, RUN_ID), poll=0.01)
        self.service = service = RegionService(self.site, config, grid)
        self._over.clear()
        self._thread = threading.Thread(target=self._serve, args=(service,))
        self._thread.start()

    def _serve(self, service: RegionService) -> None:
        with service.bridge():
            service.desk.serve(lambda: "over" if self._over.is_set() else "")

    def stop(self) -> None:
        """End it; what it had not written down is lost."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _device(self, index: int) -> dict[str, Any]:
        folder = self._folder / "devices" / self.name / str(index)
        return {"region": self.name, "partition-id": index, "state-folder": str(folder)}

    def uplink(self) -> dict[str, Any]:
        bridge = self.site.bridge
        return {"bridge": bridge.address, "bridge-token": str(bridge.token)}

    @property
    def events(self) -> list[tuple[int, str]]:
        """What its ledger holds."""
        ledger = read_ledger(self.site.folder / self.config.run_name / "ledger.jsonl")
        return [(event.round, event.release) for event in ledger]


@contextmanager
def regions_of(
    folder: Path, config: Config, apps: dict[str, ClientApp] | None = None
) -> Iterator[dict[str, DeployedRegion]]:
    regions = {
        name: DeployedRegion(name, folder, config, (apps or {}).get(name, device_app))
        for name in REGIONS
    }
    try:
        for region in regions.values():
            region.start()
        yield dict(regions)  # a test may leave one out; it is stopped all the same
    finally:
        for region in regions.values():
            region.stop()


def world_of(
    regions: dict[str, DeployedRegion], config: Config, app: ClientApp = uplink_app
) -> PollingGrid:
    nodes = {
        1000 - i: Node(app, context_of(1000 - i, region.uplink(), config))
        for i, region in enumerate(regions.values())
    }
    return PollingGrid(InProcessGrid(nodes, RUN_ID), poll=0.01)


def run_world(
    regions: dict[str, DeployedRegion],
    config: Config,
    *,
    app: ClientApp = uplink_app,
    stopping: Callable[[], str] = lambda: "",
) -> Summary:
    connect = deployed(world_of(regions, config, app), stopping)
    return execute(config, connect=connect, say=lambda _: None, stopping=stopping, report=False)


def theta_of(config: Config) -> torch.Tensor:
    return load_checkpoint(Path(config.run_dir) / config.run_name)[1].theta


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, Summary]:
    """The simulation of the same run."""
    config = config_of(tmp_path_factory.mktemp("simulated"))
    summary = execute(config, say=lambda _: None, report=False)
    assert not summary.failures
    return theta_of(config), summary


def same(config: Config, summary: Summary, simulated: tuple[torch.Tensor, Summary]) -> None:
    assert summary.status == "finished"
    assert torch.equal(theta_of(config), simulated[0])
    assert dict(summary.regions) == dict(simulated[1].regions)


# ---------------------------------------------------------------------------------- the run
def test_a_deployment_makes_what_a_simulation_makes(
    tmp_path: Path, simulated: tuple[torch.Tensor, Summary]
) -> None:
    """The same coordinator, devices and Strategy: the same bits, by seeded noise."""
    config = config_of(tmp_path)
    with regions_of(tmp_path, config) as regions:
        summary = run_world(regions, config)
        same(config, summary, simulated)
        assert not summary.failures
        expected = [(0, SIZE)]
        for round_ in (1, 2):
            expected += [(round_, UPDATE), (round_, VOTE), (round_, SCORES)]
        assert all(region.events == expected for region in regions.values())


# ----------------------------------------------------------------------------- what breaks
def breaking(before: Callable[[str, str, int], None]) -> ClientApp:
    """Return an uplink before whose relaying something happens: to a region, phase and round."""
    app = ClientApp()

    def relay(message: Message, context: Context) -> Message:
        config: Any = message.content["config"]
        name = Path(str(context.node_config["bridge-token"])).stem
        before(name, message.metadata.message_type, int(config.get("round", 0)))
        return uplink_app(message, context)

    app.query()(relay)
    app.train()(relay)
    app.evaluate()(relay)
    return app


def test_d9_d10_a_coordinator_that_was_killed_gives_the_same_answer_again(tmp_path: Path) -> None:
    """D9, D10.

    It is killed once it has answered and before anybody has heard; it is asked again. Secure noise
    is never the same twice: equal bytes were kept, not drawn. Nothing is charged again.
    """
    config = config_of(tmp_path, noise_seed=-1)
    federation = prepare(config)
    asked = encode(
        RegionTrain(round=1, layout=federation.layout.fingerprint, theta=federation.theta)
    )
    with regions_of(tmp_path, config) as regions:
        region = regions["UK"]

        def ask() -> bytes:
            client = BridgeClient(region.site.bridge, limit=1 << 20, chunk=100)
            reply = client.relay(
                asked,
                run="trial",
                round_=1,
                phase="train",
                settings=config.to_run_config(),
                timeout=30.0,
            )
            return b"".join(pack(reply))

        first, charged = ask(), region.events
        region.stop()
        region.start()
        assert ask() == first
        # Even without the kept bytes: the coordinator's own release holds the same values.
        (region.site.folder / "trial" / "replies" / "train-1.reply").unlink()
        assert ask() == first
        assert region.events == charged == [(0, SIZE), (1, UPDATE)]


def test_f5_a_region_that_is_down_costs_itself_and_comes_back(tmp_path: Path) -> None:
    """F5.

    A dead node makes the server wait for ever. -> a region that is gone costs itself its round; the
    others go on, and it joins again where they are.
    """
    config = config_of(tmp_path, rounds=3)
    with regions_of(tmp_path, config) as regions:

        def before(region: str, phase: str, round_: int) -> None:
            if (region, phase, round_) == ("UK", "train", 2):
                regions["UK"].stop()
                raise ConnectionError("nobody there")
            if (region, phase, round_) == ("UK", "train", 3):
                regions["UK"].start()

        summary = run_world(regions, config, app=breaking(before))
    assert summary.status == "finished" and summary.rounds == 3
    assert [(f.region, f.round) for f in summary.failures] == [("UK", 2)]
    updates = [round_ for round_, release in regions["UK"].events if release == UPDATE]
    assert updates == [1, 3]


def test_f6_when_every_region_is_gone_the_run_ends_and_says_so(tmp_path: Path) -> None:
    """F6.

    Everyone dies and the server lives on for ever. -> below the minimum for K rounds the run ends
    as failed, its checkpoint written.
    """
    config = config_of(tmp_path, rounds=9, max_failed_rounds=2)

    def before(region: str, phase: str, round_: int) -> None:
        if round_ >= 2:
            raise ConnectionError("nobody there")

    with (
        regions_of(tmp_path, config) as regions,
        pytest.raises(RunError, match="2 rounds in a row"),
    ):
        run_world(regions, config, app=breaking(before))
    _, state = load_checkpoint(tmp_path / "runs" / "trial")
    assert state.round == 3
    summary = json.loads((tmp_path / "runs" / "trial" / "summary.json").read_text())
    assert summary["status"] == "failed" and "submit it again" in summary["reason"]


def test_the_world_stopped_and_submitted_again_ends_as_if_it_had_not_been(
    tmp_path: Path, simulated: tuple[torch.Tensor, Summary]
) -> None:
    """Asking for a run by its name again goes on with it."""
    config = config_of(tmp_path)
    with regions_of(tmp_path, config) as regions:

        def stop_after_a_round() -> str:
            return "asked to stop" if (tmp_path / "runs/trial/metrics.jsonl").exists() else ""

        first = run_world(regions, config, stopping=stop_after_a_round)
        assert first.status == "stopped" and first.rounds == 1
        assert "submit it again" in first.reason
        same(config, run_world(regions, config), simulated)


def test_a_full_disk_at_the_checkpoint_ends_the_run_and_loses_nothing(
    tmp_path: Path, simulated: tuple[torch.Tensor, Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that could not be saved is asked for again: the regions give the same answers."""
    config = config_of(tmp_path)
    with regions_of(tmp_path, config) as regions:
        full = {"left": 2}
        import server_app.checkpoint as module

        write = module.save_state

        def save(path: Path, *rest: Any) -> None:
            full["left"] -= 1
            if full["left"] == 0:
                raise OSError(28, "No space left on device")
            write(path, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(module, "save_state", save)
            with pytest.raises(OSError, match="No space"):
                run_world(regions, config)
        before = {name: region.events for name, region in regions.items()}
        same(config, run_world(regions, config), simulated)
        for name, region in regions.items():
            assert region.events[: len(before[name])] == before[name]
            assert len(region.events) == 1 + 2 * 3


def test_a_full_disk_at_a_region_costs_that_region_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text stays in its own log; nothing leaves that was not kept."""
    config = config_of(tmp_path)
    import region_app.state as module

    write = module.save_state

    def save(path: Path, *rest: Any) -> None:
        if "/UK/" in str(path) and "update" in path.name and not full.is_set():
            full.set()
            raise OSError(28, f"No space left on device: {path}")
        write(path, *rest)

    full = threading.Event()
    monkeypatch.setattr(module, "save_state", save)
    with regions_of(tmp_path, config) as regions:
        summary = run_world(regions, config)
    assert summary.status == "finished"
    (failure,) = summary.failures
    assert (failure.region, failure.round) == ("UK", 1) and "OSError" in failure.reason
    assert str(tmp_path) not in failure.reason
    assert regions["UK"].events.count((1, UPDATE)) == 1  # charged, though it never left


# --------------------------------------------------------------------- devices that misbehave
def misbehaving(change: Callable[[RecordDict], RecordDict]) -> ClientApp:
    """Return the devices' app; device 0 changes what its gradient reply holds."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        reply = device_app(message, context)
        if context.node_config["partition-id"] == 0 and message.metadata.message_type.endswith(
            "gradient"
        ):
            return Message(change(reply.content), reply_to=message)
        return reply

    app.train("gradient")(answer)
    app.evaluate("loss")(answer)
    app.evaluate("metrics")(answer)
    app.query("profile")(answer)
    return app


@pytest.mark.parametrize("what", ["nan", "shape", "huge", "another message", "nothing"])
def test_a_device_that_sends_nonsense_costs_itself(what: str, tmp_path: Path) -> None:
    """The region goes on with its other device, and the world does not hear of it."""
    from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

    from regionfed.vector import to_arrays

    def change(records: RecordDict) -> RecordDict:
        arrays = dict(records["arrays"])  # type: ignore[arg-type]
        size = {"shape": 3, "huge": 1_000_000}.get(what, 17)
        value = float("nan") if what == "nan" else 1.0
        if what == "nothing":
            return RecordDict({})
        if what == "another message":
            return RecordDict({"config": ConfigRecord({"contract.version": 1})})
        arrays |= to_arrays("total", torch.full((size,), value))
        return RecordDict(
            {
                "arrays": ArrayRecord(arrays),
                "metrics": MetricRecord(dict(records["metrics"])),  # type: ignore[arg-type]
                "config": ConfigRecord(dict(records["config"])),  # type: ignore[arg-type]
            }
        )

    config = config_of(tmp_path, rounds=1)
    with regions_of(tmp_path, config, {"UK": misbehaving(change)}) as regions:
        summary = run_world(regions, config)
    assert summary.status == "finished" and not summary.failures
    assert (1, UPDATE) in regions["UK"].events


# --------------------------------------------------------------------------- who may ask
def test_a9_a_missing_region_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A9.

    Fewer nodes than the minimum: waiting without bound. -> bounded wait with progress, then an
    error that names who is missing.
    """
    config = config_of(tmp_path, join_timeout=0.5)
    with regions_of(tmp_path, config) as regions:
        del regions["UK"]
        with pytest.raises(RunError, match=r"1 of 2 declared regions .*: UK\."):
            run_world(regions, config)
    assert "1 of 2 regions have joined; waiting for UK\n" in capsys.readouterr().out


def test_a8_a_region_whose_devices_have_not_joined_is_waited_for(tmp_path: Path) -> None:
    """A8.

    Sampling starts before the nodes have joined. -> wait, with a bound, for the declared
    population; the world hears how many are there.
    """
    config = config_of(tmp_path, join_timeout=0.5)
    with regions_of(tmp_path, config) as regions:
        regions["UK"].stop()
        regions["UK"].site = replace(regions["UK"].site, devices=3)
        regions["UK"].start()
        with pytest.raises(RunError, match="UK: 2 of 3 devices have joined"):
            run_world(regions, config)
        assert not (regions["UK"].site.folder / "trial" / "ledger.jsonl").exists()


def test_different_settings_are_refused_by_name(tmp_path: Path) -> None:
    """A region never takes the world's word for how much noise is enough."""
    config = config_of(tmp_path, join_timeout=0.5)
    with regions_of(tmp_path, config) as regions:
        with pytest.raises(RunError, match=r"different settings \(clip-norm: 5\.0, 0\.5"):
            run_world(regions, replace(config, clip_norm=5.0, run_dir=str(tmp_path / "other")))
        # What concerns one machine may differ.
        local = replace(config, workers=7, run_dir=str(tmp_path / "third"), round_timeout=30.0)
        assert run_world(regions, local).status == "finished"


def test_another_runs_request_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, join_timeout=0.5)
    serves = pytest.raises(RunError, match="serves run 'trial', not 'other'")
    with regions_of(tmp_path, config) as regions, serves:
        run_world(regions, replace(config, run_name="other"))


def test_a_name_goes_on_only_with_its_own_settings(tmp_path: Path) -> None:
    config = config_of(tmp_path, rounds=1)
    with regions_of(tmp_path, config) as regions:
        run_world(regions, config)
        with pytest.raises(ConfigurationError, match="a run with other settings"):
            run_world(regions, replace(config, seed=5))


def test_two_nodes_of_one_region_and_a_stranger_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, join_timeout=0.5)
    with regions_of(tmp_path, config) as regions:
        twice = {"a": regions["US"], "b": regions["US"], "UK": regions["UK"]}
        with pytest.raises(RunError, match="two nodes are region 'US'"):
            run_world(twice, config)
        regions["UK"].stop()
        other = replace(config, regions=3)
        stranger = DeployedRegion("IN", tmp_path, other)
        stranger.start()
        try:
            with pytest.raises(RegionFedError):
                run_world({"US": regions["US"], "IN": stranger}, config)
        finally:
            stranger.stop()


def test_d9_a_ledger_that_was_lost_is_noticed_at_the_start(tmp_path: Path) -> None:
    """D9.

    Epsilon restarts from zero after a restart. -> a coordinator does not start on a state whose
    releases its ledger does not know.
    """
    config = config_of(tmp_path, rounds=1)
    with regions_of(tmp_path, config) as regions:
        run_world(regions, config)
        regions["UK"].stop()
        (regions["UK"].site.folder / "trial" / "ledger.jsonl").unlink()
        with pytest.raises(PrivacyError, match=r"Restore ledger\.jsonl"):
            regions["UK"].start()


def test_seeded_noise_is_refused_unless_the_region_s_own_file_lets_it_in(tmp_path: Path) -> None:
    """No setting of a run can void privacy by itself: its operator would have to say so too."""
    region = DeployedRegion("UK", tmp_path, config_of(tmp_path))
    region.site = replace(region.site, seeded_noise=False)
    with pytest.raises(ConfigurationError, match="noise-seed=0 makes noise that anybody can"):
        region.start()


def test_a_run_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="run-name is empty"):
        DeployedRegion("UK", tmp_path, config_of(tmp_path, run_name="")).start()


def test_the_components_of_both_apps_exist() -> None:
    """What `deploy/world` and `deploy/region` name."""
    import tomllib

    from flwr.serverapp import ServerApp
    from flwr.supercore.object_ref import load_app

    root = Path(__file__).resolve().parents[2]
    main = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    for name in ("world", "region"):
        app = tomllib.loads((root / "deploy" / name / "pyproject.toml").read_text())
        flower = app["tool"]["flwr"]["app"]
        assert flower["config"] == main
        assert isinstance(load_app(flower["components"]["serverapp"], ImportError), ServerApp)
        assert isinstance(load_client_app(flower["components"]["clientapp"]), ClientApp)


@pytest.fixture(autouse=True)
def _fresh_workbench() -> Iterator[None]:
    workbench.cache_clear()
    yield
    workbench.cache_clear()


def test_a_stop_ends_the_wait_for_regions(tmp_path: Path) -> None:
    config = config_of(tmp_path, join_timeout=60.0)
    with regions_of(tmp_path, config) as regions:
        del regions["UK"]
        summary = run_world(regions, config, stopping=lambda: "asked to stop")
    assert summary.status == "stopped" and "asked to stop" in summary.reason
