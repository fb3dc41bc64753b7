"""A region's ServerApp in a deployment: its coordinator, for as long as the run lasts.

It runs on the region's own SuperLink, whose nodes are the region's devices, and serves the bridge
to the region's uplink. It is started before the world's run, ends with `flwr stop`, and may be
killed and started again at any time: what it has released is on its disk.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from region_app.bridge.desk import Desk, ReplyStore
from region_app.bridge.protocol import EVALUATE, TRAIN, Buffer, Request, pack, unpack
from region_app.bridge.server import AddressTakenError, BridgeServer
from region_app.coordinator import Coordinator
from region_app.site import Site
from regionfed.config import Config
from regionfed.contract import RegionName, RegionPersonalise, RegionTrain, decode, encode
from regionfed.errors import ConfigurationError, RunError
from regionfed.logs import TEXT, configure, log_context
from regionfed.personaliser import PERSONALISERS
from server_app.federation import plan_of
from server_app.polling_grid import PollingGrid, pause
from server_app.stopping import StopWatch

log = logging.getLogger(__name__)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Serve the region that this machine's file is of, until the run is stopped."""
    configure(TEXT)
    config = Config.from_run_config(context.run_config)
    site = Site.load()
    with StopWatch() as watch, log_context(run=config.run_name, region=site.region):
        service = RegionService(site, config, PollingGrid(grid, watch.reason))
        with open_bridge(service, config.join_timeout, watch.reason) as bridge:
            log.info("region %s: bridge at port %d", service.region, bridge.port)
            log.info("region %s: %s", service.region, service.desk.serve(watch.reason))


def open_bridge(
    service: "RegionService", timeout: float, stopping: Callable[[], str]
) -> BridgeServer:
    """Open the bridge, once a coordinator that was stopped before has let go of the address.

    Flower tells a stopped run of it with its next heartbeat, half a minute later.

    Raises
    ------
    AddressTakenError
        After `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return service.bridge()
        except AddressTakenError:
            if time.monotonic() >= deadline:
                raise
            pause(stopping)


class RegionService:
    """A coordinator behind a bridge.

    Parameters
    ----------
    site : Site
    config : Config
    grid : Grid
        The region's devices.

    Raises
    ------
    ConfigurationError
        If the run has no name, or no such region.
    PrivacyError
        If the region's ledger is older than its state.
    """

    def __init__(self, site: Site, config: Config, grid: Grid) -> None:
        if not config.run_name:
            raise ConfigurationError(
                "run-name is empty: the region keeps its ledger by that name. Give it the name "
                "that the world's run has."
            )
        if config.noise_seed >= 0 and not site.seeded_noise:
            raise ConfigurationError(
                f"noise-seed={config.noise_seed} makes noise that anybody can compute: region "
                f"{site.region} refuses it. Leave noise-seed=-1. For a test, write "
                f"'seeded-noise = true' into the region's file."
            )
        dataset, plan = plan_of(config)
        if site.region not in dataset.regions:
            raise ConfigurationError(
                f"region '{site.region}' is none of this run: {', '.join(dataset.regions)}."
            )
        folder = site.folder / config.run_name
        self.region = site.region
        self._config = config
        self._grid = grid
        self._devices = site.devices or dataset.clients(site.region)
        self._coordinator = Coordinator(
            region=site.region,
            grid=grid,
            devices=self._devices,
            config=config,
            plan=plan,
            personaliser=PERSONALISERS.load(config.personaliser)(config),
            tasks=dataset.tasks,
            folder=folder,
        )
        self._answers: dict[str, Any] = {
            TRAIN: (RegionTrain, self._coordinator.train),
            EVALUATE: (RegionPersonalise, self._coordinator.personalise),
        }
        self.desk = Desk(self._answer, ReplyStore(folder / "replies"))
        self._site = site

    def bridge(self) -> BridgeServer:
        """Return the bridge; it is open within its context."""
        return BridgeServer(
            self._site.bridge,
            self.desk,
            introduce=self._introduce,
            check=self._check,
            limit=self._site.limit,
        )

    def _answer(self, request: Request, body: Buffer) -> Iterable[Buffer]:
        kind, answer = self._answers[request.phase]
        asked = decode(kind, unpack(body), {})
        if asked.round != request.round:
            raise RunError(f"a request of round {asked.round} under round {request.round}.")
        with log_context(round=request.round):
            reply = encode(answer(asked))
            log.info("region %s: %s answered", self.region, request.phase)
        return pack(reply)

    def _introduce(self, request: Request) -> Iterable[Buffer]:
        del request
        joined = len(list(self._grid.get_node_ids()))
        if joined < self._devices:
            raise RunError(f"{self.region}: {joined} of {self._devices} devices have joined.")
        return pack(encode(RegionName(self.region)))

    def _check(self, request: Request) -> None:
        """Refuse another run, and a world whose settings are not this region's.

        How much noise is enough follows from the settings: a region never takes the world's word.
        """
        if request.run != self._config.run_name:
            raise RunError(
                f"region {self.region} serves run '{self._config.run_name}', not '{request.run}'."
            )
        theirs = Config.from_run_config(request.settings)
        if differences := theirs.disagreements(self._config):
            raise RunError(
                f"region {self.region} and the world have different settings "
                f"({'; '.join(differences)}: the world's, the region's). Submit both runs with "
                f"the same ones."
            )
