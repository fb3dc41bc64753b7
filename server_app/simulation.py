"""The one place where the tiers are wired into one machine.

Each region gets its own coordinator, its own folder and its own devices behind an in-process
Grid; the world reaches it through its uplink only. Coordinators, Strategy and ClientApp are the
ones that a deployment runs.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from client_app.conformance import Candidate, Failed
from region_app.coordinator import Coordinator
from region_app.uplink import make_uplink
from regionfed.config import Config
from regionfed.contract import message_type
from regionfed.errors import ConfigurationError, ContractError
from regionfed.logs import configure
from regionfed.personaliser import PERSONALISERS
from regionfed.privacy.plan import PrivacyPlan
from server_app.federation import Federation
from server_app.in_process_grid import InProcessGrid, Node


@dataclass(frozen=True)
class World:
    """What a simulated world is made of; sent to the workers that build parts of it.

    Attributes
    ----------
    regions : Mapping[int, str]
        Node id to region name.
    devices : Mapping[str, int]
        Region name to number of devices.
    folder : Path
        The run's folder; regions have theirs below ``regions/``, devices below ``devices/``.
    """

    config: Config
    plan: PrivacyPlan
    regions: Mapping[int, str]
    devices: Mapping[str, int]
    tasks: tuple[str, ...]
    folder: Path
    run_id: int

    def build(self, node_ids: list[int]) -> dict[int, Node]:
        """Build the regions of these node ids, devices and all.

        The number of threads is set, for the order of sums depends on it: a run's result must
        not depend on how many processes or cores it had.
        """
        configure()
        torch.set_num_threads(self.config.threads)
        app = load_client_app(self.config.client_app)
        return {node: self._region(node, app) for node in node_ids}

    def _region(self, node_id: int, app: ClientApp) -> Node:
        name = self.regions[node_id]
        count = self.devices[name]
        devices = {
            i + 1: Node(app, self._context(i + 1, self._device(name, i))) for i in range(count)
        }
        coordinator = Coordinator(
            region=name,
            grid=InProcessGrid(devices, self.run_id),
            devices=count,
            config=self.config,
            plan=self.plan,
            personaliser=PERSONALISERS.load(self.config.personaliser)(self.config),
            tasks=self.tasks,
            folder=self.folder / "regions" / name,
        )
        about: dict[str, str | int] = {"region": name, "run": self.folder.name}
        return Node(make_uplink(coordinator), self._context(node_id, about))

    def _device(self, region: str, index: int) -> dict[str, str | int]:
        own = self.folder.absolute() / "devices" / region / str(index)
        return {"region": region, "partition-id": index, "state-folder": str(own)}

    def _context(self, node_id: int, node_config: dict[str, str | int]) -> Context:
        return Context(
            run_id=self.run_id,
            node_id=node_id,
            node_config=dict(node_config),
            state=RecordDict(),
            run_config=dict(self.config.to_run_config()),
        )


def require_answers(config: Config, federation: Federation, folder: Path) -> None:
    """Refuse a ClientApp of one's own that has no answer where devices answer as one.

    A region may not tell that its devices failed, for who was drawn is a secret: it would release
    noise and nothing else, round after round. So a device without any example is asked before the
    first: what it answers tells of the app alone.

    Raises
    ------
    ConfigurationError
        Naming the app and what it said.
    """
    if not federation.plan.unit.as_one or config.client_app == Config().client_app:
        return
    device = Candidate(
        app=load_client_app(config.client_app),
        config=config,
        layout=federation.layout,
        point=federation.theta,
        tasks=federation.tasks,
        region=next(iter(federation.devices)),
        index=0,
        folder=folder / "devices" / "nobody",
    ).with_examples(0)
    try:
        device.update()
    except (Failed, ContractError) as error:
        raise ConfigurationError(
            f"client-app='{config.client_app}' does not answer what unit='{config.unit}' asks "
            f"devices for, {message_type(device.update_request())}: {error} Mend it (`regionfed "
            f"check` says more), or choose another unit."
        ) from error


def load_client_app(reference: str) -> ClientApp:
    """Import a ClientApp by ``package.module:attribute``.

    Raises
    ------
    ConfigurationError
        If it cannot be imported, or is something else.
    """
    module, _, attribute = reference.partition(":")
    try:
        app = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"client-app='{reference}' cannot be loaded: {error}.") from error
    if not isinstance(app, ClientApp):
        raise ConfigurationError(
            f"client-app='{reference}' is a {type(app).__name__}, not a flwr.clientapp.ClientApp."
        )
    return app
