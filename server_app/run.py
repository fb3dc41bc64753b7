"""One run from its configuration to its report: the recipe, top to bottom."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from flwr.app import ArrayRecord
from flwr.serverapp import Grid

import regionfed
from regionfed.config import Config
from regionfed.errors import ConfigurationError, RunStoppedError
from regionfed.logs import configure, log_context
from regionfed.privacy.plan import TRAIN, PrivacyPlan, predicted_noise, region_epsilon
from regionfed.privacy.planner import DROWNED
from regionfed.privacy.units import UNITS
from regionfed.records import RoundRecord, Status, Summary
from regionfed.secure_aggregation.terms import excess_of
from regionfed.vector import to_arrays
from server_app.checkpoint import NAME as CHECKPOINT
from server_app.checkpoint import load_checkpoint, save_checkpoint
from server_app.federation import Federation, prepare
from server_app.in_process_grid import InProcessGrid
from server_app.process_grid import ProcessGrid
from server_app.progress import Progress
from server_app.report import write_report
from server_app.run_folder import RunFolder, append_jsonl, read_rounds, write_json_atomic
from server_app.simulation import World, require_answers
from server_app.summary import record_of, summarise
from server_app.tracking.tracker import Tracking, chosen_trackers
from strategies.optimisers import OPTIMISERS
from strategies.regionfed import Observer, RegionFed, ServerState

Say = Callable[[str], None]
S = TypeVar("S", bound=RegionFed)

# A global model whose steps are cut below this share of server-lr is warned of.
_SLOW = 0.5


# Opens the grid of the regions for a run with this folder; says which node is which region.
Regions = tuple[Grid, Mapping[int, str]]
Connect = Callable[[Config, Federation, Path], AbstractContextManager[Regions]]


def execute(
    config: Config,
    *,
    connect: Connect | None = None,
    run_id: int = 1,
    say: Say = print,
    stopping: Callable[[], str] = lambda: "",
    report: bool = True,
) -> Summary:
    """Run a federation and write its folder.

    Parameters
    ----------
    config : Config
        With `resume` set, the settings of that run take its place.
    connect : callable, optional
        Opens the regions; by default they are simulated.
    run_id : int
        Flower's number of this run.
    say : callable
        Takes one line for a person.
    stopping : callable
        Returns why the run should stop after this round, or "".
    report : bool
        Whether to write ``report.html``.

    Returns
    -------
    Summary
        Also written to ``summary.json``; its status is "finished" or "stopped".

    Raises
    ------
    Exception
        Whatever ended the run; the summary then says "failed", why, and how to go on.
    """
    configure()
    chosen_trackers(config)  # what is misspelt or not installed shall not cost a folder
    folder, config, resume = _open(config)
    with log_context(run=folder.path.name):
        federation = prepare(config)
        say(_opening(config, federation, resume))
        for warning in warnings(config, federation):
            say(warning)
        book = RunBook(folder, config, federation, resume, say=say, stopping=stopping)
        try:
            with (connect or _simulated(run_id, stopping))(config, federation, folder.path) as met:
                grid, regions = met
                _train(config, replace(federation, regions=regions), grid, book, resume)
        except RunStoppedError as stopped:
            return book.close("stopped", f"{stopped} {book.remedy}", report)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
            why = f"{type(error).__name__}: {error} {book.remedy}"
            book.close("stopped" if interrupted else "failed", why, report)
            raise
        return book.close("finished", "", report)


def _open(config: Config) -> tuple[RunFolder, Config, ServerState | None]:
    """Make a run's folder, or find the one to go on with and take its settings."""
    root = runs_root(config)
    if config.run_name and (root / config.run_name / CHECKPOINT).exists():
        return _go_on(root / config.run_name, config)
    if not config.resume:
        return RunFolder.create(root, config.run_name or None), config, None
    folder = RunFolder.open(config.resume, root)
    return folder, *load_checkpoint(folder.path)


