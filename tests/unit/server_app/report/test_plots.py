"""The drawings are deterministic, follow the page's colours, and hold nothing of outside."""

import re
import xml.etree.ElementTree as ET

import pytest

from server_app.report import plots
from server_app.report.plots import RegionPoint

ROWS = [
    {
        "round": number,
        "loss": 2.0 / number,
        "epsilon": 0.1 * number,
        "global": {"mean": 0.2 * number, "rrs": 0.1 * number} if number % 2 else None,
        "personalised": {"mean": 0.3 * number, "rrs": None} if number % 2 else None,
    }
    for number in (1, 2, 3)
]
REGIONS = [
    RegionPoint("north", 0.5, 0.6, 0.3, 0.7),
    RegionPoint("south", 0.5, 0.4, -0.1, None),
    RegionPoint("never", None, None, None, None),
    RegionPoint('$x$ <b> id="#000001" & 東京', 0.1, None, None, 0.5),
]
DRAWINGS = {
    "curves": lambda: plots.learning_curves(ROWS),
    "loss": lambda: plots.loss_curve(ROWS),
    "epsilon": lambda: plots.epsilon_curve(ROWS, 0.4),
    "scores": lambda: plots.region_scores(REGIONS),
    "conflict": lambda: plots.region_conflict(REGIONS),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_deterministic_and_self_contained(name):
    plot = DRAWINGS[name]()
    assert plot == DRAWINGS[name]()
    assert plot.alt and plot.title
    assert "http" not in plot.svg and "<metadata" not in plot.svg and "<style" not in plot.svg
    assert "font-family" not in plot.svg
    assert not re.search(r"#0000\d\d(?![^<]*</text>)", plot.svg)  # every placeholder was replaced
    assert "var(--" in plot.svg


@pytest.mark.parametrize("name", DRAWINGS)
def test_every_reference_in_a_drawing_has_its_target(name):
    svg = DRAWINGS[name]().svg
    root = ET.fromstring(svg.replace("xlink:href", "href"))
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert all(identifier.startswith(f"{name}-") for identifier in ids)
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', svg)
    assert used and set(used) <= set(ids)


def test_a_name_is_drawn_as_it_is_written():
    root = ET.fromstring(DRAWINGS["scores"]().svg.replace("xlink:href", "href"))
    texts = ["".join(element.itertext()) for element in root.iter("text")]
    assert '$x$ <b> id="#00…' in texts
    assert "no score" in texts


def test_there_is_no_drawing_of_nothing():
    empty = [{"round": 1, "loss": None, "epsilon": None, "global": None, "personalised": None}]
    unknown = [RegionPoint("never", None, None, None, None)]
    for rows in ([], empty, [{"round": 1}]):
        assert plots.learning_curves(rows) is None
        assert plots.loss_curve(rows) is None
        assert plots.epsilon_curve(rows, 4.0) is None
    for regions in ([], unknown):
        assert plots.region_scores(regions) is None
        assert plots.region_conflict(regions) is None


def test_an_alternative_text_tells_the_ends_of_the_curves():
    alt = plots.learning_curves(ROWS).alt
    assert "global mean from 20.0 % in round 1 to 60.0 % in round 3" in alt
    assert "personalised worst region" not in alt  # it has no value


def test_a_simulated_cohort_is_said_at_the_epsilon():
    plot = plots.epsilon_curve(ROWS, None, simulated_cohort=True)
    assert "simulated cohort" in plot.keys[0].label and "simulated cohort" in plot.alt


def test_many_regions_are_all_drawn_and_the_text_stays_short():
    many = [RegionPoint(f"region-{i}", i / 60, i / 50, 0.1, 0.6) for i in range(60)]
    plot = plots.region_scores(many)
    assert all(f">region-{i}<" in plot.svg for i in range(60))
    assert "48 more" in plot.alt


def test_epsilon_zero_can_be_drawn():
    assert plots.epsilon_curve([{"round": 1, "epsilon": 0.0}], None) is not None
