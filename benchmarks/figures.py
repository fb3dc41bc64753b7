"""The pictures of docs/algorithm.md, from runs of the embedded default.

    python -m benchmarks.figures

Implements      what docs/algorithm.md says of signs, alpha, routing and rho, shown on runs: what a
                search for rho sees along either sign, conflicts and weights, routes, rho by round.
Dataset         the embedded retail queries: 8 regions of 10 devices. Runs are short (`RUNS` says
                which have fewer examples): they show how each piece works, not how well the
                whole does, which benchmarks/default.py measures.
Hyperparameters the defaults of `regionfed.config`, except what `COMMON` and `RUNS` say. Nothing is
                noised; samples are drawn from a seed, so that a run can be made again.
Scores          none: nothing is evaluated on held-out examples.
Runs            one per entry of `RUNS`; a result that is there is not run again, so that with the
                JSON in place the command only draws.
"""

import argparse
import io
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from region_app.rho import bracket, possible_points
from region_app.state import RegionState, StateFolder
from regionfed.config import Config
from regionfed.conflict import label_divergence, personalisation_weight
from regionfed.durable import write_atomic
from server_app.checkpoint import load_checkpoint
from server_app.run import execute
from server_app.run_folder import read_rounds

Run = dict[str, Any]
Settings = dict[str, str | int | float]

COMMON: Settings = {
    "privacy-mode": "none",
    "noise-seed": 0,
    "evaluation-privacy": "off",
    "user-steps": 0,
    "workers": 1,
}
# Both signs search as published: seven evaluations of [0, 1] after the last round, without 0. The
# step is such that the best rho of most regions lies within.
SIGNS: Settings = {
    "personaliser": "grad",
    "examples-per-client": 200,
    "rounds": 4,
    "personal-step": 64.0,
    "rho-search": "published",
    "rho-high": 1.0,
    "rho-evaluations": 7,
    "rho-every": 4,
}
RUNS: dict[str, Settings] = {
    "descent": {**SIGNS, "sign": "descent"},
    "published": {**SIGNS, "sign": "published"},
    "dynamic": {"personaliser": "dynamic", "rounds": 2, "rho-every": 0},
    "residual": {
        "personaliser": "residual",
        "examples-per-client": 200,
        "rounds": 8,
        "rho-every": 2,
    },
}
# The colours of the report's light page; a picture keeps its white ground on a dark one.
BLUE, ORANGE, GREEN = "#1667b0", "#b8650a", "#2f7d4f"
INK, MUTED, GREY, LIGHT = "#22252b", "#656a73", "#a3a7ae", "#dcdcda"
ROUTES = {"grad": (BLUE, "o"), "interp": (GREEN, "D"), "meta": (ORANGE, "s")}
WIDTH = 7.2  # inches; all pictures are drawn to one width so that their text has one size
STYLE: dict[Any, Any] = {  # matplotlib's own type lists all its keys
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.0,
    "figure.labelsize": 9.0,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 9.0,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
}


