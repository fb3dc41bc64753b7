"""The ledger: written before a release leaves, never forgetting, never over budget."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from regionfed.errors import PrivacyError
from regionfed.privacy.ledger import Ledger, LedgerEvent, read_ledger

EVENT = LedgerEvent(
    round=1,
    region="North",
    release="update",
    population="train",
    unit="example",
    sampling_rate=0.1,
    noise_multiplier=2.0,
    sensitivity={"update": 0.5},
)
ROOT = Path(__file__).resolve().parents[4]
BUDGETS = {"train": 1.0, "held-out": 2.0}


def ledger(folder: Path, budgets: dict[str, float] | None = None) -> Ledger:
    return Ledger(folder / "region" / "ledger.jsonl", 1e-5, budgets or BUDGETS)


def lines(folder: Path) -> list[str]:
    path = folder / "region" / "ledger.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_a_new_ledger_has_spent_nothing(tmp_path: Path) -> None:
    """Epsilon 0, no event, no file needed."""
    book = ledger(tmp_path)
    assert book.events == () and book.epsilon("train") == 0.0


def test_a_charge_is_on_the_disk_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D9: whatever happens next, the event is there; the file was flushed after it was written."""
    synced: list[bytes] = []
    path = tmp_path / "region" / "ledger.jsonl"
    sync = os.fsync

    def fsync(fd: int) -> None:
        sync(fd)
        synced.append(path.read_bytes() if path.exists() else b"")

    monkeypatch.setattr(os, "fsync", fsync)
    book = ledger(tmp_path)
    for round_ in (1, 2):
        book.charge(replace(EVENT, round=round_))
        assert synced[-1] == path.read_bytes()
        assert [json.loads(line)["round"] for line in lines(tmp_path)] == [*range(1, round_ + 1)]
    assert json.loads(lines(tmp_path)[0]) == asdict(EVENT)


def test_a_charge_that_cannot_be_written_is_no_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk raises, so that the release does not leave; the next charge goes on."""
    book = ledger(tmp_path)
    book.charge(EVENT)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            book.charge(replace(EVENT, round=2))
    book.charge(replace(EVENT, round=3))
    assert [e.round for e in ledger(tmp_path).events][-1] == 3


def test_epsilon_does_not_go_down_when_it_is_opened_again(tmp_path: Path) -> None:
    """D9: a restart remembers every release, and goes on from there."""
    first = ledger(tmp_path)
    spent = []
    for round_ in range(1, 4):
        first.charge(replace(EVENT, round=round_))
        spent.append(first.epsilon("train"))
    assert spent == sorted(spent) and spent[0] > 0.0
    again = ledger(tmp_path)
    assert again.events == first.events
    assert again.epsilon("train") == spent[-1]
    again.charge(replace(EVENT, round=4))
    assert again.epsilon("train") > spent[-1]


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path: Path, kept: int) -> None:
    """Its release never left: `charge` had not returned. What follows stands on its own line."""
    ledger(tmp_path).charge(EVENT)
    torn = json.dumps(asdict(replace(EVENT, round=2)))[:kept]
    with (tmp_path / "region" / "ledger.jsonl").open("a") as file:
        file.write(torn)
    again = ledger(tmp_path)
    assert [e.round for e in again.events] == [1]
    again.charge(replace(EVENT, round=3))
    assert [e.round for e in ledger(tmp_path).events] == [1, 3]


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "nonsense",
        "[]",
        '{"round": 1}',
        "null",
        json.dumps({**asdict(EVENT), "noise_multiplier": math.nan}),
        json.dumps({**asdict(EVENT), "noise_multiplier": "2.0"}),
        json.dumps({**asdict(EVENT), "noise_multiplier": True}),
        json.dumps({**asdict(EVENT), "sampling_rate": 1.5}),
        json.dumps({**asdict(EVENT), "sensitivity": {"update": -1.0}}),
        json.dumps({**asdict(EVENT), "noise": [1.0]}),
        json.dumps({**asdict(EVENT), "round": 1.0}),
        json.dumps({**asdict(EVENT), "population": None}),
    ],
)
def test_a_ledger_that_was_edited_is_refused(tmp_path: Path, line: str) -> None:
    """A whole line that is no event is no crash: the error names file and line."""
    ledger(tmp_path).charge(EVENT)
    with (tmp_path / "region" / "ledger.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(PrivacyError, match=r"ledger\.jsonl, line 2"):
        ledger(tmp_path)


def test_a_ledger_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A flipped byte must not pass as some other name."""
    ledger(tmp_path).charge(EVENT)
    path = tmp_path / "region" / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b"North", b"N\xffrth"))
    with pytest.raises(PrivacyError, match=r"ledger\.jsonl: not a ledger event"):
        ledger(tmp_path)