def _go_on(path: Path, config: Config) -> tuple[RunFolder, Config, ServerState]:
    """Go on with the run of this name; its settings must be those that are asked for."""
    saved, state = load_checkpoint(path)
    if differences := saved.disagreements(config):
        raise ConfigurationError(
            f"run-name='{config.run_name}' is a run with other settings ({'; '.join(differences)}: "
            f"its own, asked for). Ask for its own to go on with it, or choose another name."
        )
    return RunFolder(path.resolve()), config, state


def _train(
    config: Config,
    federation: Federation,
    grid: Grid,
    book: "RunBook",
    resume: ServerState | None,
) -> None:
    strategy = strategy_of(RegionFed, config, federation, [book.observe], resume)
    theta = federation.theta if resume is None else resume.theta
    if resume is None:
        # Even a run that dies in its first round can be resumed.
        book.save(strategy.state_at_start(theta))
    strategy.start(
        grid,
        ArrayRecord(to_arrays("theta", theta)),
        num_rounds=config.rounds,
        timeout=config.round_timeout,
    )


def strategy_of(
    kind: type[S],
    config: Config,
    federation: Federation,
    observers: Iterable[Observer],
    resume: ServerState | None = None,
) -> S:
    """Return the Strategy of a run, or of a kind that does more."""
    return kind(
        config,
        OPTIMISERS.load(config.server_optimiser)(config.server_lr, config.server_momentum),
        federation.regions,
        federation.tasks,
        federation.layout.fingerprint,
        sketch_size=federation.plan.sketch_size,
        labels=federation.plan.labels,
        observers=observers,
        resume=resume,
    )


