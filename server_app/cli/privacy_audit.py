"""``regionfed privacy audit``: what a run has released, counted anew from its ledgers."""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from regionfed.config import Config
from regionfed.errors import RunError
from regionfed.privacy.accountant import ACCOUNTANT, CROSS_CHECK
from regionfed.privacy.audit import Audit, Group, RegionAudit, Spent, audit
from regionfed.privacy.ledger import read_ledger
from regionfed.privacy.plan import HELD_OUT, TRAIN
from regionfed.privacy.units import neighbouring_of
from server_app.cli.command import Command
from server_app.cli.numbers import within
from server_app.run import runs_root
from server_app.run_folder import RunFolder, plain
from server_app.wording import epsilon_text

# Summary and audit use one accountant on the same releases: they agree to the last digits or not.
_SAME = 1e-6


@dataclass(frozen=True)
class Claim:
    """What the summary says of a population, beside what the ledgers add up to."""

    population: str
    said: float | None
    found: float
    agrees: bool
    verdict: str


def configure(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--run", default="latest", help="a run's folder, its id, or 'latest' (the default)"
    )
    parser.add_argument(
        "--ledger",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a region's ledger.jsonl, where it is not below the run's folder; may be repeated",
    )
    parser.add_argument("--delta", type=within(float, 1e-15, 0.5), help="default: the run's own")
    parser.add_argument("--events", action="store_true", help="print every single event as well")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> int:
    """Read, count, compare; the exit status is 1 if anything does not agree."""
    folder = RunFolder.open(options.run, runs_root(Config()))
    summary = _summary(folder)
    config = summary.get("config") or {}
    delta = options.delta or config.get("delta") or Config().delta
    paths = options.ledger or sorted((folder.path / "regions").glob("*/ledger.jsonl"))
    if not paths:
        raise RunError(
            f"{folder.path} has no ledger below regions/: a region that keeps its own hands its "
            f"ledger.jsonl over, --ledger FILE."
        )
    found = audit({path.parent.name: read_ledger(path) for path in paths}, delta)
    claims = claims_of(summary, found) if summary and options.delta is None else []
    notes = notes_of(summary, found)
    problems = [*found.problems, *(c.verdict for c in claims if not c.agrees)]
    if options.json:
        text = as_json(found, claims, notes, problems)
    else:
        text = as_text(folder, found, claims, notes, problems, events=options.events)
    sys.stdout.write(text + "\n")
    return 1 if problems else 0


def _summary(folder: RunFolder) -> Mapping[str, Any]:
    if not folder.summary.is_file():
        return {}
    try:
        found: Mapping[str, Any] = json.loads(folder.summary.read_text("utf-8"))
    except ValueError as error:
        raise RunError(
            f"cannot read {folder.summary}: {error}. Restore it, or delete it."
        ) from error
    return found


def claims_of(summary: Mapping[str, Any], found: Audit) -> list[Claim]:
    """Compare what the summary says with what the ledgers add up to.

    A summary without an epsilon claims no privacy: releases without noise agree with it.
    """
    said = {
        TRAIN: (summary.get("privacy") or {}).get("epsilon"),
        HELD_OUT: (summary.get("evaluation") or {}).get("epsilon"),
    }
    return [_claim(p, said[p], found.spent[p].pld) for p in said if p in found.spent]


def _claim(population: str, said: float | None, found: float) -> Claim:
    if said is None:
        agrees = math.isinf(found)
        told = "none"
    else:
        agrees = math.isclose(said, found, rel_tol=_SAME, abs_tol=_SAME)
        told = f"{said:.6g}"
    verdict = f"{population} data: the summary says epsilon {told}, the ledgers {found:.6g}"
    if agrees:
        return Claim(population, said, found, True, f"{verdict}: they agree.")
    less = said is not None and said < found
    why = (
        "It is understated: a region has charged what the server never heard of (a round that was "
        "interrupted, or whose answer was lost). The ledgers hold."
        if less
        else "A ledger is missing or has lost events: find it."
    )
    return Claim(population, said, found, False, f"{verdict}. {why}")


def notes_of(summary: Mapping[str, Any], found: Audit) -> list[str]:
    """Return what no epsilon says and an auditor has to know."""
    config = summary.get("config") or {}
    notes = []
    if not summary:
        notes.append("The run has no summary.json (running, or killed): nothing to compare with.")
    elif missing := sorted(set(summary.get("regions") or {}) - {r.region for r in found.regions}):
        notes.append(f"No ledger of {', '.join(missing)}: what they released is not counted.")
    if config.get("noise-seed", -1) >= 0:
        notes.append("The noise was seeded (noise-seed): whoever knows the seed removes it.")
    if config.get("user-scores") == "panel":
        notes.append(
            "Scores of the panel's own models left without noise, by consent; they depend on "
            "training examples and are in no epsilon here."
        )
    for region in found.regions:
        for group in region.groups:
            rounds = group.last - group.first + 1
            if group.count > rounds and "gradient" not in {p for p, *_ in group.parts}:
                notes.append(
                    f"{region.region}: '{group.release}' was charged {group.count} times in "
                    f"{rounds} rounds: a crash wasted privacy, all of it is counted."
                )
    return notes


