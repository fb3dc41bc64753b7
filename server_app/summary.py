"""The summary of a run, from its configuration, its plan and the rounds written down."""

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, cast

import regionfed
from regionfed.config import Config
from regionfed.privacy.accountant import ACCOUNTANT
from regionfed.privacy.mechanism import GaussianSum
from regionfed.privacy.plan import (
    HELD_OUT,
    TRAIN,
    PrivacyPlan,
    other_epsilons,
    region_epsilon,
    score_columns,
    spent_on,
    uses,
)
from regionfed.privacy.units import UNITS
from regionfed.records import (
    EvaluationSummary,
    Failure,
    PrivacySummary,
    RegionRecord,
    RoundRecord,
    Score,
    Status,
    Summary,
    mean_and_rrs,
    mean_of,
)
from regionfed.secure_aggregation.terms import excess_of
from server_app.federation import Federation
from server_app.run_folder import RunFolder


def summarise(
    config: Config,
    federation: Federation,
    folder: RunFolder,
    rows: Sequence[RoundRecord],
    *,
    status: Status,
    reason: str,
    seconds: float,
) -> Summary:
    """Return the summary of a run after the rounds in `rows`."""
    last = rows[-1] if rows else None
    regions: Mapping[str, RegionRecord] = (
        last.regions if last else {name: RegionRecord() for name in federation.regions.values()}
    )
    done = last.round if last else 0
    return Summary(
        status=status,
        reason=reason,
        rounds=done,
        seed=config.seed,
        config=config.to_run_config(),
        versions=versions(),
        global_=mean_and_rrs(_means(regions, "global_")),
        personalised=mean_and_rrs(_means(regions, "personalised")),
        regions=regions,
        privacy=_privacy(config, federation, done, spent_by(rows, federation.plan)),
        evaluation=_evaluation(config, federation.plan, done),
        failures=[failure for row in rows for failure in row.failures],
        seconds=seconds,
        paths={
            "folder": str(folder.path),
            "report": str(folder.report),
            "summary": str(folder.summary),
            "metrics": str(folder.metrics),
        },
        user=_user(regions),
    )


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": platform.python_version(), "regionfed": regionfed.__version__}
    for package in ("flwr", "torch", "transformers", "dp-accounting"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # pragma: no cover - a dependency of this package
            found[package] = "unknown"
    return found


def record_of(row: Mapping[str, Any]) -> RoundRecord:
    """Read a round back from a line of ``metrics.jsonl``."""
    regions = {
        name: RegionRecord(**{_field(k): v for k, v in region.items()})
        for name, region in row["regions"].items()
    }
    failures = [Failure(**failure) for failure in row["failures"]]
    return RoundRecord(
        round=row["round"],
        rounds=row["rounds"],
        answered=row["answered"],
        failures=failures,
        loss=row["loss"],
        global_=_score(row["global"]),
        personalised=_score(row["personalised"]),
        user=_score(row.get("user")),
        regions=regions,
        epsilon=row["epsilon"],
        seconds=row["seconds"],
    )


def _score(values: Mapping[str, Any] | None) -> Score | None:
    return None if values is None else Score(**values)


def _field(key: str) -> str:
    return "global_" if key == "global" else key


def _means(regions: Mapping[str, RegionRecord], which: str) -> dict[str, float | None]:
    scores = {name: getattr(record, which) for name, record in regions.items()}
    return {name: mean_of(tasks) for name, tasks in scores.items()}


def _users_statement(config: Config) -> str:
    if not config.user_steps:
        return ""
    if score_columns(config, config.rounds) == 3:
        return " Each device scores its user's own model for its user alone."
    return " The panel consented to exact scores of its members' own models too."


def _user(regions: Mapping[str, RegionRecord]) -> Score | None:
    score = mean_and_rrs(_means(regions, "user"))
    return score if score.mean is not None else None


def _privacy(config: Config, federation: Federation, rounds: int, spent: float) -> PrivacySummary:
    plan = federation.plan
    if config.privacy_mode == "none":
        return PrivacySummary(
            mode="none",
            clip_norm=config.clip_norm,
            noise_multiplier=0.0,
            unit=plan.unit.protects,
            statement="Privacy was switched off: updates left the regions without noise.",
        )
    unit = plan.unit
    units = {unit.protects: spent, **other_epsilons(config, plan, rounds)}
    whole = ""
    if UNITS[config.unit].promises_region_too:
        region = region_epsilon(config, plan, rounds)
        units |= {"region emptied": region.emptied, "region replaced": region.replaced}
        whole = (
            f" For a region as a whole, of its updates and gradients alone: epsilon "
            f"{_up(region.emptied)} for whether its mean is of data or zero, "
            f"{_up(region.replaced)} for which data it has; that it takes part is known; loss, "
            f"size and votes promise a region nothing."
        )
    elif len(units) > 1:
        whole = (
            " By the same releases: "
            + ", ".join(
                f"epsilon {_up(value)} for {'one' if name == 'example' else 'a'} {name}"
                for name, value in units.items()
                if name != unit.protects
            )
            + "."
        )
    return PrivacySummary(
        mode=config.privacy_mode,
        epsilon=spent,
        delta=config.delta,
        unit=unit.protects,
        sampling=unit.sampling_words(config.sampling_rate),
        neighbouring=unit.neighbouring,
        accountant=ACCOUNTANT,
        noise_multiplier=plan.update.noise_multiplier,
        clip_norm=config.clip_norm,
        events=_events(config, plan, rounds),
        statement=(
            f"{guarantee(config, spent)}{whole}{_distributed(config, federation)}"
            f"{_panel_exception(config, plan)}"
        ),
        target_epsilon=plan.budgets[TRAIN],
        noise_seeded=config.noise_seed >= 0,
        units=units,
    )


def guarantee(config: Config, spent: float) -> str:
    """Say what an epsilon promises to whom, with all that it means nothing without."""
    return f"({_up(spent)}, {config.delta:g})-DP for {meaning(config)}."


def meaning(config: Config) -> str:
    """Say what every epsilon of a run is of, and how it is counted; its delta stands apart."""
    unit = UNITS[config.unit]
    return (
        f"{unit.whom} against {_adversary(config)}; {unit.neighbouring}; "
        f"{unit.sampling_words(config.sampling_rate)}; accountant {ACCOUNTANT}"
    )


def _adversary(config: Config) -> str:
    if config.secure_aggregation == "off":
        return "everyone outside of its region's coordinator"
    return "everyone outside of its device, its region's coordinator included"


def _distributed(config: Config, federation: Federation) -> str:
    """Say what the guarantee rests on where devices draw the noise, and how much more there is."""
    if config.secure_aggregation == "off":
        return ""
    most = max(excess_of(config, n) for n in federation.devices.values())
    return (
        f" Devices draw the noise and mask what they send. It is never less than accounted while "
        f"at most {config.tolerated_dropouts:.0%} of a region's devices drop out and "
        f"{config.tolerated_colluders:.0%} collude with the coordinator (each rounded down to "
        f"whole devices), and up to {most:.3g} times as much."
    )


def spent_by(rows: Sequence[RoundRecord], plan: PrivacyPlan) -> float:
    """Return the most that any round has reported: what is spent stays spent.

    A round that no region answered reports nothing, and that is not an epsilon of 0. Where none
    ever did, regions may still have charged: what they may spend at most is the bound.
    """
    known = [row.epsilon for row in rows if row.epsilon is not None]
    return max(known, default=plan.budgets[TRAIN] if rows else 0.0)


def _up(epsilon_: float) -> str:
    """Write an epsilon with three decimals, rounded up: what is claimed is never too little."""
    return f"{math.ceil(1000.0 * epsilon_ - 1e-9) / 1000.0:.3f}"


def _panel_exception(config: Config, plan: PrivacyPlan) -> str:
    if plan.unit.holds_both and config.evaluation_privacy == "panel":
        return (
            f" Not covered: exact scores on held-out examples of a consenting panel, which belong "
            f"to a {plan.unit.protects} too."
        )
    if score_columns(config, config.rounds) == 3:
        return ""
    return (
        " Not covered: the scores of the panel's own models, which are exact and depend on its "
        "members' training examples."
    )


def _events(config: Config, plan: PrivacyPlan, rounds: int) -> list[dict[str, object]]:
    """Say what each region has released so far; its ledger holds every single event."""
    by = "each region's " + ("coordinator" if config.secure_aggregation == "off" else "devices")
    return [_event_row(m, count, by) for m, count in uses(config, plan, rounds) if count]


def _event_row(mechanism: GaussianSum, count: int, by: str) -> dict[str, object]:
    inside = {"vote", "gradient"} & {part.name for part in mechanism.parts}
    return {
        "release": mechanism.release,
        "by": by,
        "to": "coordinator" if inside else "server",
        "count": count,
        "noise multiplier": mechanism.noise_multiplier,
        "sampling rate": mechanism.sampling_rate,
        "bounds": ", ".join(f"{part.name} {part.bound:.3g}" for part in mechanism.parts),
        "population": mechanism.population,
    }


def _evaluation(config: Config, plan: PrivacyPlan, rounds: int) -> EvaluationSummary:
    users = _users_statement(config)
    release = cast(Literal["noised", "panel", "off"], config.evaluation_privacy)
    if release != "noised":
        statements = {
            "panel": "Exact scores of held-out examples, from a panel whose members consented "
            "to that; they are nobody's training data.",
            "off": "No score left a region.",
        }
        return EvaluationSummary(release, statement=statements[release] + users)
    mechanism = plan.scores
    if plan.unit.holds_both:
        return EvaluationSummary(
            release,
            statement=(
                f"Sums over held-out examples were noised (noise multiplier "
                f"{mechanism.noise_multiplier:.3g}). They are of the same {plan.unit.protects}s "
                f"that are trained on, so that the epsilon above has them in it.{users}"
            ),
        )
    return EvaluationSummary(
        release,
        epsilon=spent_on(HELD_OUT, uses(config, plan, rounds), config.delta),
        delta=config.delta,
        statement=(
            f"Sums over held-out examples were noised (noise multiplier "
            f"{mechanism.noise_multiplier:.3g}). No example is both in {TRAIN} and {HELD_OUT} "
            f"data, so this epsilon does not add to the other.{users}"
        ),
    )