class RunBook:
    """Writes a run down as it goes: rounds, checkpoint, progress, and at the end the summary."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        federation: Federation,
        resume: ServerState | None,
        *,
        say: Say,
        stopping: Callable[[], str],
    ) -> None:
        self._folder = folder
        self._config = config
        self._federation = federation
        self._stopping = stopping
        self._progress = Progress(say)
        done = resume.round if resume else 0
        # A round that was written down but not saved is done again.
        rows = [record_of(row) for row in read_rounds(folder.metrics)]
        self._rows = [row for row in rows if row.round <= done]
        self._earlier = sum(row.seconds for row in self._rows)
        self._tracking = Tracking(chosen_trackers(config), folder.path, config, self._rows)
        self._began = time.monotonic()

    @property
    def remedy(self) -> str:
        """What to type to go on."""
        if self._config.run_name:
            return "To go on, submit it again as it is."
        return f"To go on: --run-config 'resume=\"{self._folder.path}\"'"

    def save(self, state: ServerState) -> None:
        """Save the state to go on from."""
        save_checkpoint(self._folder.path, self._config, state)

    def observe(self, record: RoundRecord, state: ServerState) -> None:
        """Write a round down; stop the run after it if somebody asked for that."""
        self._rows.append(record)
        append_jsonl(self._folder.metrics, record)
        self.save(state)
        with log_context(round=record.round):
            self._progress.round(record)
            self._tracking.round(record)
        if record.round < record.rounds and (why := self._stopping()):
            raise RunStoppedError(why)

    def close(self, status: Status, reason: str, report: bool) -> Summary:
        """Write the summary and the report, and tell where they are."""
        summary = summarise(
            self._config,
            self._federation,
            self._folder,
            self._rows,
            status=status,
            reason=reason,
            seconds=self._earlier + time.monotonic() - self._began,
        )
        write_json_atomic(self._folder.summary, summary)
        if report:
            write_report(self._folder.path)
        self._tracking.close(summary)
        self._progress.finish(summary, self._folder)
        return summary


def _simulated(run_id: int, stopping: Callable[[], str]) -> Connect:
    @contextmanager
    def connect(config: Config, federation: Federation, folder: Path) -> Iterator[Regions]:
        with closing(simulate(config, federation, folder, run_id, stopping)) as grid:
            yield grid, federation.regions

    return connect


def simulate(
    config: Config,
    federation: Federation,
    folder: Path,
    run_id: int,
    stopping: Callable[[], str] = lambda: "",
) -> InProcessGrid | ProcessGrid:
    """Return the grid of a simulated world: worker processes, or this one if one is enough."""
    require_answers(config, federation, folder)
    world = World(
        config=config,
        plan=federation.plan,
        regions=federation.regions,
        devices=federation.devices,
        tasks=federation.tasks,
        folder=folder,
        run_id=run_id,
    )
    nodes = list(federation.regions)
    workers = min(config.workers or os.cpu_count() or 1, len(nodes))
    if workers == 1:
        return InProcessGrid(world.build(nodes), run_id)
    grid = ProcessGrid(world.build, nodes, workers, run_id, stopping=stopping)
    grid.wait_until_ready(config.join_timeout)
    return grid


def runs_root(config: Config) -> Path:
    """Return the folder of the runs: absolute as given, else below the project.

    Flower starts an app in a folder of its own, so the working directory means nothing here.
    An installed package has no project: its runs go below the working directory after all.
    """
    given = Path(config.run_dir).expanduser()
    if given.is_absolute():
        return given
    project = Path(__file__).resolve().parent.parent
    return (project if (project / "pyproject.toml").exists() else Path.cwd()) / given


def _opening(config: Config, federation: Federation, resume: ServerState | None) -> str:
    devices = sum(federation.devices.values())
    privacy = (
        "NO PRIVACY (privacy-mode='none')"
        if config.privacy_mode == "none"
        else f"epsilon <= {federation.plan.budgets[TRAIN]:.3g} per "
        f"{federation.plan.unit.protects}, "
        f"noise multiplier {federation.plan.update.noise_multiplier:.3f}"
    )
    return (
        f"RegionFed {regionfed.__version__}: {len(federation.regions)} regions, {devices} devices, "
        f"{federation.layout.size:,} parameters; {privacy}"
        + (f"; resumed after round {resume.round}" if resume else "")
    )


def warnings(config: Config, federation: Federation) -> list[str]:
    """Return what to know before a private run starts: foreseen from public numbers alone."""
    if config.privacy_mode == "none":
        return []
    said = []
    plan = federation.plan
    clips_mean = plan.update.part("update").of_mean
    if UNITS[config.unit].promises_region_too:
        whole = region_epsilon(config, plan, config.rounds)
        said.append(
            f"epsilon per region, of its updates and gradients alone: {whole.emptied:.3g} (data "
            f"or none), {whole.replaced:.3g} (which data); all regions are in every round, by name."
        )
    regions = len(federation.regions)
    devices = sum(federation.devices.values())
    noise = predicted_noise(
        config,
        plan,
        regions=regions,
        examples=devices * config.examples_per_client / regions,
        devices=devices // regions,
        excess=max(excess_of(config, n) for n in federation.devices.values()),
    )
    if config.noise_limit < _SLOW * noise:
        said.append(
            f"WARNING: steps of the global model are cut to {config.noise_limit / noise:.1%} of "
            f"server-lr={config.server_lr:g}, or noise would exceed noise-limit="
            f"{config.noise_limit:g}: it will learn little. More examples a region or a larger "
            f"target-epsilon help."
        )
    if (remaining := min(noise, config.noise_limit)) > DROWNED:
        said.append(
            f"WARNING: noise will drown the signal: a standard deviation of {remaining:.3g} "
            f"on each weight of the global model; beyond {DROWNED:g} models have collapsed."
        )
    ratio = _noise_over_signal(plan, devices // regions, federation.layout.size)
    if clips_mean or (plan.unit.as_one and ratio > 1.0):
        said.append(
            f"WARNING: an update of norm {config.clip_norm:g} at most gets noise of norm "
            f"{ratio * config.clip_norm:.0f}: {ratio:.0f} times the signal."
        )
    return said


def _noise_over_signal(plan: PrivacyPlan, devices: int, parameters: int) -> float:
    """Return the norm of the noise on a region's update over C, the most that its signal has.

    For what is divided by nothing or by devices: of examples, whose number is not known, it is
    the noise on their sum.
    """
    update = plan.update.part("update")
    batch = plan.update.rate * plan.unit.population(1.0, devices)
    ratio: float = update.noise / update.divisor(batch) * parameters**0.5
    return ratio
