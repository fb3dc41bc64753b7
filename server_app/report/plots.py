"""The plots of the report, as SVG text that follows the page's fonts and colours.

Matplotlib draws with placeholder colours that are then replaced by the page's CSS variables, so
that one drawing is right in a light and in a dark page. Text stays text: it can be selected, found
and read aloud. The same numbers give the same bytes.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from server_app.wording import epsilon_text, number, percent, shorten, width

# Placeholder -> CSS variable of the page.
INK, MUTED, GRID, PAPER = "#000001", "#000002", "#000003", "#000004"
GLOBAL, PERSONAL, OTHER = "#000005", "#000006", "#000007"
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    PAPER: "var(--card)",
    GLOBAL: "var(--global)",
    PERSONAL: "var(--personal)",
    OTHER: "var(--other)",
}

WIDTH = 340.0  # points; all plots are drawn to one width so that their text has one size
CURVE_HEIGHT = 200.0
LEFT, BOTTOM, EDGE = 38.0, 34.0, 8.0  # room for the labels of the axes, and where none are
TOLD = 12  # regions named in an alternative text
LABEL_CELLS = 16
LETTER = 5.2  # points per cell of a label, generous
SETTINGS: dict[Any, Any] = {  # matplotlib's own type lists all its keys
    "svg.fonttype": "none",
    "text.parse_math": False,  # a region may be called "$x$"
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "figure.facecolor": "none",
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend: a CSS class that draws its swatch, and what it stands for."""

    swatch: str
    label: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing with what a reader needs who cannot see it."""

    title: str
    alt: str
    svg: str
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class RegionPoint:
    """What the plots show of one region."""

    name: str
    global_: float | None
    personalised: float | None
    conflict: float | None
    alpha: float | None


def learning_curves(rows: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Draw the mean and the worst region over rounds, for both models."""
    curves = {
        (model, score): _series(rows, model, score)
        for model in ("global", "personalised")
        for score in ("mean", "rrs")
    }
    if not any(curves.values()):
        return None
    with _axes("curves", CURVE_HEIGHT) as (axes, finish):
        for (model, score), points in curves.items():
            colour, marker = (GLOBAL, "s") if model == "global" else (PERSONAL, "o")
            _line(axes, points, colour, marker, dashed=score == "rrs", scale=100)
        _over_rounds(axes, "accuracy, %")
        svg = finish()
    ends = [
        f"{model} {'mean' if score == 'mean' else 'worst region'} from {percent(points[0][1])} % "
        f"in round {points[0][0]} to {percent(points[-1][1])} % in round {points[-1][0]}"
        for (model, score), points in curves.items()
        if points
    ]
    keys = (
        Key("line personal", "personalised, mean"),
        Key("line personal dashed", "personalised, worst region"),
        Key("line global", "global, mean"),
        Key("line global dashed", "global, worst region"),
    )
    return Plot("Accuracy over rounds", f"Line chart of accuracy: {'; '.join(ends)}.", svg, keys)


def loss_curve(rows: Sequence[Mapping[str, Any]]) -> Plot | None:
    """Draw the training loss over rounds."""
    points = _series(rows, "loss")
    if not points:
        return None
    with _axes("loss", CURVE_HEIGHT) as (axes, finish):
        _line(axes, points, OTHER, "o")
        _over_rounds(axes, "loss, mean over regions")
        svg = finish()
    alt = f"Line chart of the loss, from {number(points[0][1])} to {number(points[-1][1])}."
    return Plot("Loss over rounds", alt, svg)


def epsilon_curve(
    rows: Sequence[Mapping[str, Any]], target: float | None, *, simulated_cohort: bool = False
) -> Plot | None:
    """Draw the epsilon that was spent over rounds, under the one that was planned."""
    points = _series(rows, "epsilon")
    if not points:
        return None
    with _axes("epsilon", CURVE_HEIGHT) as (axes, finish):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.fill_between(xs, ys, color=OTHER, alpha=0.12, linewidth=0)
        _line(axes, points, OTHER, "o")
        if target is not None:
            axes.axhline(target, color=MUTED, linewidth=1.2, dashes=(3, 2.4))
        axes.set_ylim(0, 1.12 * max([*ys, target or 0.0]) or 1.0)
        _over_rounds(axes, "epsilon spent")
        svg = finish()
    cohort = " (simulated cohort)" if simulated_cohort else ""
    spent = f"Line chart of the epsilon spent{cohort}: {epsilon_text(ys[-1])} by round {xs[-1]}"
    planned = f", planned {epsilon_text(target)}." if target is not None else "."
    keys: tuple[Key, ...] = (Key("line other", f"spent{cohort}"),)
    if target is not None:
        keys = (*keys, Key("line muted dashed", f"planned: {epsilon_text(target)}"))
    return Plot("Privacy spent over rounds", spent + planned, svg, keys)


def region_scores(regions: Sequence[RegionPoint]) -> Plot | None:
    """Draw each region's global score, its personalised one, and the way between."""
    scored = [r for r in regions if r.global_ is not None or r.personalised is not None]
    if not scored:
        return None
    with _region_axes("scores", regions) as (axes, finish):
        for y, region in enumerate(regions):
            before, after = _percentage(region.global_), _percentage(region.personalised)
            if before is not None and after is not None:
                colour = PERSONAL if after >= before else GLOBAL
                axes.plot([before, after], [y, y], color=colour, alpha=0.35, linewidth=3)
            if before is not None:
                axes.plot(before, y, "s", color=PAPER, mec=GLOBAL, mew=1.8, ms=5.5)
            if after is not None:
                axes.plot(after, y, "o", color=PERSONAL, mec=PAPER, mew=0.8, ms=7)
            if before is None and after is None:
                axes.text(
                    0.02,
                    y,
                    "no score",
                    color=MUTED,
                    va="center",
                    transform=axes.get_yaxis_transform(),
                )
        axes.margins(x=0.06)
        axes.set_xlabel("accuracy, %")
        svg = finish()
    told = _told(f"{r.name} from {percent(r.global_)} to {percent(r.personalised)}" for r in scored)
    return Plot(
        "Accuracy per region",
        f"Global and personalised accuracy in %, per region: {told}.",
        svg,
        (Key("dot personal", "personalised"), Key("dot global", "global")),
    )