def main() -> None:
    """Run what is missing, then draw."""
    options = _parse()
    path: Path = options.json
    runs: dict[str, Run] = json.loads(path.read_text()) if path.exists() else {}
    for name, settings in RUNS.items():
        if name in runs:
            continue
        print(f"--- {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = measure({**COMMON, **settings, "run-dir": folder})
        write_atomic(path, (json.dumps(runs, indent=1) + "\n").encode())
    for name, figure in draw(runs).items():
        save(figure, options.figures / f"{name}.svg")
        print((options.figures / f"{name}.svg").absolute())


def measure(settings: Mapping[str, str | int | float]) -> Run:
    """Run the job with some settings and return what the pictures need of it."""
    config = Config.from_run_config(settings)
    summary = execute(config, report=False)
    folder = Path(summary.paths["folder"])
    server = load_checkpoint(folder)[1]
    rows = read_rounds(Path(summary.paths["metrics"]))
    states = {
        name: StateFolder(folder / "regions" / name).load(summary.rounds)
        for name in summary.regions
    }
    histograms = [state.histogram for state in states.values() if state]
    world = [sum(counts) for counts in zip(*histograms, strict=True)]
    regions = {
        name: {
            "conflict": _short(record.conflict),
            "alpha": _short(record.alpha),
            "rho": _short(record.rho),
            "route": record.strategy,
            "reason": record.reason,
            "examples": record.examples,
            "divergence": _short(label_divergence(state.histogram, world) if state else None),
        }
        for (name, record), state in zip(summary.regions.items(), states.values(), strict=True)
    }
    return {
        "settings": {key: value for key, value in settings.items() if key != "run-dir"},
        "median": _short(server.centre),
        "spread": _short(server.spread),
        "regions": regions,
        "rho by round": {
            name: [[row["round"], _short(row["regions"][name]["rho"])] for row in rows]
            for name in regions
        },
        "search": _search(config, folder, states),
        "versions": dict(summary.versions),
    }


def _search(
    config: Config, folder: Path, states: Mapping[str, RegionState | None]
) -> dict[str, Any]:
    """Return the points of a published search after the last round and, by region, the votes.

    A vote is the mean change of an example's loss against rho = 0, over a Poisson sample. Each
    example's changes, one per point, are a vector that is cut to length 1.
    """
    if config.rho_search != "published":
        return {}
    points = possible_points(*bracket(0.0, config.rho_high), config.rho_evaluations)
    votes = {}
    for name, state in states.items():
        released = StateFolder(folder / "regions" / name).load_release("votes", config.rounds)
        if released is not None and state is not None:
            batch = config.sampling_rate * state.examples
            votes[name] = [_short(float(vote) / batch) for vote in released[0]["vote"]]
    return {"points": [_short(point) for point in points], "votes": votes}


def _short(value: float | None) -> float | None:
    """Return a number to five digits: more would only be noise of the machine."""
    return None if value is None else float(f"{value:.5g}")


# ------------------------------------------------------------------------------------ drawing
def draw(runs: Mapping[str, Run]) -> dict[str, Figure]:
    """Return by the name of its file every picture whose runs are there."""
    pictures: dict[str, tuple[Callable[..., Figure], tuple[str, ...]]] = {
        "signs": (signs, ("descent", "published")),
        "alpha": (alpha, ("dynamic",)),
        "routing": (routing, ("dynamic",)),
        "rho": (rho_by_round, ("residual",)),
    }
    with mpl.rc_context(STYLE):
        return {
            name: make(*(runs[one] for one in needed))
            for name, (make, needed) in pictures.items()
            if runs.keys() >= set(needed)
        }


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG; the same numbers give the same bytes."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": path.stem}):
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    # Text stays text, in a font that readers have; matplotlib lays out in a slightly wider one.
    text = re.sub(r"'DejaVu Sans'.*?sans-serif", "Helvetica, Arial, sans-serif", buffer.getvalue())
    write_atomic(path, "".join(f"{line.rstrip()}\n" for line in text.splitlines()).encode())


def signs(descent: Run, published: Run) -> Figure:
    """Draw what each region's search saw along either sign, and the rho that it took."""
    figure, panels = _panels(len(descent["regions"]))
    ways = (("descent sign", descent, BLUE, "o"), ("published sign", published, ORANGE, "s"))
    for axes, name in zip(panels, descent["regions"], strict=True):
        axes.axhline(0.0, color=GREY, linewidth=0.8)
        for label, run, colour, marker in ways:
            search = run["search"]
            curve = list(zip(search["points"], search["votes"][name], strict=True))
            axes.plot(*zip((0.0, 0.0), *curve, strict=True), color=colour, label=label)
            taken = run["regions"][name]["rho"]
            mark = min(curve, key=lambda point: abs(point[0] - taken))
            axes.plot(*mark, marker, color=colour, markersize=6, zorder=3)
            axes.annotate(
                f"{taken:.2g}",
                mark,
                xytext=(0, -6 if run is descent else 6),
                textcoords="offset points",
                ha="left" if taken < 0.1 else "right" if taken > 0.9 else "center",
                va="top" if run is descent else "bottom",
                color=colour,
            )
        axes.set_title(name)
        axes.set_xlim(-0.04, 1.04)
        axes.set_xticks([0.0, 0.5, 1.0], ["0", "0.5", "1"])
        axes.margins(y=0.25)
    figure.supxlabel("rho; a mark is where the search ended", color=MUTED)
    figure.supylabel("change of loss, as voted", color=MUTED)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2)
    return figure


