"""The pictures of docs/algorithm.md are drawn from numbers alone, and say what they show."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import figures

NAMES = ("north", "south", "$x$")
ROOT = Path(__file__).resolve().parents[3]


def run(way=1.0):
    points = [0.25, 0.5, 0.75]
    regions = {
        name: {
            "conflict": 0.01 * (i + 1),
            "alpha": 0.6 + 0.1 * i,
            "rho": points[i],
            "route": ("grad", "interp", "meta")[i],
            "divergence": 0.1 * i,
        }
        for i, name in enumerate(NAMES)
    }
    return {
        "settings": {"rounds": 2, "rho-every": 1},
        "median": 0.02,
        "spread": 0.01,
        "regions": regions,
        "rho by round": {name: [[1, 1.0], [2, 0.5]] for name in NAMES},
        "search": {"points": points, "votes": {n: [way * 0.1, way * 0.2, 0.0] for n in NAMES}},
    }


RUNS = {"descent": run(-1.0), "published": run(), "dynamic": run(), "residual": run()}


def texts(path):
    root = ET.fromstring(path.read_text().replace("xlink:href", "href"))
    return {"".join(e.itertext()).strip() for e in root.iter("{http://www.w3.org/2000/svg}text")}


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("signs", {*NAMES, "descent sign", "published sign", "change of loss, as voted", "0.25"}),
        ("alpha", {"north  0.60", "south  0.70", "$x$  0.80", "median of round 1", "alpha"}),
        ("routing", {*NAMES, "grad: 1", "interp: 1", "meta: 1", "conflict, round 2"}),
        ("rho", {*NAMES, "rho"}),
    ],
)
def test_a_picture_has_its_labels_and_the_same_bytes_each_time(tmp_path, name, labels):
    path = tmp_path / f"{name}.svg"
    figures.save(figures.draw(RUNS)[name], path)
    assert labels <= texts(path)
    first = path.read_bytes()
    figures.save(figures.draw(RUNS)[name], path)
    assert path.read_bytes() == first
    assert len(first) < 80_000
    assert b"<dc:" not in first  # neither a date nor a maker


def test_labels_keep_their_distance():
    assert figures.spread_out([0.0, 0.05, 1.0], 0.1) == [0.0, 0.1, 1.0]
    assert figures.spread_out([], 0.1) == []


def test_every_run_has_known_settings():
    for settings in figures.RUNS.values():
        figures.Config.from_run_config({**figures.COMMON, **settings})


def test_the_documents_pictures_are_those_of_the_committed_numbers(tmp_path):
    runs = json.loads((ROOT / "benchmarks/results/figures.json").read_text())
    shown = re.findall(r"\]\(figures/(\w+)\.svg\)", (ROOT / "docs/algorithm.md").read_text())
    drawn = figures.draw(runs)
    assert sorted(shown) == sorted(drawn)
    for name, figure in drawn.items():
        figures.save(figure, tmp_path / f"{name}.svg")
        assert texts(tmp_path / f"{name}.svg") == texts(ROOT / f"docs/figures/{name}.svg")
