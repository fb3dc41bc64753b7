"""A run's files are whole at every moment, and hold what any JSON reader can read."""

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch

from regionfed import durable
from regionfed.errors import RunError
from regionfed.records import Failure, RegionRecord, RoundRecord, Score
from server_app.run_folder import (
    RunFolder,
    append_jsonl,
    list_runs,
    new_run_id,
    plain,
    read_rounds,
    write_json_atomic,
    write_text_atomic,
)


class Colour(StrEnum):
    RED = "red"


def test_ids_sort_by_time_and_differ_within_a_second():
    early, late = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2025, 10, 1, tzinfo=UTC)
    assert new_run_id(early).startswith("20250102T030405Z-")
    assert new_run_id(early) < new_run_id(late)
    assert new_run_id(early) != new_run_id(early)


def test_latest_follows_the_newest_run(tmp_path):
    first = RunFolder.create(tmp_path, "first")
    assert RunFolder.open("latest", tmp_path) == first
    second = RunFolder.create(tmp_path, "second")
    assert (tmp_path / "latest").is_symlink()
    assert RunFolder.open("latest", tmp_path) == second
    assert RunFolder.open(tmp_path / "latest") == second
    assert RunFolder.open("first", tmp_path) == RunFolder.open(first.path) == first


def test_without_symbolic_links_a_text_file_names_the_latest(tmp_path, monkeypatch):
    RunFolder.create(tmp_path, "linked")

    def refuse(*_args, **_kwargs):
        raise OSError("a required privilege is not held by the client")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refuse)
        unlinked = RunFolder.create(tmp_path, "unlinked")
    assert (tmp_path / "latest.txt").read_text() == "unlinked\n"
    assert RunFolder.open("latest", tmp_path) == unlinked  # not the stale link
    again = RunFolder.create(tmp_path, "again")
    assert RunFolder.open("latest", tmp_path) == again


def test_a_folder_called_latest_is_not_destroyed(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "kept").touch()
    run = RunFolder.create(tmp_path, "new")
    assert RunFolder.open("latest", tmp_path) == run
    assert (tmp_path / "latest" / "kept").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "latest.txt", "new"]


def test_an_existing_run_is_never_mixed_with_a_new_one(tmp_path):
    RunFolder.create(tmp_path, "same")
    with pytest.raises(RunError, match="resume it"):
        RunFolder.create(tmp_path, "same")


@pytest.mark.parametrize("name", ["../outside", "a/b", "latest", "latest.txt", "..", ".hidden"])
def test_a_run_id_is_one_plain_name(tmp_path, name):
    with pytest.raises(RunError, match="cannot name a run"):
        RunFolder.create(tmp_path / "runs", name)


def test_a_missing_run_is_answered_with_those_that_exist(tmp_path):
    with pytest.raises(RunError, match="there are none"):
        RunFolder.open("latest", tmp_path / "runs")
    for name in ("2025-a", "2025-c", "2025-b"):
        RunFolder.create(tmp_path, name)
    with pytest.raises(RunError, match="2025-c, 2025-b, 2025-a"):
        RunFolder.open("2025-d", tmp_path)
    with pytest.raises(RunError):
        RunFolder.open("", tmp_path)
    assert list_runs(tmp_path) == ["2025-c", "2025-b", "2025-a"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"status": "finished"})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"status": object()})
    assert json.loads(path.read_text()) == {"status": "finished"}
    assert list(tmp_path.iterdir()) == [path]


def test_rounds_are_read_back_in_order_and_the_last_telling_of_one_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_rounds(path) == []
    for number, loss in [(1, 0.3), (2, 0.2), (3, 0.1), (2, 0.25)]:  # resumed after round 1
        append_jsonl(path, RoundRecord(number, 3, loss=loss))
    assert [(row["round"], row["loss"]) for row in read_rounds(path)] == [
        (1, 0.3),
        (2, 0.25),
        (3, 0.1),
    ]


@pytest.mark.parametrize("torn", ['{"round": 2, "lo', '{"round": 2}'])
def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"round": 1})
    with path.open("a") as file:
        file.write(torn)
    assert read_rounds(path) == [{"round": 1}]
    append_jsonl(path, {"round": 3})
    assert path.read_text() == '{"round": 1}\n{"round": 3}\n'


def test_a_file_of_nothing_but_a_torn_line_starts_afresh(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"rou')
    append_jsonl(path, {"round": 1})
    assert read_rounds(path) == [{"round": 1}]
    path.write_text("")
    append_jsonl(path, {"round": 1})
    assert read_rounds(path) == [{"round": 1}]


def test_only_a_newline_ends_a_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    row = {"round": 1, "reason": "line\u2028separator\nand newline\x85"}
    append_jsonl(path, row)
    assert read_rounds(path) == [row]


def test_text_that_is_not_unicode_does_not_stop_a_write(tmp_path):
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"reason": "cannot open caf\udce9"})
    assert json.loads(path.read_text())["reason"] == "cannot open caf?"
    write_text_atomic(path, "東京")
    assert path.read_text(encoding="utf-8") == "東京"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (-math.inf, None),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([1.0, np.inf]), [1.0, None]),
        (np.array(2.0), 2.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor(math.nan), None),
        (Path("runs") / "x", "runs/x"),
        ({"b", "a"}, ["a", "b"]),
        ((1, None, "x"), [1, None, "x"]),
        ({1: {"inner": np.float32("inf")}}, {"1": {"inner": None}}),
        (Colour.RED, "red"),
        (True, True),
    ],
)
def test_every_kind_of_value_becomes_plain(value, expected):
    result = plain(value)
    assert result == expected
    assert type(result) is type(expected)


def test_an_integer_stays_an_integer():
    @dataclass
    class Count:
        n_: np.int32

    assert json.dumps(plain(Count(np.int32(7)))) == '{"n": 7}'


def test_what_cannot_be_written_is_refused_by_name():
    with pytest.raises(TypeError, match="Lock"):
        plain({"lock": type("Lock", (), {})()})


def test_a_round_is_written_as_documented(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = RoundRecord(
        round=1,
        rounds=2,
        answered=("north",),
        failures=(Failure("south", 1, "no answer within 60 s"),),
        loss=math.nan,
        global_=Score(0.5, 0.5, "north"),
        regions={"north": RegionRecord(conflict=np.float32(0.5), global_={"intent": 0.5})},
    )
    append_jsonl(path, record)
    (row,) = read_rounds(path)
    assert row["answered"] == ["north"]
    assert row["failures"] == [
        {"region": "south", "round": 1, "reason": "no answer within 60 s", "client": None}
    ]
    assert row["loss"] is None
    assert row["global"] == {"mean": 0.5, "rrs": 0.5, "worst": "north"}
    assert row["personalised"] is None
    assert row["regions"]["north"]["conflict"] == 0.5
    assert row["regions"]["north"]["global"] == {"intent": 0.5}
    assert "NaN" not in path.read_text()


def test_a_row_is_on_the_disk_when_the_call_returns(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"round": 1})
    synced = []

    def sync(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        assert path.read_text().count("\n") == 2  # the whole line was handed over before

    monkeypatch.setattr(durable.os, "fsync", sync)
    append_jsonl(path, {"round": 2})
    assert synced == ["metrics.jsonl"]