def test_over_budget_is_refused_and_nothing_is_recorded(tmp_path: Path) -> None:
    """The error says what it would have come to; a cheaper release may still follow."""
    book = ledger(tmp_path, {"train": 0.4})
    charged = 0
    with pytest.raises(PrivacyError, match=r"region North, round 1: releasing 'update'.*over"):
        for _ in range(10_000):
            book.charge(EVENT)
            charged += 1
    assert 0 < charged < 10_000
    assert len(lines(tmp_path)) == len(book.events) == charged
    assert book.epsilon("train") <= 0.4
    book.charge(replace(EVENT, noise_multiplier=1e3, sampling_rate=1e-3))


def test_a_release_without_noise_needs_privacy_to_be_switched_off(tmp_path: Path) -> None:
    """No finite budget covers it; an infinite one does, and the epsilon then says inf."""
    naked = replace(EVENT, noise_multiplier=0.0)
    with pytest.raises(PrivacyError, match="inf"):
        ledger(tmp_path, {"train": 1e3}).charge(naked)
    assert lines(tmp_path) == []
    book = ledger(tmp_path, {"train": math.inf})
    book.charge(naked)
    assert book.epsilon("train") == math.inf


def test_populations_have_budgets_of_their_own(tmp_path: Path) -> None:
    """No example is in both, so held-out releases do not cost training data anything."""
    book = ledger(tmp_path)
    book.charge(EVENT)
    spent = book.epsilon("train")
    book.charge(replace(EVENT, population="held-out", sampling_rate=1.0, noise_multiplier=5.0))
    assert book.epsilon("train") == spent
    assert book.epsilon("held-out") > 0.0


def test_a_population_that_was_never_planned_is_never_released(tmp_path: Path) -> None:
    """There is no default budget."""
    with pytest.raises((KeyError, PrivacyError)):
        ledger(tmp_path).charge(replace(EVENT, population="strangers"))
    assert lines(tmp_path) == []


@pytest.mark.parametrize("field", ["noise_multiplier", "sampling_rate"])
@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_numbers_that_are_none_never_pass_the_budget(
    tmp_path: Path, field: str, value: Any
) -> None:
    """D1: nan compares false with any budget; it must not be recorded as if it were cheap."""
    book = ledger(tmp_path)
    with pytest.raises((PrivacyError, ValueError)):
        book.charge(replace(EVENT, **{field: value}))
    assert lines(tmp_path) == []


def test_a_ledger_of_an_earlier_version_still_counts(tmp_path: Path) -> None:
    """Its events lack the noise of each part, and nothing else."""
    old = {k: v for k, v in asdict(EVENT).items() if k != "noise"}
    path = tmp_path / "region" / "ledger.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(old) + "\n")
    assert ledger(tmp_path).events == read_ledger(path) == (EVENT,)


def test_a_ledger_that_is_not_there_is_not_an_empty_one(tmp_path: Path) -> None:
    """Whoever reads a ledger expects one."""
    with pytest.raises(PrivacyError, match=r"no ledger .*missing\.jsonl"):
        read_ledger(tmp_path / "missing.jsonl")


# ------------------------------------------------------------------------- epsilon never goes down
def test_cut_at_any_byte_it_holds_what_was_whole_and_goes_on(tmp_path: Path) -> None:
    """A crash may leave any part of the last line; epsilon grows with every byte that is kept."""
    written = ledger(tmp_path / "whole")
    for round_ in (1, 2, 3):
        written.charge(replace(EVENT, round=round_, region="Nørd"))
    data = (tmp_path / "whole" / "region" / "ledger.jsonl").read_bytes()
    path = tmp_path / "cut" / "region" / "ledger.jsonl"
    path.parent.mkdir(parents=True)
    before = 0.0
    for kept in range(len(data) + 1):
        path.write_bytes(data[:kept])
        book = ledger(tmp_path / "cut")
        whole = data[:kept].count(b"\n")
        assert book.events == written.events[:whole]
        spent = book.epsilon("train")
        assert spent >= before
        before = spent
        if kept % 7 == 0:
            book.charge(replace(EVENT, round=9))
            again = ledger(tmp_path / "cut")
            assert again.events == (*written.events[:whole], replace(EVENT, round=9))
            assert again.epsilon("train") > spent
    assert before == written.epsilon("train") > 0.0


