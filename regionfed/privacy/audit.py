"""What ledgers add up to, counted anew: by PLD, by RDP as a check, release by release."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regionfed.privacy.accountant import count_releases, epsilon, epsilon_rdp
from regionfed.privacy.inventory import RELEASES, recipients
from regionfed.privacy.ledger import LedgerEvent
from regionfed.privacy.units import neighbouring_of

# PLD works on a grid of privacy losses: it may stand above RDP by that much and no more.
_GRID = 0.01


@dataclass(frozen=True)
class Spent:
    """Epsilon of the same releases by two accountants that share no code."""

    pld: float
    rdp: float


@dataclass(frozen=True)
class Group:
    """Equal releases of one region.

    Attributes
    ----------
    release, population, unit, to : str
        What, of whose data, of which unit, and who is told first.
    count : int
    first, last : int
        Rounds.
    sampling_rate : float
    noise_multiplier : float
        Of all parts of the release together, z_eff; 0 is no noise.
    parts : tuple of (name, sensitivity, noise multiplier or None)
        Ledgers of earlier versions lack the noise of a part.
    alone : Spent
        Of these releases alone.
    """

    release: str
    population: str
    unit: str
    to: str
    count: int
    first: int
    last: int
    sampling_rate: float
    noise_multiplier: float
    parts: tuple[tuple[str, float, float | None], ...]
    alone: Spent


@dataclass(frozen=True)
class RegionAudit:
    """One region's ledger: its events, in groups, and epsilon by population."""

    region: str
    events: tuple[LedgerEvent, ...]
    groups: tuple[Group, ...]
    spent: Mapping[str, Spent]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """All regions. They hold different people: the largest epsilon is everybody's bound."""

    delta: float
    regions: tuple[RegionAudit, ...]
    spent: Mapping[str, Spent]

    @property
    def problems(self) -> tuple[str, ...]:
        """What an auditor must not sign."""
        return tuple(problem for region in self.regions for problem in region.problems)


def audit(ledgers: Mapping[str, Sequence[LedgerEvent]], delta: float) -> Audit:
    """Count the ledgers of regions anew.

    Parameters
    ----------
    ledgers : Mapping of str to events
        By region.
    delta : float
    """
    regions = tuple(audit_region(name, events, delta) for name, events in ledgers.items())
    populations = dict.fromkeys(p for region in regions for p in region.spent)
    return Audit(
        delta,
        regions,
        {
            p: Spent(
                max(r.spent[p].pld for r in regions if p in r.spent),
                max(r.spent[p].rdp for r in regions if p in r.spent),
            )
            for p in populations
        },
    )


def audit_region(region: str, events: Sequence[LedgerEvent], delta: float) -> RegionAudit:
    """Count one region's ledger anew, and look for what does not fit together."""
    alike: dict[tuple[object, ...], list[LedgerEvent]] = {}
    for event in events:
        alike.setdefault(_kind(event), []).append(event)
    populations = dict.fromkeys(event.population for event in events)
    spent = {p: compose([e for e in events if e.population == p], delta) for p in populations}
    problems = [problem for event in events for problem in _problems(region, event)]
    problems += [
        f"{region}: releases of {population} data are of several units ({', '.join(units)}), whose "
        f"epsilons do not add up to one: start a new run for another unit."
        for population in populations
        if len(units := sorted({e.unit for e in events if e.population == population})) > 1
    ]
    problems += [
        f"{region}: PLD gives epsilon {both.pld:.4g} of {population} data, above RDP's "
        f"{both.rdp:.4g}: one of the two is wrong; report it."
        for population, both in spent.items()
        if both.pld > both.rdp + _GRID
    ]
    return RegionAudit(
        region,
        tuple(events),
        tuple(_group(one, delta) for one in alike.values()),
        spent,
        tuple(dict.fromkeys(problems)),
    )


def compose(events: Sequence[LedgerEvent], delta: float) -> Spent:
    """Return epsilon of releases on one population, by both accountants."""
    counts = count_releases((e.noise_multiplier, e.sampling_rate) for e in events)
    return Spent(epsilon(counts, delta), epsilon_rdp(counts, delta))


def joint_noise(noise: Mapping[str, float]) -> float:
    """Return z_eff = (sum z_i^-2)^-1/2 of parts released over one sample; 0 if one has none."""
    if not noise or min(noise.values()) <= 0.0:
        return 0.0
    return 1.0 / math.sqrt(sum(z**-2 for z in noise.values()))


def _kind(event: LedgerEvent) -> tuple[object, ...]:
    parts = tuple((p, b, event.noise.get(p)) for p, b in event.sensitivity.items())
    return (
        event.release,
        event.population,
        event.unit,
        event.sampling_rate,
        event.noise_multiplier,
        parts,
    )


def _group(events: Sequence[LedgerEvent], delta: float) -> Group:
    one = events[0]
    return Group(
        release=one.release,
        population=one.population,
        unit=one.unit,
        to=recipients(one.sensitivity),
        count=len(events),
        first=min(e.round for e in events),
        last=max(e.round for e in events),
        sampling_rate=one.sampling_rate,
        noise_multiplier=one.noise_multiplier,
        parts=tuple((p, b, one.noise.get(p)) for p, b in one.sensitivity.items()),
        alone=compose(events, delta),
    )


def _problems(region: str, event: LedgerEvent) -> list[str]:
    what = f"{region}, round {event.round}, '{event.release}'"
    said = []
    if event.region != region:
        said.append(f"{what}: the event is of region '{event.region}', in another's ledger.")
    if neighbouring_of(event.unit) == "unknown":
        said.append(f"{what}: nobody knows a unit '{event.unit}'.")
    if unknown := [part for part in event.sensitivity if part not in RELEASES]:
        said.append(f"{what}: {', '.join(unknown)} is in no inventory of releases.")
    if event.noise and set(event.noise) != set(event.sensitivity):
        said.append(f"{what}: noise and sensitivity name other parts.")
    elif event.noise:
        z = joint_noise(event.noise)
        if not math.isclose(z, event.noise_multiplier, rel_tol=1e-9):
            said.append(
                f"{what}: its parts make z_eff {z:.6g}, {event.noise_multiplier:.6g} is said."
            )
    return said
