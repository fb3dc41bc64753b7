"""Reads what a run wrote and renders its page.

Everything may be missing: a run that was killed has no summary, one without evaluation no scores,
and a region may never have answered. The page then says so in place of the number.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from regionfed.errors import RunError
from server_app import wording
from server_app.report import plots
from server_app.report.template import PAGE, STYLE
from server_app.run_folder import RunFolder, read_rounds, write_text_atomic

MOST_FAILURES = 200

RELEASES = {
    "noised": "released under noise",
    "panel": "measured on a panel that agreed to it",
    "off": "not released",
}

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Banner:
    """Something that nobody may overlook; `kind` is ``"alarm"`` or ``"note"``."""

    kind: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Region:
    """One row of the table of regions."""

    name: str
    record: Json
    tasks: Sequence[tuple[float | None, float | None]]

    @property
    def global_(self) -> float | None:
        """Mean score of the global model."""
        return _scores(self.record, "global").get("mean")

    @property
    def personalised(self) -> float | None:
        """Mean score of the personalised model."""
        return _scores(self.record, "personalised").get("mean")

    @property
    def user(self) -> float | None:
        """Mean score of its users' own models."""
        return _scores(self.record, "user").get("mean")


def write_report(folder: Path) -> Path:
    """Write ``report.html`` from the run's ``summary.json`` and ``metrics.jsonl``.

    The same two files give the same page, byte for byte.

    Raises
    ------
    RunError
        If the folder holds neither file, or one that cannot be read.
    """
    run = RunFolder(folder.resolve())
    if not run.summary.exists() and not run.metrics.exists():
        raise RunError(
            f"nothing to report in {run.path}: expected {run.summary.name} or {run.metrics.name}; "
            f"give the folder of a run that has completed a round"
        )
    try:
        summary = json.loads(run.summary.read_text("utf-8")) if run.summary.exists() else {}
        rows = read_rounds(run.metrics)
    except (ValueError, KeyError) as error:
        raise RunError(f"cannot read the results in {run.path}: {error}") from error
    write_text_atomic(run.report, render(run.path.name, summary, rows))
    return run.report


def render(name: str, summary: Json, rows: Sequence[Json]) -> str:
    """Return the page of a run as HTML that needs no other file."""
    regions = table_of_regions(summary, rows)
    failures = summary.get("failures") or [f for row in rows for f in row.get("failures") or ()]
    privacy = summary.get("privacy") or {}
    events = privacy.get("events") or ()
    scores = {model: _score(summary, rows, model) for model in ("global", "personalised")}
    page = _environment().from_string(PAGE)
    return page.render(
        name=name,
        style=Markup(STYLE),  # noqa: S704 (a constant of ours)
        status=summary.get("status") or "no summary",
        rounds=summary.get("rounds") or len(rows),
        planned=rows[-1].get("rounds") if rows else None,
        seconds=summary.get("seconds") or sum(row.get("seconds") or 0 for row in rows),
        seed=summary.get("seed"),
        banners=banners(summary),
        scores=scores,
        user=_score(summary, rows, "user").get("mean"),
        worst=scores["personalised"].get("worst") or scores["global"].get("worst"),
        privacy=privacy,
        epsilon=_epsilon(privacy, rows),
        terms=terms(privacy),
        evaluation=summary.get("evaluation") or {},
        releases=RELEASES,
        plots=_plots(summary, rows, regions),
        tasks=_tasks(summary, rows),
        regions=regions,
        events=events,
        columns=columns(events),
        numeric=_numeric(events),
        failures=failures[:MOST_FAILURES],
        failures_in_all=len(failures),
        details=[
            ("Configuration", flatten(summary.get("config") or {})),
            ("Versions", summary.get("versions") or {}),
            ("Files", summary.get("paths") or {}),
        ],
    )


def banners(summary: Json) -> list[Banner]:
    """Return what must be said before any number."""
    status, reason = summary.get("status"), summary.get("reason") or "No reason was recorded."
    privacy = summary.get("privacy") or {}
    epsilon = wording.epsilon_text(privacy.get("epsilon"))
    said = []
    if status is None:
        said.append(
            Banner(
                "alarm",
                "This run has no summary",
                "It is still running or was killed; what follows is what its rounds wrote down.",
            )
        )
    elif status != "finished":
        said.append(Banner("alarm", f"This run {_ended(status)}", reason))
    if privacy.get("mode") == "none":
        said.append(
            Banner(
                "alarm",
                "No differential privacy",
                "Nothing that left a region was protected by noise. Never run this way on the data "
                "of people who were promised privacy.",
            )
        )
    if privacy.get("noise_seeded"):
        said.append(
            Banner(
                "alarm",
                "The noise was seeded for a test",
                "Whoever knows the seed can take the noise away again: the epsilon below protects "
                "nobody. Run without a noise seed for a result that holds.",
            )
        )
    if privacy.get("simulated_cohort"):
        said.append(
            Banner(
                "note",
                "Simulated cohort",
                f"The noise was scaled to a larger cohort than took part. Epsilon {epsilon} is "
                "what that cohort would have; it is not a guarantee to the devices of this run.",
            )
        )
    return said