def as_json(
    found: Audit, claims: Sequence[Claim], notes: Sequence[str], problems: Sequence[str]
) -> str:
    """Return all of it for programs; an infinite epsilon is null."""
    whole = {
        "delta": found.delta,
        "neighbouring": {unit: neighbouring_of(unit) for unit in _units(found)},
        "accountant": ACCOUNTANT,
        "cross_check": CROSS_CHECK,
        "overall": {p: asdict(s) for p, s in found.spent.items()},
        "regions": [asdict(region) for region in found.regions],
        "claims": [asdict(claim) for claim in claims],
        "notes": notes,
        "problems": problems,
    }
    return json.dumps(plain(whole), ensure_ascii=False, indent=2)


def as_text(
    folder: RunFolder,
    found: Audit,
    claims: Sequence[Claim],
    notes: Sequence[str],
    problems: Sequence[str],
    *,
    events: bool,
) -> str:
    """Return the audit for people: each region, then all, then what does not fit."""
    lines = [
        f"{folder.path}",
        f"delta {found.delta:g}; {_relations(found)}; accountant {ACCOUNTANT}, "
        f"checked by {CROSS_CHECK}. What is released was noised by a region's {_noised_by(found)}.",
    ]
    for region in found.regions:
        lines += ["", *_region_lines(region, events=events)]
    lines.append("")
    for population, spent in found.spent.items():
        lines.append(f"overall, {population} data: {_both(spent)} (the largest of any region)")
    lines += [claim.verdict for claim in claims if claim.agrees]
    lines += [f"note: {note}" for note in notes]
    lines += [f"PROBLEM: {problem}" for problem in problems]
    return "\n".join(lines)


def _units(found: Audit) -> list[str]:
    return sorted({event.unit for region in found.regions for event in region.events})


def _relations(found: Audit) -> str:
    """Say what neighbours differ in, for each unit that was charged."""
    return "; ".join(f"{neighbouring_of(unit)} one {unit}" for unit in _units(found))


def _noised_by(found: Audit) -> str:
    """Say who drew the noise, and against whom it is there: what holds for every event."""
    if {bool(event.drawn) for region in found.regions for event in region.events} == {True}:
        return "devices, against everyone outside of a device, their coordinator included"
    return "coordinator, against everyone outside of it"


def _region_lines(region: RegionAudit, *, events: bool) -> list[str]:
    lines = [f"{region.region}: the coordinator released, of its devices' data,"]
    lines += [f"  {_group_line(group)}" for group in region.groups]
    if events:
        lines += [
            f"    round {e.round:>4}  {e.release}: {e.population}, unit {e.unit}, "
            f"z {e.noise_multiplier:.4g}, sampling {e.sampling_rate:g}, sensitivity "
            + ", ".join(f"{part} {bound:.3g}" for part, bound in e.sensitivity.items())
            + (f"; {e.drawn}" if e.drawn else "")
            for e in region.events
        ]
    lines += [f"  {population} data: {_both(spent)}" for population, spent in region.spent.items()]
    return lines


def _group_line(group: Group) -> str:
    parts = ", ".join(
        f"{name} (sensitivity {bound:.3g}" + ("" if z is None else f", z {z:.4g}") + ")"
        for name, bound, z in group.parts
    )
    joint = "z_eff" if len(group.parts) > 1 else "z"
    sampling = (
        "all, no amplification"
        if group.sampling_rate == 1.0
        else f"Poisson {group.sampling_rate:g}"
    )
    rounds = f"round {group.first}" + (f" to {group.last}" if group.last > group.first else "")
    return (
        f"{group.count} x {group.release} to {group.to}, {rounds}: {parts}; {joint} "
        f"{group.noise_multiplier:.4g}; {sampling}; unit {group.unit}, {group.population} data; "
        f"alone {_both(group.alone)}"
    )


def _both(spent: Spent) -> str:
    return f"epsilon {epsilon_text(spent.pld, 4)} by PLD, {epsilon_text(spent.rdp, 4)} by RDP"


COMMAND = Command(
    "Everything that a run has released, from the ledgers of its regions: who released what to\n"
    "whom, under which noise and sampling, and what it adds up to by two accountants. Says\n"
    "whether the summary agrees; the exit status is 1 if it does not.\n\n"
    "  regionfed privacy audit --run runs/latest\n"
    "  regionfed privacy audit --ledger uk/ledger.jsonl --delta 1e-5 --events",
    configure,
    run,
)
