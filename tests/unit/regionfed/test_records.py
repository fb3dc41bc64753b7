"""Scores over regions and tasks, when some of them are missing."""

import math

import pytest

from regionfed.records import Score, mean_and_rrs, with_mean


def test_mean_and_worst_region():
    score = mean_and_rrs({"north": 0.5, "south": 0.25, "west": 0.75})
    assert score == Score(mean=0.5, rrs=0.25, worst="south")


def test_regions_without_a_score_count_neither_as_zero_nor_as_worst():
    score = mean_and_rrs({"north": 0.5, "south": None, "west": math.nan})
    assert score == Score(mean=0.5, rrs=0.5, worst="north")


@pytest.mark.parametrize("scores", [{}, {"north": None}, {"north": math.nan}])
def test_nothing_known_is_nothing_said(scores):
    assert mean_and_rrs(scores) == Score(None, None, None)


def test_a_score_of_zero_is_a_score():
    assert mean_and_rrs({"north": 0.0, "south": 0.5}) == Score(0.25, 0.0, "north")


def test_the_order_of_the_regions_does_not_change_a_bit():
    values = [0.1, 0.7, 1e-17, 0.3, 1e16, -1e16]
    forward = mean_and_rrs({str(i): v for i, v in enumerate(values)})
    backward = mean_and_rrs({str(i): v for i, v in reversed(list(enumerate(values)))})
    assert forward.mean == backward.mean


def test_the_mean_over_tasks_leaves_out_a_task_without_test_examples():
    assert with_mean({"intent": 0.5, "spelling": None}) == {
        "intent": 0.5,
        "spelling": None,
        "mean": 0.5,
    }
    assert with_mean({"intent": None})["mean"] is None
    with pytest.raises(ValueError, match="rename the task"):
        with_mean({"mean": 0.5})
