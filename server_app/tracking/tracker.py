"""Where a run's rounds are tracked besides its own files: the Protocol, the names, the choice."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from regionfed.config import LOCAL, Config, Value
from regionfed.errors import ConfigurationError
from regionfed.records import RoundRecord, Summary
from regionfed.registry import Registry
from server_app.summary import meaning

log = logging.getLogger(__name__)

EPSILON = "epsilon-means"  # among the facts of a run


class Tracker(Protocol):
    """Is told each round once it is saved, and how the run ended."""

    def round(self, record: RoundRecord) -> None:
        """Track one round, under its number."""
        ...

    def close(self, summary: Summary) -> None:
        """Track how the run ended, and write what is not written yet."""
        ...


class TrackerFactory(Protocol):
    """Opens the track of a run."""

    def __call__(self, folder: Path, config: Config, earlier: Sequence[RoundRecord]) -> Tracker:
        """Return a tracker.

        Parameters
        ----------
        folder : Path
            The run's; what is kept as files is kept there.
        config : Config
        earlier : sequence of RoundRecord
            The rounds of a run that is resumed, which were tracked before: the track goes on.
        """
        ...


TRACKERS: Registry[TrackerFactory] = Registry(
    "tracking",
    {
        "prometheus": "server_app.tracking.prometheus:Prometheus",
        "tensorboard": "server_app.tracking.tensorboard:TensorBoard",
        "mlflow": "server_app.tracking.mlflow:MLflow",
        "wandb": "server_app.tracking.wandb:Wandb",
    },
)


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import within it what an extra of this package installs.

    Raises
    ------
    ConfigurationError
        Saying what to install.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"tracking='{name}' needs a package that is not there ({error}): "
            f"pip install 'regionfed[{name}]'."
        ) from error


def chosen_trackers(config: Config) -> dict[str, TrackerFactory]:
    """Return what the setting `tracking` names, by name.

    Raises
    ------
    ConfigurationError
        If there is no such tracker, or its package is not installed.
    """
    names = filter(None, (name.strip() for name in config.tracking.split(",")))
    return {name: TRACKERS.load(name) for name in names}


def facts_of(config: Config) -> dict[str, Value]:
    """Return what a track says of its run, which may be carried elsewhere.

    Settings, but none that concerns this machine alone: its paths are nobody else's business. And
    what every epsilon means, without which it means nothing.
    """
    said = {k: v for k, v in config.to_run_config().items() if k.replace("-", "_") not in LOCAL}
    private = f"delta {config.delta:g}, for {meaning(config)}"
    return said | {
        EPSILON: private if config.privacy_mode != "none" else "no privacy was asked for"
    }


class Tracking:
    """All trackers of a run as one. None of them can fail it: one that raises is left out.

    Parameters
    ----------
    chosen : mapping of name to TrackerFactory
    folder, config, earlier
        As for `TrackerFactory`.
    """

    def __init__(
        self,
        chosen: Mapping[str, TrackerFactory],
        folder: Path,
        config: Config,
        earlier: Sequence[RoundRecord],
    ) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name, factory in chosen.items():
            with _harmless(name):
                self._trackers[name] = factory(folder, config, earlier)

    def round(self, record: RoundRecord) -> None:
        """Tell all of a round."""
        self._tell(lambda tracker: tracker.round(record))

    def close(self, summary: Summary) -> None:
        """Tell all how the run ended."""
        self._tell(lambda tracker: tracker.close(summary))

    def _tell(self, tell: Callable[[Tracker], None]) -> None:
        told: dict[str, Tracker] = {}
        for name, tracker in self._trackers.items():
            with _harmless(name):
                tell(tracker)
                told[name] = tracker
        self._trackers = told


@contextmanager
def _harmless(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.warning(
            "tracking='%s' failed and is left out from here on; the run goes on",
            name,
            exc_info=error,
        )
