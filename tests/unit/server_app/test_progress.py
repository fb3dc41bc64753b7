"""The progress lines fit a terminal and say what a reader must not miss."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regionfed.records import (
    EvaluationSummary,
    Failure,
    PrivacySummary,
    RegionRecord,
    RoundRecord,
    Score,
    Summary,
)
from server_app.progress import (
    COLUMNS,
    Progress,
    final_lines,
    header_line,
    privacy_statement,
    round_line,
    seconds_left,
)
from server_app.run_folder import RunFolder
from server_app.wording import width

REGIONS = {"north": RegionRecord(), "south": RegionRecord()}
EVALUATED = RoundRecord(
    4,
    40,
    ("north", "south"),
    loss=2.5,
    global_=Score(0.51, 0.418, "north"),
    personalised=Score(0.63, 0.59, "south"),
    regions=REGIONS,
    epsilon=0.684,
    seconds=10.0,
)
UNEVALUATED = RoundRecord(5, 40, ("north",), regions=REGIONS, epsilon=0.7, seconds=10.0)

anything = st.none() | st.floats()
scores = st.none() | st.builds(Score, anything, anything, st.none() | st.text())


@given(
    st.builds(
        RoundRecord,
        round=st.integers(0, 10**12),
        rounds=st.integers(0, 10**12),
        answered=st.lists(st.text(), max_size=3),
        loss=anything,
        global_=scores,
        personalised=scores,
        epsilon=st.none() | st.floats(0),
    ),
    anything,
)
def test_a_line_fits_whatever_happened(row, left):
    line = round_line(row, last=EVALUATED, seconds_left=left)
    assert width(line) <= COLUMNS
    assert line.isprintable()


def test_wide_letters_are_counted_as_wide():
    row = RoundRecord(1, 1, personalised=Score(0.5, 0.5, "東京都と大阪府と京都府の地域"))
    assert width(round_line(row)) <= COLUMNS


def test_a_line_says_all_of_it():
    line = round_line(EVALUATED, seconds_left=754)
    assert line.split() == (
        ["4/40", "2/2", "2.5000", "51.0", "63.0", "south", "59.0", "0.684", "12:34"]
    )
    assert len(header_line()) <= COLUMNS


def test_numbers_stand_under_their_titles():
    header, line = header_line(), round_line(EVALUATED, seconds_left=754)
    for title, value in [("regions", "2/2"), ("loss", "2.5000"), ("epsilon", "0.684")]:
        assert header.index(title) + len(title) == line.index(value) + len(value)


def test_an_old_score_is_marked():
    line = round_line(UNEVALUATED, last=EVALUATED)
    assert "·51.0" in line and "·63.0" in line and "·59.0" in line
    assert "·" not in round_line(EVALUATED, last=EVALUATED)
    assert "·" not in round_line(UNEVALUATED)


def test_without_a_personalised_score_the_worst_region_is_the_global_models():
    row = RoundRecord(1, 1, global_=Score(0.5, 0.25, "north"), regions=REGIONS)
    assert round_line(row).split()[5:7] == ["north", "25.0"]


def test_the_time_left_follows_recent_rounds():
    assert seconds_left([], 3) is None
    assert seconds_left([10.0, 20.0], 4) == 60.0
    assert seconds_left([1000.0] + [1.0] * 20, 5) == 5.0


def test_progress_tells_a_header_once_and_remembers_the_evaluation():
    lines: list[str] = []
    progress = Progress(lines.append, simulated_cohort=True)
    progress.round(EVALUATED)
    progress.round(UNEVALUATED)
    assert len(lines) == 3
    assert "eps(sim)" in lines[0]
    assert "·63.0" in lines[2]
    assert lines[2].endswith("05:50")


def summary(**changes) -> Summary:
    values = {
        "status": "finished",
        "reason": "",
        "rounds": 40,
        "seed": 0,
        "config": {},
        "versions": {},
        "global_": EVALUATED.global_,
        "personalised": EVALUATED.personalised,
        "regions": REGIONS,
        "privacy": PrivacySummary("example", 3.99, 1e-5, "one example"),
        "evaluation": EvaluationSummary("off"),
        "failures": (),
        "seconds": 754.0,
        "paths": {},
    }
    return Summary(**{**values, **changes})


def test_the_last_lines_give_the_result_and_absolute_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    lines = final_lines(summary(failures=(Failure("north", 1, "gone"),)), RunFolder(Path("runs/x")))
    text = "\n".join(lines)
    assert "finished after 40 rounds in 12:34" in text
    assert "global 51.0 % -> personalised 63.0 % (+12.0 points)" in text
    assert "global 41.8 % -> personalised 59.0 % (+17.2 points) (south)" in text
    assert "epsilon 3.99 at delta 1e-5, unit one example" in text
    assert "failures       1," in text
    for name in ("report.html", "summary.json", "metrics.jsonl"):
        assert str(tmp_path / "runs" / "x" / name) in text


def test_users_own_models_have_a_line_where_they_were_scored():
    assert "user level" not in "\n".join(final_lines(summary(), RunFolder(Path("/runs/x"))))
    lines = final_lines(summary(user=Score(0.65, 0.605, "north")), RunFolder(Path("/runs/x")))
    (line,) = [line for line in lines if line.startswith("user level")]
    assert "65.0 % (+2.0 points over the personalised); worst region 60.5 %" in line
    assert max(map(len, lines)) <= COLUMNS + 20  # paths are not wrapped


def test_a_failure_says_why_and_a_missing_evaluation_that_it_is_missing():
    failed = summary(
        status="failed",
        reason="round 3: " + "only 1 of 8 regions answered; " * 9,
        global_=Score(None, None),
        personalised=Score(None, None),
    )
    lines = final_lines(failed, RunFolder(Path("/runs/x")))
    assert lines[0].startswith("run            failed after 40 rounds in 12:34: round 3")
    assert max(map(len, lines)) <= COLUMNS
    assert "not evaluated" in "\n".join(lines)


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        (PrivacySummary("none", statement="all is well"), "NONE"),
        (PrivacySummary("example", 1.0, noise_seeded=True), "SEEDED FOR A TEST"),
        (PrivacySummary("client", 1.0, simulated_cohort=True), "Simulated cohort"),
        (PrivacySummary("client", math.inf, statement="No one gains more."), "No one gains more."),
    ],
)
def test_what_weakens_the_privacy_is_said_first(privacy, said):
    assert privacy_statement(privacy).startswith(said) or said in privacy_statement(privacy)
