"""``regionfed privacy plan``: epsilon, noise, rounds and sampling before anything runs."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from regionfed.config import Config
from regionfed.errors import PrivacyError
from regionfed.privacy.accountant import ACCOUNTANT
from regionfed.privacy.planner import (
    DROWNED,
    FAINT,
    MOST_ROUNDS,
    PROTECTIONS,
    REPLACE,
    UNITS,
    Forecast,
    Job,
    Plan,
    Protection,
    complete,
    forecast,
)
from regionfed.privacy.unit import NEIGHBOURING
from regionfed.privacy.units import ZERO_OUT
from server_app.cli.command import Command
from server_app.cli.numbers import within
from server_app.wording import epsilon_text

_DEFAULT = Config()
_PARAMETERS = 65_728
_UNITS_PER_REGION = {
    "example": float(_DEFAULT.clients_per_region * _DEFAULT.examples_per_client),
    "client": float(_DEFAULT.clients_per_region),
}
SCOPE = "updates alone; `flwr run` plans what a run releases besides (size, votes, scores) as well"


@dataclass(frozen=True)
class Row:
    """What one kind of unit is promised; `note` says why there is no plan."""

    protection: Protection
    plan: Plan | None
    note: str = ""


def configure(parser: ArgumentParser) -> None:
    """Add the options."""
    asked = parser.add_argument_group("give all but one of these, get that one")
    asked.add_argument(
        "--noise-multiplier", type=within(float, 1e-3, 1e4), help="noise (std) over the clip norm"
    )
    asked.add_argument(
        "--sampling-rate", type=within(float, 1e-6, 1.0), help="chance of a unit to be in a round"
    )
    asked.add_argument("--rounds", type=within(int, 1, MOST_ROUNDS), help="releases")
    asked.add_argument("--target-epsilon", type=within(float, 1e-3, 1e3))
    parser.add_argument(
        "--delta", type=within(float, 1e-15, 0.5), default=_DEFAULT.delta, help="(%(default)g)"
    )
    parser.add_argument("--unit", choices=UNITS, help="who is protected; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    job = parser.add_argument_group("what noise is weighed against (defaults: the default job)")
    job.add_argument("--server-lr", type=within(float, 1e-9, 1e3), default=_DEFAULT.server_lr)
    job.add_argument("--clip-norm", type=within(float, 1e-9, 1e6), default=_DEFAULT.clip_norm)
    job.add_argument(
        "--units-per-region",
        type=within(float, 1.0, 1e12),
        help="examples, or clients, of a region (the default job's: "
        + ", ".join(f"{n:g} {unit}s" for unit, n in _UNITS_PER_REGION.items())
        + ")",
    )
    job.add_argument("--regions", type=within(int, 1, 10_000), default=_DEFAULT.regions)
    job.add_argument(
        "--parameters", type=within(int, 1, 10**12), default=_PARAMETERS, help="weights trained"
    )


def run(options: Namespace) -> int:
    """Complete the plan for each unit, foresee the noise, print both."""
    wanted = Plan(
        epsilon=options.target_epsilon,
        noise_multiplier=options.noise_multiplier,
        rounds=options.rounds,
        sampling_rate=options.sampling_rate,
        delta=options.delta,
    )
    rows = [
        row_of(wanted, protection)
        for protection in PROTECTIONS
        if options.unit in {None, protection.unit}
    ]
    if not any(row.plan for row in rows):
        raise PrivacyError(rows[0].note)
    seen = _forecast(rows, options)
    text = as_json(rows, seen) if options.json else as_text(rows, seen, options)
    sys.stdout.write(text + "\n")
    return 0


def row_of(wanted: Plan, protection: Protection) -> Row:
    """Complete a plan for one kind of unit; what cannot be is said in the row."""
    try:
        return Row(protection, complete(wanted, protection))
    except PrivacyError as error:
        return Row(protection, None, str(error))


@dataclass(frozen=True)
class Seen:
    """A forecast, and how many units a region has in it."""

    unit: str
    units: float
    forecast: Forecast

    def flat(self) -> dict[str, object]:
        """Return all of it side by side."""
        return {"unit": self.unit, "units": self.units, **asdict(self.forecast)}


def _forecast(rows: Sequence[Row], options: Namespace) -> Seen | None:
    """Foresee the noise for units that are clipped by themselves, if there are such."""
    for row in rows:
        if row.plan and row.protection.sampled and row.protection.sensitivity == 1.0:
            units = options.units_per_region or _UNITS_PER_REGION[row.protection.unit]
            job = Job(
                server_lr=options.server_lr,
                clip_norm=options.clip_norm,
                units=units,
                regions=options.regions,
                parameters=options.parameters,
                noise_limit=_DEFAULT.noise_limit,
            )
            return Seen(row.protection.unit, units, forecast(row.plan, job))
    return None


def as_json(rows: Sequence[Row], seen: Seen | None) -> str:
    """Return all of it for programs."""
    return json.dumps(
        {
            "accountant": ACCOUNTANT,
            "scope": SCOPE,
            "plans": [
                {
                    **asdict(row.protection),
                    "sampling": _sampling(row),
                    **(asdict(row.plan) if row.plan else {}),
                    "note": row.note,
                }
                for row in rows
            ],
            "forecast": seen.flat() if seen else None,
        },
        indent=2,
    )


def as_text(rows: Sequence[Row], seen: Seen | None, options: Namespace) -> str:
    """Return the table and the forecast, for people."""
    lines = [
        f"{'unit':8} {'who is protected':44} {'epsilon':>8} {'noise z':>8} {'rounds':>7}  sampling"
    ]
    for row in rows:
        head = f"{row.protection.unit:8} {row.protection.who:44}"
        if row.plan is None:
            lines.append(f"{head} {'–':>8}: {row.note}")
            continue
        plan = row.plan
        lines.append(
            f"{head} {epsilon_text(plan.epsilon, 4):>8} "
            f"{epsilon_text(plan.noise_multiplier, 4):>8} "
            f"{plan.rounds!s:>7}  {_sampling(row)}"
        )
    lines += [
        f"delta {options.delta:g}; neighbours differ in one unit of the row, {NEIGHBOURING} "
        f"(a region: {ZERO_OUT}; which data it has: {REPLACE}); accountant {ACCOUNTANT}. Each is "
        f"protected against everyone outside of its region's coordinator.",
        f"Noise z is its standard deviation over the clip norm. {SCOPE[0].upper()}{SCOPE[1:]}.",
    ]
    if seen:
        lines += _verdict(seen, options)
    return "\n".join(lines)


def _sampling(row: Row) -> str:
    if not row.protection.sampled:
        return "none: all in every round"
    rate = row.plan.sampling_rate if row.plan else None
    return f"Poisson, rate {rate:.4g}" if rate is not None else "Poisson"


def _verdict(found: Seen, options: Namespace) -> list[str]:
    """Say what noise will do, with the numbers and what would help."""
    seen = found.forecast
    lines = [
        f"Forecast for {options.regions} regions of {found.units:g} {found.unit}s, "
        f"{options.parameters:,} weights, server-lr {options.server_lr:g}, clip-norm "
        f"{options.clip_norm:g}: noise of std {seen.noise_per_weight:.3g} on each weight at the "
        f"end; noise on one mean update {seen.noise_to_signal:.3g} times its longest signal."
    ]
    if seen.step_factor < 1.0:
        lines.append(
            f"noise-limit {_DEFAULT.noise_limit:g} cuts steps to {seen.step_factor:.2f} of that."
        )
    said = {
        "clear": "Clear: noise stays below what costs points.",
        "faint": f"WARNING: beyond {FAINT:g} models lost 2 to 5 points.",
        "drowned": f"WARNING: noise will drown the signal: beyond {DROWNED:g} models collapsed.",
    }[seen.verdict]
    if seen.verdict != "clear":
        said += (
            f" For {FAINT:g}: {seen.units_needed:.3g} {found.unit}s a region, or "
            f"{FAINT / seen.noise_per_weight:.2g} times the noise, clip-norm or server-lr."
        )
    return [*lines, said]


COMMAND = Command(
    "Epsilon, noise multiplier, rounds and sampling rate: give all but one, get that one, for\n"
    "each unit that may be protected, and what the noise will do to the model.\n\n"
    "  regionfed privacy plan --noise-multiplier 4 --sampling-rate 0.1 --rounds 50 --delta 1e-5\n"
    "  regionfed privacy plan --target-epsilon 4 --sampling-rate 0.1 --rounds 50 --unit example",
    configure,
    run,
)