def region_conflict(regions: Sequence[RegionPoint]) -> Plot | None:
    """Draw how far each region is from the others, and the weight that follows from it."""
    known = [r for r in regions if r.conflict is not None or r.alpha is not None]
    if not known:
        return None
    with _region_axes("conflict", regions, panels=2) as (axes, finish):
        left, right = axes.figure.axes
        for y, region in enumerate(regions):
            if region.conflict is not None:
                left.barh(y, region.conflict, height=0.5, color=OTHER, alpha=0.85, linewidth=0)
            if region.alpha is not None:
                right.plot([0, region.alpha], [y, y], color=GRID, linewidth=1.4)
                right.plot(region.alpha, y, "D", color=INK, mec=PAPER, mew=0.8, ms=5.5)
        left.margins(x=0.06)
        left.set_xlabel("conflict")
        alphas = [r.alpha for r in regions if r.alpha is not None]
        right.set_xlim(min([0.45, *(a - 0.05 for a in alphas)]), max([1.03, *alphas]))
        right.set_xlabel("alpha")
        svg = finish()
    told = _told(f"{r.name} {number(r.conflict)} and {number(r.alpha)}" for r in known)
    return Plot(
        "Conflict and weight of the personalisation",
        f"Conflict and alpha per region: {told}.",
        svg,
        (Key("bar other", "conflict"), Key("diamond ink", "alpha")),
    )


Finish = Callable[[], str]


@contextmanager
def _axes(
    name: str, height: float, *, left: float = LEFT, panels: int = 1
) -> Iterator[tuple[Axes, Finish]]:
    """Give axes under our settings, and a function that turns them into SVG."""
    with mpl.rc_context({**SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        # Widths are measured in matplotlib's own font, which lacks many scripts; the page's do not.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
        figure.subplots_adjust(
            left=left / WIDTH,
            right=1 - EDGE / WIDTH,
            bottom=BOTTOM / height,
            top=1 - EDGE / height,
            wspace=0.12,
        )
        yield axes[0], lambda: _svg(figure, name)


@contextmanager
def _region_axes(
    name: str, regions: Sequence[RegionPoint], *, panels: int = 1
) -> Iterator[tuple[Axes, Finish]]:
    """Give axes with one line per region, the first on top."""
    labels = [shorten(region.name, LABEL_CELLS) for region in regions]
    left = 12 + LETTER * max(width(label) for label in labels)
    line = 21 if len(regions) <= 12 else 15
    height = max(len(regions) * line, 60) + BOTTOM + EDGE
    with _axes(name, height, left=left, panels=panels) as (first, finish):
        for axes in first.figure.axes:
            axes.grid(axis="x")
            axes.tick_params(length=0)
            axes.spines["left"].set_visible(False)
            axes.xaxis.set_major_locator(MaxNLocator(5 if panels == 1 else 3))
        first.set_yticks(range(len(labels)), labels)
        first.tick_params(axis="y", labelcolor=INK)
        first.set_ylim(len(labels) - 0.5, -0.5)
        yield first, finish


def _told(parts: Iterable[str]) -> str:
    """Name the first regions in an alternative text, and say how many the table adds."""
    listed = list(parts)
    rest = [f"and {len(listed) - TOLD} more, in the table"] if len(listed) > TOLD else []
    return "; ".join(listed[:TOLD] + rest)


def _series(rows: Sequence[Mapping[str, Any]], *keys: str) -> list[tuple[int, float]]:
    """Return (round, value) for the rounds that have a value under the nested keys."""
    pairs: list[tuple[int, float | None]] = [
        (int(row["round"]), reduce(_within, keys, cast(Any, row))) for row in rows
    ]
    return [(x, y) for x, y in pairs if y is not None]


def _within(tree: Any, key: str) -> Any:
    return tree.get(key) if tree else None


def _line(
    axes: Axes,
    points: Sequence[tuple[int, float]],
    colour: str,
    marker: str,
    *,
    dashed: bool = False,
    scale: float = 1.0,
) -> None:
    """Draw a curve; its points are marked where they are few enough to be told apart."""
    few = len(points) <= 12
    axes.plot(
        [x for x, _ in points],
        [scale * y for _, y in points],
        color=colour,
        marker=marker if few else "",
        markersize=4.5,
        markerfacecolor=PAPER if dashed else colour,
        linestyle=(0, (3, 2.2)) if dashed else "-",
    )


def _over_rounds(axes: Axes, label: str) -> None:
    axes.grid(axis="y")
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("round")
    axes.set_ylabel(label)


def _percentage(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _svg(figure: Figure, name: str) -> str:
    """Render a figure as an SVG element for a page that holds several."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Both would reach out of the drawing: a style is the page's, a description names addresses.
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg[^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', text)
    # Only tags are touched, never what stands between them: a region may be called "#000001".
    return re.sub(r"<[^>]+>", lambda tag: _adapt(tag[0], name), text)


def _adapt(tag: str, name: str) -> str:
    """Make a tag's ids unique in the page and leave its fonts and colours to the page."""
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", tag)
    tag = re.sub(r" ?font-family: [^;\"]*;?", "", tag)
    for placeholder, variable in VARIABLES.items():
        tag = tag.replace(placeholder, variable)
    return tag
