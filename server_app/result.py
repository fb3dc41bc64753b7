"""What came of a run: the global model, and each region's own, ready to be used."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from client_app.datasets.load import dataset_of
from client_app.task import Task, task_of
from region_app.state import RegionState, StateFolder
from regionfed.config import Config
from regionfed.errors import ConfigurationError, RunError
from regionfed.registry import nearest
from regionfed.vector import Layout
from server_app.checkpoint import NAME, load_checkpoint
from server_app.run import runs_root
from server_app.run_folder import RunFolder

GLOBAL = "global"


@dataclass(frozen=True)
class RegionModel:
    """The model of one region, or of the world.

    Attributes
    ----------
    name : str
        The region's, or ``"global"``.
    point : torch.Tensor
        theta + alpha_r theta_r, or theta; (p,).
    state : RegionState or None
        None for the world.
    states : StateFolder or None
        Where the region keeps what it released.
    """

    name: str
    point: torch.Tensor
    state: RegionState | None = None
    states: StateFolder | None = None

    def update(self) -> tuple[torch.Tensor, float]:
        """Return the region's last released update (p,), and the noise (std) on it.

        Raises
        ------
        RunError
            If the region has none, or one that an earlier version wrote.
        """
        kept = None
        if self.state is not None and self.states is not None:
            kept = self.states.load_release("update", self.state.round)
        if kept is None or "noise_std" not in kept[1]:
            raise RunError(
                f"{self.name} keeps no released update to compare a user with. Choose a region "
                f"by --region; if you have, the run is of an earlier version: run it again."
            )
        return kept[0]["update"], float(kept[1]["noise_std"])


@dataclass(frozen=True)
class RunResult:
    """A run that can be used.

    Attributes
    ----------
    folder : RunFolder
    config : Config
    theta : torch.Tensor
        The global model as it is deployed, (p,).
    rounds : int
        Rounds that it has behind it.
    summary : Mapping
        ``summary.json``; empty for a run that was killed.
    """

    folder: RunFolder
    config: Config
    theta: torch.Tensor
    rounds: int
    summary: Mapping[str, Any]

    @classmethod
    def open(cls, name: str | Path, *, unfinished: bool = False) -> "RunResult":
        """Read a run by its path, by its id, or as ``"latest"``.

        Parameters
        ----------
        name : str or Path
        unfinished : bool
            Whether a run that was stopped, has failed or is still running will do.

        Raises
        ------
        RunError
            If there is no such run, it has no model yet, or has not finished.
        """
        folder = RunFolder.open(name, runs_root(Config()))
        if not (folder.path / NAME).is_file():
            raise RunError(
                f"{folder.path} has no model: {NAME} is missing. Give the folder of a run that has "
                f"begun its first round."
            )
        config, state = load_checkpoint(folder.path)
        summary = _summary(folder.summary)
        if summary.get("rounds") != state.round:
            summary = {}  # of an earlier stop: neither its scores nor its epsilon are of this model
        if summary.get("status") != "finished" and not unfinished:
            status = summary.get("status", "is still running, or was killed")
            raise RunError(
                f"run {folder.path.name} has not finished: it has {state.round} of {config.rounds} "
                f"rounds ({status}). Go on with it: flwr run . --stream --run-config "
                f"'resume=\"{folder.path}\"'; or use it as it is: --unfinished."
            )
        return cls(folder, config, state.average, state.round, summary)

    @property
    def regions(self) -> list[str]:
        """Names of the regions that the run knows, in its own order."""
        below = self.folder.path / "regions"
        kept = sorted(p.name for p in below.iterdir()) if below.is_dir() else []
        return list(dict.fromkeys([*(self.summary.get("regions") or {}), *kept]))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks: as they were scored, or as the dataset has them."""
        for record in (self.summary.get("regions") or {}).values():
            if scores := record.get(GLOBAL):
                return tuple(task for task in scores if task != "mean")
        return dataset_of(self.config).tasks

    def load_task(self) -> tuple[Task, Layout]:
        """Load the model's task; its weights come from here.

        Raises
        ------
        RunError
            If the model that the run names has another shape now.
        """
        task = task_of(replace(self.config, device="cpu"))
        layout = Layout.of(task.module)
        if layout.size != self.theta.numel():
            raise RunError(
                f"model '{self.config.model}' has {layout.size:,} trained parameters, the run has "
                f"{self.theta.numel():,}: it is not the model that the run began with. Put it back."
            )
        return task, layout

    def model(self, region: str = GLOBAL, own_folder: Path | None = None) -> RegionModel:
        """Return a region's model: theta + alpha_r theta_r.

        Parameters
        ----------
        region : str
            A name, in whatever case; ``"global"`` is theta alone.
        own_folder : Path, optional
            The folder of the region's coordinator, where it is not below the run's.

        Raises
        ------
        ConfigurationError
            If there is no such region; names the nearest.
        RunError
            If the region has no model of this run.
        """
        if region == GLOBAL:
            return RegionModel(GLOBAL, self.theta)
        name = region if own_folder else resolve(region, self.regions)
        folder = own_folder or self.folder.path / "regions" / name
        states = StateFolder(folder)
        state = states.load(self.rounds)
        if state is None:
            raise RunError(
                f"region {name} has no model in {folder}: it took part in no round up to "
                f"{self.rounds}. Its users have the global one: leave --region out."
            )
        if state.direction.numel() != self.theta.numel():
            raise RunError(f"{folder} belongs to a run of another model; give that run's folder.")
        return RegionModel(name, self.theta + state.own_part(), state, states)


def resolve(name: str, known: Sequence[str]) -> str:
    """Return the known region that a name means, in whatever case.

    Raises
    ------
    ConfigurationError
        If there is none; names the nearest.
    """
    if name in known:
        return name
    alike = {one.casefold(): one for one in known}
    found = alike.get(name.casefold())
    if found is None:
        spellings = (name, name.upper(), name.title())
        match = next((said for one in spellings if (said := nearest(one, list(known)))), "")
        raise ConfigurationError(
            f"no region '{name}'{match} This run has {', '.join(known) or 'none'}."
        )
    return found


def _summary(path: Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError as error:
        raise RunError(f"cannot read {path}: {error}. Restore it, or delete it.") from error
    return found