VICTIM = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
import regionfed.durable as durable
from regionfed.privacy.ledger import Ledger, LedgerEvent

folder, moment = Path(sys.argv[1]), sys.argv[2]
event = LedgerEvent(**json.loads(sys.argv[3]))
book = Ledger(folder / "region" / "ledger.jsonl", 1e-5, {"train": 1e6})
sync, whole = os.fsync, durable.encode_text

def say(text):
    print(text, flush=True)

def dying(fd):
    say("now")
    time.sleep(600)

for round_ in range(1, 200):
    if round_ == 4 and moment != "any":
        if moment == "half written":
            durable.encode_text = lambda text: whole(text)[: len(text) // 2]
        os.fsync = dying
    book.charge(replace(event, round=round_))
    say(f"released {round_}")
"""


@pytest.mark.skipif(os.name == "nt", reason="no kill -9")
@pytest.mark.parametrize(
    ("moment", "kept"), [("half written", 3), ("written, not flushed", 4), ("any", None)]
)
def test_killed_in_mid_charge_it_forgets_nothing_that_left(
    tmp_path: Path, moment: str, kept: int | None
) -> None:
    """kill -9: whatever had left is on the disk, and the next process counts on from there."""
    command = [sys.executable, "-c", VICTIM, str(tmp_path), moment, json.dumps(asdict(EVENT))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        left = 0
        for line in victim.stdout:
            left += line.startswith("released")
            if line == "now\n" or (moment == "any" and left == 20):
                break
        os.kill(victim.pid, signal.SIGKILL)
        left += sum(line.startswith("released") for line in victim.stdout)
    assert victim.returncode == -signal.SIGKILL
    assert left >= 3
    book = ledger(tmp_path, {"train": 1e6})
    assert [e.round for e in book.events][:left] == list(range(1, left + 1))
    assert len(book.events) <= left + 1
    assert kept is None or len(book.events) == kept
    spent = book.epsilon("train")
    book.charge(replace(EVENT, round=500))
    again = ledger(tmp_path, {"train": 1e6})
    assert again.epsilon("train") == book.epsilon("train") > spent
    assert [e.round for e in again.events] == [*range(1, len(again.events)), 500]


def test_two_on_one_ledger_share_the_budget(tmp_path: Path) -> None:
    """A second process that was started by mistake cannot spend the same epsilon again."""
    first, second = ledger(tmp_path), ledger(tmp_path)
    charged = 0
    with pytest.raises(PrivacyError, match="over the 1 that"):
        for round_ in range(10_000):
            (first, second)[round_ % 2].charge(replace(EVENT, round=round_))
            charged += 1
    whole = ledger(tmp_path)
    assert [e.round for e in whole.events] == list(range(charged))
    assert charged > 1 and whole.epsilon("train") <= 1.0


@pytest.mark.parametrize("how", ["deleted", "rolled back", "replaced"])
def test_a_file_that_lost_events_is_refused(tmp_path: Path, how: str) -> None:
    """While the process lives it knows better than a file that somebody has put back."""
    book = ledger(tmp_path)
    path = tmp_path / "region" / "ledger.jsonl"
    book.charge(EVENT)
    old = path.read_bytes()
    book.charge(replace(EVENT, round=2))
    other = json.dumps(asdict(replace(EVENT, noise_multiplier=1e3))) + "\n"
    after = {"deleted": None, "rolled back": old, "replaced": other.encode() * 2}[how]
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after)
    spent = book.epsilon("train")
    with pytest.raises(PrivacyError, match="releases that were recorded are gone"):
        book.charge(replace(EVENT, round=3))
    assert book.epsilon("train") == spent
