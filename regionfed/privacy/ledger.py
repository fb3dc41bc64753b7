"""The ledger: every data-dependent release, written durably before it leaves.

One JSON object a line, append-only, flushed to the disk before `charge` returns. A line that a
crash cut short belongs to a release that never left, and does not count.

Epsilon never goes down: each charge reads the file anew under a lock, so that two processes on one
ledger count each other's releases, and refuses a file that has lost events.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from regionfed.durable import append_line, exclusive, read_lines
from regionfed.errors import PrivacyError
from regionfed.privacy.accountant import Counts, count_releases, epsilon


@dataclass(frozen=True)
class LedgerEvent:
    """One release; see `regionfed.privacy.mechanism.GaussianSum` for the fields.

    Attributes
    ----------
    noise_multiplier : float
        Of all parts together.
    sensitivity, noise : dict of str to float
        Part to its L2 bound and to its own noise multiplier. Ledgers of earlier versions lack
        the latter.
    drawn : str
        Who drew the noise, where it was not the coordinator alone.
    """

    round: int
    region: str
    release: str
    population: str
    unit: str
    sampling_rate: float
    noise_multiplier: float
    sensitivity: dict[str, float]
    noise: dict[str, float] = field(default_factory=dict)
    drawn: str = ""


class Ledger:
    """The releases of one region, with a budget for each population.

    Parameters
    ----------
    path : Path
        File to append to; what it holds already counts (epsilon never goes down).
    delta : float
    budgets : dict of str to float
        Population to the epsilon that it may reach; inf where privacy is off.
    """

    def __init__(self, path: Path, delta: float, budgets: dict[str, float]) -> None:
        self._path = path
        self._delta = delta
        self._budgets = budgets
        path.parent.mkdir(parents=True, exist_ok=True)
        self._events = _read(path)

    @property
    def events(self) -> tuple[LedgerEvent, ...]:
        """All releases so far, oldest first."""
        return tuple(self._events)

    def epsilon(self, population: str) -> float:
        """Return epsilon spent on a population; inf when something left it without noise."""
        return epsilon(self._counts(population), self._delta)

    def charge(self, event: LedgerEvent) -> None:
        """Record a release that is about to be made.

        Raises
        ------
        PrivacyError
            If the population's epsilon would exceed its budget, or the file has lost events;
            nothing is recorded then.
        """
        with exclusive(self._path):
            self._catch_up()
            self._charge(event)

    def _catch_up(self) -> None:
        """Take in what others have charged; what was known must still be there."""
        found = _read(self._path)
        if found[: len(self._events)] != self._events:
            raise PrivacyError(
                f"{self._path}: releases that were recorded are gone ({len(self._events)} known, "
                f"{len(found)} found). Restore the file: without it epsilon would be understated."
            )
        self._events = found

    def _charge(self, event: LedgerEvent) -> None:
        after = epsilon(self._counts(event.population, event), self._delta)
        # An inf budget is privacy switched off, and allows releases without noise.
        budget = self._budgets[event.population]
        if after > budget:
            raise PrivacyError(
                f"region {event.region}, round {event.round}: releasing '{event.release}' would "
                f"bring epsilon to {after:.4g}, over the {budget:.4g} that this run may spend on "
                f"{event.population} data. Raise target-epsilon in a new run, or stop here."
            )
        append_line(self._path, json.dumps(asdict(event)))
        self._events.append(event)

    def _counts(self, population: str, *more: LedgerEvent) -> Counts:
        return count_releases(
            (e.noise_multiplier, e.sampling_rate)
            for e in (*self._events, *more)
            if e.population == population
        )


def read_ledger(path: Path) -> tuple[LedgerEvent, ...]:
    """Return the releases that a ledger holds, oldest first.

    Raises
    ------
    PrivacyError
        If there is no such file, or a line of it is no event.
    """
    if not path.is_file():
        raise PrivacyError(f"no ledger {path}: give the ledger.jsonl of a region's coordinator.")
    return tuple(_read(path))


def _read(path: Path) -> list[LedgerEvent]:
    events: list[LedgerEvent] = []
    try:
        for line in read_lines(path):
            events.append(_event(json.loads(line)))  # noqa: PERF401 (its length is the line number)
    except (ValueError, TypeError) as error:
        # Bytes that are no text are found before any line is read.
        where = "" if isinstance(error, UnicodeDecodeError) else f", line {len(events) + 1}"
        raise PrivacyError(
            f"{path}{where}: not a ledger event ({error}). The ledger must not be "
            f"edited: restore it, or start a new run."
        ) from error
    return events


def _event(values: Any) -> LedgerEvent:
    """Return the event of a line, if every value is one that a mechanism could have written."""
    if not isinstance(values, dict):
        raise TypeError(f"expected an object, got {type(values).__name__}")
    event = LedgerEvent(**values)
    texts = (event.region, event.release, event.population, event.unit, event.drawn)
    if type(event.round) is not int or not all(isinstance(text, str) for text in texts):
        raise TypeError("round is no whole number, or a name is no text")
    _numbers("noise", event.noise)
    _numbers("sensitivity", event.sensitivity)
    _numbers("rate and noise", {"q": event.sampling_rate, "z": event.noise_multiplier})
    if event.sampling_rate > 1.0:
        raise ValueError(f"sampling rate {event.sampling_rate}")
    return event


def _numbers(what: str, values: object) -> None:
    if not isinstance(values, Mapping):
        raise TypeError(f"{what}: {values!r}")
    for value in values.values():
        if type(value) not in {int, float} or not 0.0 <= float(str(value)) < math.inf:
            raise ValueError(f"{what}: {value!r}")
