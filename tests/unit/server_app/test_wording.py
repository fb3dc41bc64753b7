"""Numbers for people: never too little epsilon, never wider than their place."""

import doctest
import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regionfed import records
from server_app import wording
from server_app.report import report


@pytest.mark.parametrize("module", [wording, records, report])
def test_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


@given(st.floats(1e-12, 1e12))
def test_epsilon_is_never_understated_and_close(epsilon):
    shown = Decimal(wording.epsilon_text(epsilon))
    assert Decimal(repr(epsilon)) <= shown <= Decimal(repr(epsilon)) * Decimal("1.01")


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [
        (0.0, "0"),
        (8.6, "8.60"),
        (4, "4.00"),
        (3.9999, "4.00"),
        (0.00012341, "1.24e-4"),
        (math.inf, "infinite"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_epsilon_by_example(epsilon, shown):
    assert wording.epsilon_text(epsilon).replace("E", "e") == shown


@given(st.floats(0, allow_nan=False))
def test_a_duration_takes_at_most_six_cells(seconds):
    assert len(wording.duration(seconds)) <= 6


def test_durations_change_unit_where_the_next_one_begins():
    assert wording.duration(5999.4) == "99:59"
    assert wording.duration(6000) == "1h40m"
    assert wording.duration(-1) == wording.duration(math.nan) == wording.duration(None) == "–"


@given(st.text(), st.integers(1, 30))
def test_a_shortened_text_is_one_printable_line_that_fits(text, cells):
    short = wording.shorten(text, cells)
    assert wording.width(short) <= cells
    assert short.isprintable()


def test_a_gain_agrees_with_the_percentages_beside_it():
    # 50.04 and 50.06 are shown as 50.0 and 50.1.
    assert wording.points(0.5004, 0.5006) == "+0.1"
    assert wording.points(0.5, 0.5) == "±0.0"
    assert wording.points(0.6, 0.5) == "−10.0"
    assert wording.points(None, 0.5) == "–"
