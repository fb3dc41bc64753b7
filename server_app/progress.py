"""What a run says while it works: one line per round, then where its results are."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from regionfed.records import PrivacySummary, RoundRecord, Score, Summary
from server_app.run_folder import RunFolder
from server_app.wording import (
    NOTHING,
    duration,
    epsilon_text,
    number,
    percent,
    points,
    shorten,
    width,
)

COLUMNS = 100
STALE = "·"  # before a score that an earlier round measured
RECENT = 20  # rounds that the time left is estimated from


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its title, its cells, and whether text or numbers stand in it."""

    title: str
    cells: int
    is_text: bool = False

    def fit(self, value: str) -> str:
        """Shorten or pad a value to the column."""
        short = shorten(value, self.cells)
        padding = " " * (self.cells - width(short))
        return short + padding if self.is_text else padding + short


TABLE = (
    Column("round", 11),
    Column("regions", 7),
    Column("loss", 10),
    Column("global %", 8),
    Column("personal %", 10),
    Column("worst region", 16, is_text=True),
    Column("worst %", 7),
    Column("epsilon", 8),
    Column("left", 6),
)


def header_line(*, simulated_cohort: bool = False) -> str:
    """Return the titles of the columns; a simulated cohort is said wherever epsilon is."""
    titles = [column.title for column in TABLE]
    if simulated_cohort:
        titles[titles.index("epsilon")] = "eps(sim)"
    return _join(titles)


def round_line(
    row: RoundRecord, *, last: RoundRecord | None = None, seconds_left: float | None = None
) -> str:
    """Return one line of at most `COLUMNS` cells.

    Parameters
    ----------
    row : RoundRecord
        The round to tell.
    last : RoundRecord or None
        The latest round with an evaluation: its scores are shown, marked with a middle dot,
        where `row` has none.
    seconds_left : float or None
        Estimate for the rest of the run.
    """
    global_, global_mark = _latest(row.global_, last.global_ if last else None)
    personal, personal_mark = _latest(row.personalised, last.personalised if last else None)
    worst, worst_mark = (personal, personal_mark) if personal else (global_, global_mark)
    return _join(
        [
            f"{row.round}/{row.rounds}",
            f"{len(row.answered)}/{len(row.regions)}",
            _loss(row.loss),
            global_mark + percent(global_.mean if global_ else None),
            personal_mark + percent(personal.mean if personal else None),
            (worst.worst if worst else None) or NOTHING,
            worst_mark + percent(worst.rrs if worst else None),
            epsilon_text(row.epsilon),
            duration(seconds_left),
        ]
    )


def seconds_left(durations: Sequence[float], remaining: int) -> float | None:
    """Estimate the rest of a run from its recent rounds; evaluated rounds weigh as they occur."""
    recent = durations[-RECENT:]
    return sum(recent) / len(recent) * remaining if recent else None


def final_lines(summary: Summary, folder: RunFolder) -> list[str]:
    """Return how the run ended, its headline result, and the absolute paths of its files."""
    ending = f"{summary.status} after {summary.rounds} rounds in {duration(summary.seconds)}"
    global_, personal = summary.global_, summary.personalised
    named = f" ({shorten(personal.worst, 24)})" if personal.worst else ""
    lines = [
        *wrapped("run", f"{ending}: {summary.reason}" if summary.reason else ending),
        *wrapped("mean accuracy", change(global_.mean, personal.mean)),
        *wrapped("worst region", change(global_.rrs, personal.rrs) + named),
        *_users(summary),
        *wrapped("privacy", privacy_statement(summary.privacy)),
    ]
    if summary.failures:
        lines += wrapped("failures", f"{len(summary.failures)}, listed in the report")
    # A path is never wrapped: it must survive being copied.
    paths = {"report": folder.report, "summary": folder.summary, "metrics": folder.metrics}
    return [*lines, *(f"{title:<15}{path.absolute()}" for title, path in paths.items())]


def privacy_statement(privacy: PrivacySummary) -> str:
    """Say in a sentence what was spent, and that nothing was protected where that is so."""
    if privacy.mode == "none":
        return "NONE: nothing that left a region was protected by noise."
    said = privacy.statement or (
        f"epsilon {epsilon_text(privacy.epsilon)} at delta {number(privacy.delta)}, "
        f"unit {privacy.unit or 'unknown'}."
    )
    if privacy.noise_seeded:
        return f"NOISE WAS SEEDED FOR A TEST, so this does not hold: {said}"
    return f"Simulated cohort: {said}" if privacy.simulated_cohort else said


class Progress:
    """Tells a run round by round; remembers the last evaluation and how long rounds take.

    Parameters
    ----------
    write : Callable[[str], None]
        Takes one line at a time, for instance ``logger.info``.
    simulated_cohort : bool
        Whether epsilon is for a larger cohort than takes part.
    """

    def __init__(self, write: Callable[[str], None], *, simulated_cohort: bool = False) -> None:
        self._write = write
        self._simulated_cohort = simulated_cohort
        self._durations: list[float] = []
        self._last: RoundRecord | None = None

    def round(self, row: RoundRecord) -> None:
        """Tell one round, under a header if it is the first."""
        if not self._durations:
            self._write(header_line(simulated_cohort=self._simulated_cohort))
        self._durations.append(row.seconds)
        if row.global_ or row.personalised:
            self._last = row
        left = seconds_left(self._durations, row.rounds - row.round)
        self._write(round_line(row, last=self._last, seconds_left=left))

    def finish(self, summary: Summary, folder: RunFolder) -> None:
        """Tell how the run ended and where its files are."""
        for line in final_lines(summary, folder):
            self._write(line)


def _latest(fresh: Score | None, last: Score | None) -> tuple[Score | None, str]:
    return (fresh, "") if fresh or not last else (last, STALE)


def _loss(value: float | None) -> str:
    return f"{value:.4f}" if value is not None and abs(value) < 1e4 else number(value)


def _join(values: Sequence[str]) -> str:
    cells = (column.fit(value) for column, value in zip(TABLE, values, strict=True))
    return "  ".join(cells).rstrip()


def change(before: float | None, after: float | None) -> str:
    """Say what a score was and what personalisation made of it."""
    if before is None and after is None:
        return "not evaluated"
    return (
        f"global {percent(before)} % -> personalised {percent(after)} % "
        f"({points(before, after)} points)"
    )


def _users(summary: Summary) -> list[str]:
    own, region = summary.user, summary.personalised
    if own is None:
        return []
    return wrapped(
        "user level",
        f"users' own models {percent(own.mean)} % ({points(region.mean, own.mean)} points over the "
        f"personalised); worst region {percent(own.rrs)} %",
    )


def wrapped(title: str, text: str) -> list[str]:
    """Return a text under a title beside it, in lines that a terminal shows."""
    return textwrap.wrap(
        f"{title:<15}{text}",
        COLUMNS,
        subsequent_indent=" " * 15,
        drop_whitespace=True,
        break_on_hyphens=False,
    )
