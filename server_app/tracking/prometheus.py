"""Tracks a run for Prometheus: a text file for the node exporter's textfile collector."""

from collections.abc import Sequence
from pathlib import Path

from regionfed.config import Config
from regionfed.records import RoundRecord, Summary
from server_app.tracking.measures import OF_REGION, OF_RUN, measures_of
from server_app.tracking.tracker import EPSILON, extra, facts_of

with extra("prometheus"):
    from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Info, write_to_textfile

NAME = "metrics.prom"

_STATES = ["running", "finished", "stopped", "failed"]


class Prometheus:
    """Replaces ``metrics.prom`` in the run's folder after each round, at once.

    Numbers are gauges that keep their last value; failures are counted up as well, so that a scrape
    that comes less often than rounds misses none.
    """

    def __init__(self, folder: Path, config: Config, earlier: Sequence[RoundRecord]) -> None:
        self._path = folder / NAME
        self._run = folder.name
        self._registry = CollectorRegistry()
        self._of_run = {name: self._gauge(name, text) for name, text in OF_RUN.items()}
        self._of_region = {
            name: self._gauge(f"region_{name}", text, "region") for name, text in OF_REGION.items()
        }
        self._all_failures = Counter(
            "regionfed_region_all_failures",
            "answers of the region that did not count, since the start of the run",
            ["run", "region"],
            registry=self._registry,
        )
        self._rounds = self._gauge("rounds", "rounds that the run plans")
        self._rounds.labels(self._run).set(config.rounds)
        self._round = self._gauge("round", "rounds completed")
        self._last = self._gauge("last_round_timestamp_seconds", "when the last round was over")
        self._state = Enum(
            "regionfed_state",
            "how the run stands",
            ["run"],
            states=_STATES,
            registry=self._registry,
        ).labels(self._run)
        meant = Info(
            "regionfed_promise", "what every epsilon means", ["run"], registry=self._registry
        )
        meant.labels(self._run).info({"means": str(facts_of(config)[EPSILON])})
        for record in earlier:
            self._take(record)

    def round(self, record: RoundRecord) -> None:
        """Take a round's numbers and replace the file."""
        self._take(record)
        self._last.labels(self._run).set_to_current_time()
        self._write()

    def close(self, summary: Summary) -> None:
        """Say how the run ended."""
        self._state.state(summary.status)
        self._write()

    def _take(self, record: RoundRecord) -> None:
        self._round.labels(self._run).set(record.round)
        for measure in measures_of(record):
            if measure.region is None:
                self._of_run[measure.name].labels(self._run).set(measure.value)
                continue
            labels = (self._run, measure.region)
            self._of_region[measure.name].labels(*labels).set(measure.value)
            if measure.name == "failures":
                self._all_failures.labels(*labels).inc(measure.value)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"regionfed_{name}", text, ["run", *labels], registry=self._registry)

    def _write(self) -> None:
        write_to_textfile(str(self._path), self._registry)