def alpha(run: Run) -> Figure:
    """Draw alpha over conflict, with the regions where they stand."""
    config = Config.from_run_config(run["settings"])
    regions = sorted(run["regions"].items(), key=lambda item: float(item[1]["conflict"]))
    middle, spread = run["median"], run["spread"]
    conflicts = [region["conflict"] for _, region in regions]
    low, high = min(conflicts[0], middle) - 2 * spread, max(conflicts[-1], middle) + 2 * spread
    xs = [low + (high - low) * i / 200 for i in range(201)]

    def weight(x: float) -> float:
        return personalisation_weight(x, middle, spread, config.alpha_min, config.alpha_gain)

    figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        xs,
        [
            personalisation_weight(x, middle, spread, config.alpha_min, config.alpha_gain)
            for x in xs
        ],
        color=GREY,
    )
    axes.axvline(middle, color=GREY, linewidth=0.8, dashes=(3, 2.4))
    axes.annotate(
        "median of round 1",
        (middle, 1.0),
        xytext=(-5, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        color=MUTED,
    )
    axes.plot(conflicts, [region["alpha"] for _, region in regions], "o", color=BLUE)
    # The curve rises: there is room above it on the left, and below it on the right.
    for side, members in ((-1, regions[::2]), (1, regions[1::2])):
        heights = spread_out([region["alpha"] + side * -0.025 for _, region in members], 0.035)
        for (name, region), height in zip(members, heights, strict=True):
            axes.annotate(
                f"{name}  {region['alpha']:.2f}",
                (region["conflict"], region["alpha"]),
                xytext=(region["conflict"] + side * 0.3 * spread, height),
                ha="right" if side < 0 else "left",
                va="center",
                arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.8},
            )
    axes.set_ylim(config.alpha_min - 0.03, 1.03)
    axes.set_xlim(low, high)
    axes.set_xlabel(f"conflict, round {config.rounds}")
    axes.set_ylabel("alpha")
    return figure


def routing(run: Run) -> Figure:
    """Draw conflict against the divergence of labels, with the thresholds and the routes."""
    config = Config.from_run_config(run["settings"])
    threshold = config.conflict_threshold * run["median"]
    figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
    axes = figure.subplots()
    axes.axvline(threshold, color=GREY, linewidth=0.8, dashes=(3, 2.4))
    axes.axhline(config.divergence_threshold, color=GREY, linewidth=0.8, dashes=(3, 2.4))
    for route, (colour, marker) in ROUTES.items():
        members = {n: r for n, r in run["regions"].items() if r["route"] == route}
        axes.plot(
            [r["conflict"] for r in members.values()],
            [r["divergence"] for r in members.values()],
            marker,
            color=colour,
            markersize=7,
            label=f"{route}: {len(members)}",
        )
        for name, region in members.items():
            axes.annotate(
                name,
                (region["conflict"], region["divergence"]),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
            )
    axes.margins(0.12)
    axes.set_ylim(bottom=0.0)
    for x, way in ((0.0, "interp if large, else grad"), (1.0, "meta")):
        axes.annotate(
            way,
            (x, 1.0),
            xycoords="axes fraction",
            xytext=(5 - 10 * x, 0),
            textcoords="offset points",
            ha="right" if x else "left",
            va="top",
            color=MUTED,
        )
    axes.set_xlabel(f"conflict, round {config.rounds}")
    axes.set_ylabel("divergence of labels, nats")
    figure.legend(loc="outside upper right", ncols=len(ROUTES))
    return figure


def rho_by_round(run: Run) -> Figure:
    """Draw each region's rho over rounds."""
    every, rounds = run["settings"]["rho-every"], run["settings"]["rounds"]
    figure, panels = _panels(len(run["regions"]))
    for axes, (name, steps) in zip(panels, run["rho by round"].items(), strict=True):
        axes.grid(axis="y", color=LIGHT, linewidth=0.7)
        axes.step(*zip(*steps, strict=True), where="post", color=BLUE)
        searched = [(at, rho) for at, rho in steps if at % every == 0]
        axes.plot(*zip(*searched, strict=True), "o", color=BLUE, markersize=4.5)
        at, rho = steps[-1]
        axes.annotate(
            f"{rho:.2g}",
            (at, rho),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=BLUE,
        )
        axes.set_title(name)
        axes.set_ylim(0.0, 2.1)
        axes.set_yticks([0, 1, 2])
        axes.set_xlim(0.5, rounds + 2.5)
        axes.set_xticks(range(every, rounds + 1, every))
    figure.supxlabel("round; a mark is a search", color=MUTED)
    figure.supylabel("rho", color=MUTED)
    return figure


def spread_out(heights: Sequence[float], least: float) -> list[float]:
    """Return rising heights at least `least` apart, moved up no more than that needs."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + least) if placed else height)
    return placed


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel per region, four in a row, all to one scale."""
    rows = -(-count // 4)
    figure = Figure(figsize=(WIDTH, 0.6 + 1.55 * rows), layout="constrained")
    panels = figure.subplots(rows, 4, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for empty in panels[count:]:
        empty.remove()
    return figure, panels[:count]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/figures.json"))
    parser.add_argument("--figures", type=Path, default=Path("docs/figures"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
