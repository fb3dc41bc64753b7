"""How a run stands, from what is on the disk: in its course, after it, and when it was killed."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from regionfed.config import Config
from regionfed.errors import RunError
from regionfed.privacy.units import UNITS
from regionfed.records import (
    Failure,
    PrivacySummary,
    RegionRecord,
    RoundRecord,
    Score,
    Status,
    mean_of,
)
from server_app.checkpoint import NAME, load_config
from server_app.progress import privacy_statement
from server_app.run_folder import RunFolder, read_rounds
from server_app.summary import guarantee, record_of

State = Status | Literal["running", "silent"]


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """Where one region stands.

    Attributes
    ----------
    last_round : int or None
        The last round whose update was used; None before the first.
    global_, personalised : float or None
        Scores at the last evaluation that it answered, mean over tasks.
    failures : int
        Answers that did not count.
    last_failure : Failure or None
    """

    region: str
    last_round: int | None
    global_: float | None
    personalised: float | None
    alpha: float | None
    epsilon: float | None
    failures: int
    last_failure: Failure | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands.

    Attributes
    ----------
    state : State
        How it ended; ``"running"``; or ``"silent"``: it has not ended, and nothing came of it for
        longer than a round may last, as when it was killed.
    reason : str
        Why it did not finish.
    round, rounds : int
        Completed, and planned.
    seconds_ago : float
        Since the last round was over, or since the start.
    limit : float
        Seconds that a round may last.
    last : RoundRecord or None
    scored_in : int or None
        Round of the last evaluation; `global_` and `personalised` are its scores.
    epsilon : float or None
        The most that any region has spent on its training examples.
    delta, unit, privacy : float, str, str
        What epsilon means; `privacy` says all of it in a sentence.
    """

    run: str
    folder: Path
    state: State
    reason: str
    round: int
    rounds: int
    seconds_ago: float
    limit: float
    last: RoundRecord | None
    scored_in: int | None
    global_: Score | None
    personalised: Score | None
    epsilon: float | None
    delta: float
    unit: str
    privacy: str
    regions: Sequence[RegionStatus]


def read_status(folder: RunFolder, now: float | None = None) -> RunStatus:
    """Read how a run stands at the moment `now` (seconds since 1970; by default this one).

    Raises
    ------
    RunError
        If the folder is none of a run, or a file of it is damaged.
    """
    rows = [record_of(row) for row in read_rounds(folder.metrics)]
    summary = _summary(folder)
    if not (folder.path / NAME).is_file():
        raise RunError(
            f"{folder.path} is no folder of a run, or its first round has not begun: there is no "
            f"{NAME}. Of a region's own folder, `regionfed privacy audit --ledger` tells epsilon."
        )
    config = load_config(folder.path)
    last = rows[-1] if rows else None
    done = last.round if last else 0
    if summary.get("rounds") != done:
        summary = {}  # of an earlier stop: it has gone on since
    sign = folder.metrics if rows else folder.path / NAME
    ago = max((time.time() if now is None else now) - sign.stat().st_mtime, 0.0)
    limit = 2.0 * config.round_timeout + config.join_timeout
    scored = next((row for row in reversed(rows) if row.global_ or row.personalised), None)
    spent = max((row.epsilon for row in rows if row.epsilon is not None), default=None)
    return RunStatus(
        run=folder.path.name,
        folder=folder.path,
        state=summary.get("status") or ("running" if ago <= limit else "silent"),
        reason=summary.get("reason") or "",
        round=done,
        rounds=config.rounds,
        seconds_ago=ago,
        limit=limit,
        last=last,
        scored_in=scored.round if scored else None,
        global_=scored.global_ if scored else None,
        personalised=scored.personalised if scored else None,
        epsilon=spent,
        delta=config.delta,
        unit=UNITS[config.unit].protects,
        privacy=_privacy(config, summary, spent),
        regions=[_region(name, own, rows) for name, own in (last.regions if last else {}).items()],
    )


def _summary(folder: RunFolder) -> Mapping[str, Any]:
    try:
        text = folder.summary.read_text("utf-8") if folder.summary.exists() else "{}"
        found: Mapping[str, Any] = json.loads(text)
    except ValueError as error:
        raise RunError(
            f"cannot read {folder.summary}: {error}. Restore it, or delete it."
        ) from error
    return found


def _privacy(config: Config, summary: Mapping[str, Any], spent: float | None) -> str:
    """Say what was spent: as the summary does, or so far."""
    if said := summary.get("privacy"):
        return privacy_statement(PrivacySummary(**said))
    if config.privacy_mode != "none" and spent is None:
        return f"nothing was reported yet; the run may spend epsilon {config.target_epsilon:g}."
    return privacy_statement(
        PrivacySummary(
            mode=config.privacy_mode,
            statement=f"so far {guarantee(config, spent or 0.0)}",
            noise_seeded=config.noise_seed >= 0,
        )
    )


def _region(name: str, own: RegionRecord, rows: Sequence[RoundRecord]) -> RegionStatus:
    failures = [failure for row in rows for failure in row.failures if failure.region == name]
    return RegionStatus(
        region=name,
        last_round=max((row.round for row in rows if name in row.answered), default=None),
        global_=mean_of(own.global_),
        personalised=mean_of(own.personalised),
        alpha=own.alpha,
        epsilon=own.epsilon,
        failures=len(failures),
        last_failure=failures[-1] if failures else None,
    )