def table_of_regions(summary: Json, rows: Sequence[Json]) -> list[Region]:
    """Return all regions, best first, those without a score last.

    What the summary does not know is taken from the last round.
    """
    tasks = _tasks(summary, rows)
    found = [
        Region(
            name,
            record,
            [
                (_scores(record, "global").get(task), _scores(record, "personalised").get(task))
                for task in tasks
            ],
        )
        for name, record in _records(summary, rows).items()
    ]

    def rank(region: Region) -> tuple[bool, float]:
        score = region.personalised if region.personalised is not None else region.global_
        return score is None, -(score or 0.0)

    return sorted(found, key=rank)


def terms(privacy: Json) -> list[tuple[str, str]]:
    """Return what the epsilon means, without which it says nothing."""
    if privacy.get("mode") == "none":
        return [("Mode", "none: no noise was added")]
    cohort = " (simulated cohort)" if privacy.get("simulated_cohort") else ""
    return [
        ("Mode", cell(privacy.get("mode"))),
        ("Unit", cell(privacy.get("unit"))),
        ("Epsilon", wording.epsilon_text(privacy.get("epsilon")) + cohort),
        ("Planned epsilon", wording.epsilon_text(privacy.get("target_epsilon"))),
        ("Delta", wording.number(privacy.get("delta"))),
        ("Accountant", cell(privacy.get("accountant"))),
        ("Sampling", cell(privacy.get("sampling"))),
        ("Neighbouring", cell(privacy.get("neighbouring"))),
        ("Noise multiplier", cell(privacy.get("noise_multiplier"))),
        ("Clip norm", cell(privacy.get("clip_norm"))),
    ]


def columns(events: Sequence[Json]) -> list[str]:
    """Return the keys of the events in the order in which they first appear."""
    return list(dict.fromkeys(key for event in events for key in event))


def flatten(tree: Json, prefix: str = "") -> dict[str, object]:
    """Write nested mappings with dotted keys.

    >>> flatten({"privacy": {"mode": "example"}, "rounds": 3})
    {'privacy.mode': 'example', 'rounds': 3}
    """
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def cell(value: object) -> str:
    """Write any value of a table."""
    match value:
        case None | "" | []:
            return wording.NOTHING
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}".replace(",", "\u202f")
        case float():
            return wording.number(value, 4)
        case list():
            return ", ".join(map(cell, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def title_of(key: str) -> str:
    """Make a column's title of a key; a lone symbol stays as it is.

    >>> title_of("released_by"), title_of("z")
    ('Released by', 'z')
    """
    words = key.replace("_", " ").replace("-", " ")
    return words if len(words) == 1 else words[:1].upper() + words[1:]


def _environment() -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "percent": wording.percent,
        "epsilon": wording.epsilon_text,
        "duration": wording.duration,
        "number": wording.number,
        "figures": wording.figures,
        "cell": cell,
        "title_of": title_of,
        "drawing": Markup,
    }
    environment.globals |= {"points": wording.points, "nothing": wording.NOTHING}
    return environment


def _plots(
    summary: Json, rows: Sequence[Json], regions: Sequence[Region]
) -> list[list[plots.Plot]]:
    """Return the plots that there is something to draw for, in rows of two."""
    points = [
        plots.RegionPoint(
            region.name,
            region.global_,
            region.personalised,
            region.record.get("conflict"),
            region.record.get("alpha"),
        )
        for region in regions
    ]
    privacy = summary.get("privacy") or {}
    over_rounds = [
        plots.learning_curves(rows),
        plots.epsilon_curve(
            rows,
            privacy.get("target_epsilon"),
            simulated_cohort=bool(privacy.get("simulated_cohort")),
        ),
        plots.loss_curve(rows),  # seen where one of the others has nothing to draw
    ]
    per_region = [plots.region_scores(points), plots.region_conflict(points)]
    drawn = ([plot for plot in row if plot] for row in (over_rounds, per_region))
    return [row[:2] for row in drawn if row]


def _records(summary: Json, rows: Sequence[Json]) -> dict[str, Json]:
    last = (rows[-1].get("regions") or {}) if rows else {}
    return {
        name: record or {} for name, record in {**last, **(summary.get("regions") or {})}.items()
    }


def _tasks(summary: Json, rows: Sequence[Json]) -> list[str]:
    names = (
        task
        for record in _records(summary, rows).values()
        for model in ("global", "personalised")
        for task in _scores(record, model)
    )
    return [task for task in dict.fromkeys(names) if task != "mean"]


def _score(summary: Json, rows: Sequence[Json], model: str) -> Json:
    """Return the final score of a model: the summary's, or that of the last evaluation."""
    told = [row.get(model) for row in rows if row.get(model)]
    return summary.get(model) or (told[-1] if told else None) or {}


def _epsilon(privacy: Json, rows: Sequence[Json]) -> float | None:
    """Return what was spent: as the summary has it, or as the last round had it."""
    told: float | None = privacy.get("epsilon")
    return told if told is not None or not rows else rows[-1].get("epsilon")


def _numeric(events: Sequence[Json]) -> set[str]:
    """Return the keys under which the events hold nothing but numbers."""
    return {
        key
        for key in columns(events)
        if all(isinstance(event.get(key), int | float | None) for event in events)
    }


def _scores(record: Json, model: str) -> Json:
    return record.get(model) or {}


def _ended(status: str) -> str:
    return {"stopped": "was stopped", "failed": "failed"}.get(status, f"ended as “{status}”")
