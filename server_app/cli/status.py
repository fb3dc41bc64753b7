"""``regionfed status``: how a run stands, while it goes on and afterwards."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from regionfed.config import Config
from server_app.cli.command import Command
from server_app.progress import Column, change, wrapped
from server_app.run import runs_root
from server_app.run_folder import RunFolder, plain
from server_app.status import RegionStatus, RunStatus, read_status
from server_app.wording import NOTHING, duration, epsilon_text, figures, percent, shorten

TABLE = (
    Column("region", 16, is_text=True),
    Column("round", 6),
    Column("global %", 8),
    Column("personal %", 10),
    Column("alpha", 6),
    Column("epsilon", 8),
    Column("failures", 8),
)


def configure(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "run", nargs="?", default="latest", help="a run's folder, its id, or 'latest' (the default)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> int:
    """Read and tell."""
    status = read_status(RunFolder.open(options.run, runs_root(Config())))
    text = as_json(status) if options.json else as_text(status)
    sys.stdout.write(text + "\n")
    return 0


def as_json(status: RunStatus) -> str:
    """Return all of it for programs."""
    return json.dumps(plain(status), ensure_ascii=False, indent=2)


def as_text(status: RunStatus) -> str:
    """Return it for people: the run, then a line for each region."""
    lines = [f"{'run':<15}{status.folder}", *wrapped("state", _state(status))]
    if (last := status.last) is not None:
        lines += wrapped(
            "last round",
            f"{len(last.answered)} of {len(last.regions)} regions answered, in "
            f"{duration(last.seconds)}; loss {figures(last.loss)}",
        )
    lines += [*_scores(status), *wrapped("privacy", status.privacy)]
    if status.regions:
        lines += ["", _line([column.title for column in TABLE]), *map(_region, status.regions)]
    failures = [region.last_failure for region in status.regions if region.last_failure]
    if failures:
        lines += ["", "last failures"]
    for failure in failures:
        lines += wrapped(shorten(failure.region, 14), f"round {failure.round}: {failure.reason}")
    return "\n".join(lines)


def _state(status: RunStatus) -> str:
    """Say how far the run is, and how long ago that was."""
    ago = duration(status.seconds_ago)
    so_far = f"{status.state}: round {status.round} of {status.rounds}, {ago} ago"
    if status.state == "silent":
        return (
            f"{so_far}, and a round may last {duration(status.limit)}: it was killed, or its "
            f"machine stands still."
        )
    return f"{so_far}. {status.reason}" if status.reason else so_far


def _scores(status: RunStatus) -> list[str]:
    global_, personal = status.global_, status.personalised
    if global_ is None or personal is None:
        return wrapped("scores", "not evaluated yet")
    named = f" ({shorten(personal.worst, 24)})" if personal.worst else ""
    return [
        *wrapped(
            "mean accuracy", f"{change(global_.mean, personal.mean)}, round {status.scored_in}"
        ),
        *wrapped("worst region", change(global_.rrs, personal.rrs) + named),
    ]


def _region(region: RegionStatus) -> str:
    return _line(
        [
            region.region,
            NOTHING if region.last_round is None else str(region.last_round),
            percent(region.global_),
            percent(region.personalised),
            figures(region.alpha),
            epsilon_text(region.epsilon),
            str(region.failures),
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return "  ".join(c.fit(cell) for c, cell in zip(TABLE, cells, strict=True)).rstrip()


COMMAND = Command(
    "How a run stands: running, silent (killed?), finished, stopped or failed; its last round and\n"
    "scores; for each region the last round that it answered, alpha, epsilon and failures.\n\n"
    "  regionfed status\n"
    "  regionfed status --json runs/latest\n"
    "  watch -n 60 regionfed status",
    configure,
    run,
)
