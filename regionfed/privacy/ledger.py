"""The ledger: every data-dependent release, written durably before it leaves.

One JSON object a line, append-only, flushed to the disk before `charge` returns. A line that a
crash cut short belongs to a release that never left, and does not count.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from regionfed.durable import append_line, read_lines
from regionfed.errors import PrivacyError
from regionfed.privacy.accountant import Counts, count_releases, epsilon


@dataclass(frozen=True)
class LedgerEvent:
    """One release; see `regionfed.privacy.mechanism.GaussianSum` for the fields."""

    round: int
    region: str
    release: str
    population: str
    unit: str
    sampling_rate: float
    noise_multiplier: float
    sensitivity: dict[str, float]


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
            If the population's epsilon would exceed its budget; nothing is recorded then.
        """
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


def _read(path: Path) -> list[LedgerEvent]:
    events = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            events.append(LedgerEvent(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise PrivacyError(
                f"{path}, line {number}: not a ledger event ({error}). The ledger must not be "
                f"edited: restore it, or start a new run."
            ) from error
    return events
