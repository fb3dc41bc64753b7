"""The command `regionfed status`: a run that goes on, has ended, or was killed."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regionfed.records import Failure, RegionRecord, RoundRecord, Score
from server_app.checkpoint import save_checkpoint
from server_app.cli.main import main
from server_app.run_folder import append_jsonl
from server_app.wording import width
from strategies.regionfed import ServerState
from tests.conftest import tiny_config

CONFIG = tiny_config(rounds=5, noise_seed=-1)
THETA = torch.zeros(3)
UK = RegionRecord(alpha=0.75, epsilon=1.25, global_={"mean": 0.5}, personalised={"mean": 0.625})
US = replace(UK, epsilon=1.5, global_={"mean": 0.25}, personalised={"mean": 0.375})
ROWS = [
    RoundRecord(
        1,
        5,
        ("UK", "US"),
        loss=2.5,
        global_=Score(0.375, 0.25, "US"),
        personalised=Score(0.5, 0.375, "US"),
        regions={"UK": UK, "US": US},
        epsilon=1.5,
        seconds=8.0,
    ),
    RoundRecord(
        2,
        5,
        ("UK",),
        failures=(Failure("US", 2, "no answer within 600 s"),),
        loss=2.25,
        regions={"UK": replace(UK, epsilon=1.75), "US": US},
        epsilon=1.75,
        seconds=9.0,
    ),
]


def write_run(folder: Path, rows: list[RoundRecord], **settings: Any) -> Path:
    state = ServerState(len(rows), THETA, THETA, None, None, {})
    save_checkpoint(folder, replace(CONFIG, **settings), state)
    for row in rows:
        append_jsonl(folder / "metrics.jsonl", row)
    return folder


def write_summary(folder: Path, status: str, rounds: int, reason: str = "") -> None:
    privacy = {"mode": "dp", "epsilon": 1.75, "statement": "(1.750, 1e-05)-DP, as promised."}
    summary = {"status": status, "rounds": rounds, "reason": reason, "privacy": privacy}
    (folder / "summary.json").write_text(json.dumps(summary))


def status_of(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert main(["status", *given]) == 0
    return capsys.readouterr().out


def test_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How far, how well, what was spent so far and what that means; a line for each region."""
    said = status_of(capsys, str(write_run(tmp_path, ROWS)))
    flat = " ".join(said.split())
    for part in (
        f"run {tmp_path}",
        "state running: round 2 of 5, 00:0",
        "last round 1 of 2 regions answered, in 00:09; loss 2.25",
        "global 37.5 % -> personalised 50.0 % (+12.5 points), round 1",
        "worst region global 25.0 % -> personalised 37.5 % (+12.5 points) (US)",
        "so far (1.750, 1e-05)-DP for each training example against everyone outside of its "
        "region's coordinator; add-or-remove-one; Poisson, rate 0.5",
        "accountant PLD",
    ):
        assert part in flat
    table, failures = said.split("\n\n")[1:]
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["UK", "2", "50.0", "62.5", "0.750", "1.75", "0"],
        ["US", "1", "25.0", "37.5", "0.750", "1.50", "1"],
    ]
    assert " ".join(failures.split()) == "last failures US round 2: no answer within 600 s"
    assert all(width(line) <= 100 for line in said.splitlines()[1:])


def test_json_holds_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(status_of(capsys, "--json", str(write_run(tmp_path, ROWS))))
    assert (found["state"], found["round"], found["rounds"]) == ("running", 2, 5)
    assert (found["epsilon"], found["delta"], found["unit"]) == (1.75, 1e-5, "example")
    assert found["folder"] == str(tmp_path) and found["scored_in"] == 1
    uk, us = found["regions"]
    assert uk["last_round"] == 2 and uk["last_failure"] is None and uk["epsilon"] == 1.75
    assert us["last_failure"]["reason"] == "no answer within 600 s" and us["failures"] == 1


def test_a_run_that_was_killed_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing came of it for longer than a round may last."""
    write_run(tmp_path, ROWS, round_timeout=30.0, join_timeout=0.0)
    for seconds, state in ((50.0, "running"), (3700.0, "silent")):
        moment = time.time() - seconds
        os.utime(tmp_path / "metrics.jsonl", (moment, moment))
        said = " ".join(status_of(capsys, str(tmp_path)).split())
        assert f"state {state}: round 2 of 5" in said
    assert "61:4" in said and "a round may last 01:00: it was killed" in said


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_run_that_has_ended_says_how(
    status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is never silent: privacy is as the summary says."""
    write_run(tmp_path, ROWS)
    write_summary(tmp_path, status, 2, "Disk full. To go on: submit it again.")
    os.utime(tmp_path / "metrics.jsonl", (1.0, 1.0))
    said = " ".join(status_of(capsys, str(tmp_path)).split())
    assert f"state {status}: round 2 of 5" in said and "Disk full. To go on" in said
    assert "privacy (1.750, 1e-05)-DP, as promised." in said


def test_a_run_that_went_on_since_is_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary is of an earlier stop."""
    write_run(tmp_path, ROWS)
    write_summary(tmp_path, "stopped", 1)
    assert "state          running: round 2 of 5" in status_of(capsys, str(tmp_path))


def test_before_the_first_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(status_of(capsys, str(write_run(tmp_path, []))).split())
    assert "state running: round 0 of 5" in said and "not evaluated yet" in said
    assert "nothing was reported yet; the run may spend epsilon 8" in said


def test_without_privacy_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = [replace(row, epsilon=None) for row in ROWS]
    said = status_of(capsys, str(write_run(tmp_path, bare, privacy_mode="none")))
    assert "NONE: nothing that left a region was protected by noise." in " ".join(said.split())


def test_seeded_noise_is_no_privacy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = status_of(capsys, str(write_run(tmp_path, ROWS, noise_seed=0)))
    assert "NOISE WAS SEEDED FOR A TEST" in said


def test_another_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 1
    assert "is no folder of a run" in capsys.readouterr().err
