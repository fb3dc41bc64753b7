"""The page that goes with an exported model: what it is, what protects whom, how good it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regionfed.config import Config
from server_app.result import GLOBAL, RegionModel, RunResult
from server_app.wording import number, percent, points

Json = Mapping[str, Any]


def card_facts(result: RunResult, model: RegionModel) -> dict[str, Any]:
    """Return what the page says, for programs; privacy word by word as the run's summary has it."""
    summary = result.summary
    record = (summary.get("regions") or {}).get(model.name) or {}
    state = model.state
    return {
        "run": result.folder.path.name,
        "status": summary.get("status"),
        "rounds": result.rounds,
        "region": model.name,
        "alpha": state.alpha if state else None,
        "rho": state.rho if state else None,
        "examples": record.get("examples"),
        "scores": _scores(summary, record, model),
        "privacy": summary.get("privacy"),
        "evaluation": summary.get("evaluation"),
        "config": result.config.to_run_config(),
        "versions": summary.get("versions"),
    }


def model_card(facts: Json, usages: Mapping[str, str]) -> str:
    """Return the page as Markdown, with the front matter that Hugging Face reads.

    Parameters
    ----------
    facts : Mapping
        From `card_facts`.
    usages : Mapping of str to str
        Each task's code that loads the folder and answers a query.
    """
    region = facts["region"]
    whole = region == GLOBAL
    config = Config.from_run_config(facts["config"])
    title = "the global model" if whole else f"region {region}"
    formula = "`theta`, the model of all regions" if whole else "`theta + alpha_r * theta_r`"
    weights = (
        ""
        if whole
        else f" with alpha_r = {number(facts['alpha'])} and rho = {number(facts['rho'])}"
    )
    examples = ""
    if facts["examples"] is not None:
        noised = " (its size as released, with noise)" if config.privacy_mode != "none" else ""
        examples = f"; this region has {facts['examples']:,} examples{noised}"
    hub = _HUB.get(config.task, Hub())
    shown = dict(list(usages.items())[:1]) if hub.alike else usages
    parts = [
        _FRONT.format(pipeline=hub.pipeline),
        f"# RegionFed: {title}",
        f"{formula}{weights}, after {facts['rounds']} rounds of run `{facts['run']}` "
        f"({facts['status'] or 'unfinished'}).",
        "## How to load it",
        "This folder is all that it takes, with `folder` its path"
        + (", for each task:" if len(shown) > 1 else ":"),
        *_code(shown),
        hub.asked.format(tasks=", ".join(f"`{task}`" for task in usages)),
        "## Privacy",
        *_privacy(facts["privacy"] or {}),
        "## Data",
        f"Dataset `{config.dataset}`: {config.regions} regions of {config.clients_per_region} "
        f"devices{examples}. No example left its device.",
        "## Scores",
        *_table(facts, whole),
        "## How it was made",
        f"RegionFed {_versions(facts)}. Every setting of the run is in `regionfed.json`, beside "
        f"this page.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


@dataclass(frozen=True)
class Hub:
    """What a page says of a task: its line for Hugging Face, and how a query is put.

    Of a task of one's own it says neither. Where all tasks are `alike` but for their names, the
    code of one will do.
    """

    pipeline: str = ""
    asked: str = ""
    alike: bool = False


_HUB = {
    "text-to-text": Hub(
        "\npipeline_tag: text2text-generation",
        "A query is asked as `task: query`; the tasks are {tasks}.",
        alike=True,
    ),
    "labels": Hub(
        "\npipeline_tag: token-classification",
        "One head has the labels of all tasks: those of a task begin with its name.",
    ),
}

_FRONT = """\
---
library_name: transformers{pipeline}
tags:
- federated-learning
- differential-privacy
- regionfed
---"""


def _scores(summary: Json, record: Json, model: RegionModel) -> dict[str, Any]:
    if model.name != GLOBAL:
        return {key: record.get(key) for key in (GLOBAL, "personalised")}
    return {GLOBAL: summary.get(GLOBAL)}


def _code(usages: Mapping[str, str]) -> Sequence[str]:
    """Return each task's code, under its name if there are several."""
    blocks = {task: f"```python\n{usage}\n```" for task, usage in usages.items()}
    if len(blocks) == 1:
        return list(blocks.values())
    return [f"### {task}\n\n{block}" for task, block in blocks.items()]


def _privacy(privacy: Json) -> Sequence[str]:
    if not privacy:
        return ["The run has no summary, so nothing is claimed."]
    warnings = {
        "noise_seeded": "**The noise was seeded for a test: what follows does not hold.**",
        "simulated_cohort": "**Simulated cohort: the noise was scaled to more people than took "
        "part; what follows is not a guarantee to them.**",
    }
    return [*(text for key, text in warnings.items() if privacy.get(key)), privacy["statement"]]


def _table(facts: Json, whole: bool) -> Sequence[str]:
    scores = facts["scores"]
    said = (facts["evaluation"] or {}).get("statement", "")
    before = scores[GLOBAL]
    if not before:
        return ["It was not evaluated.", said]
    if whole:
        return [
            f"Mean over regions {percent(before.get('mean'))} %, worst region "
            f"{percent(before.get('rrs'))} % ({before.get('worst') or 'unknown'}), on held-out "
            f"examples.",
            said,
        ]
    after = scores["personalised"] or {}
    rows = [
        f"| {task} | {percent(before.get(task))} | {percent(after.get(task))} | "
        f"{points(before.get(task), after.get(task))} |"
        for task in before
    ]
    head = "| task | global % | this model % | points |\n|---|---|---|---|\n"
    return [f"On held-out examples of {facts['region']}:", head + "\n".join(rows), said]


def _versions(facts: Json) -> str:
    found = dict(facts["versions"] or {})
    own = found.pop("regionfed", "of an unknown version")
    others = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"{own} ({others})" if others else str(own)
