"""The command `regionfed privacy audit`: every release, two accountants, and the summary's word."""

import json
from pathlib import Path
from typing import Any

import pytest

from regionfed.privacy.accountant import count_releases, epsilon
from regionfed.privacy.ledger import Ledger
from regionfed.privacy.plan import PrivacyPlan, plan_privacy
from server_app.cli.main import main
from tests.conftest import tiny_config

CONFIG = tiny_config(evaluation_privacy="noised", rounds=3, noise_seed=-1)
PLAN = plan_privacy(CONFIG, sketch=True, votes=True)


def write_run(folder: Path, *, said: float | None = None, plan: PrivacyPlan = PLAN) -> Path:
    """Write the folder of a run of two regions; its summary says `said`, or the truth."""
    for region in ("North", "South"):
        book = Ledger(folder / "regions" / region / "ledger.jsonl", CONFIG.delta, plan.budgets)
        book.charge(plan.size.event(region, 0))
        for round_ in (1, 2, 3):
            book.charge(plan.update.event(region, round_))
        book.charge(plan.scores.event(region, 3))
        spent, held_out = book.epsilon("train"), book.epsilon("held-out")
    summary: dict[str, Any] = {
        "status": "finished",
        "config": CONFIG.to_run_config(),
        "privacy": {"epsilon": spent if said is None else said},
        "evaluation": {"epsilon": held_out},
        "regions": {"North": {}, "South": {}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def audit_of(capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str]:
    status = main(["privacy", "audit", *given])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_a_sound_run_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who told what to whom, under which noise; by two accountants; and the summary is right."""
    status, said = audit_of(capsys, "--run", str(write_run(tmp_path)))
    assert status == 0
    for part in (
        "North: the coordinator released",
        "3 x update+loss+sketch to server, round 1 to 3",
        "update (sensitivity 0.5, z ",
        "z_eff ",
        "Poisson 0.5",
        "1 x region size to server",
        "all, no amplification",
        "unit example, held-out data",
        "by PLD",
        "by RDP",
        "delta 1e-05; add-or-remove-one one example; accountant PLD",
        "noised by a region's coordinator, against everyone outside of it",
        "train data: the summary says epsilon",
        "they agree",
    ):
        assert part in said
    assert "PROBLEM" not in said and "round    2" not in said


def test_every_single_event_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, for both regions."""
    _, said = audit_of(capsys, "--run", str(write_run(tmp_path)), "--events")
    assert said.count("    round ") == 10 and "round    2  update+loss+sketch: train" in said


def test_json_holds_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Overall epsilon is the one that is counted by hand."""
    status, said = audit_of(capsys, "--run", str(write_run(tmp_path)), "--json")
    found = json.loads(said)
    releases = [(PLAN.update.noise_multiplier, CONFIG.sampling_rate)] * 3
    releases.append((PLAN.size.noise_multiplier, 1.0))
    expected = epsilon(count_releases(releases), CONFIG.delta)
    assert status == 0 and found["overall"]["train"]["pld"] == pytest.approx(expected)
    assert found["overall"]["train"]["rdp"] > expected
    assert [len(r["events"]) for r in found["regions"]] == [5, 5]
    assert found["problems"] == [] and all(claim["agrees"] for claim in found["claims"])


@pytest.mark.parametrize(
    ("said", "why"), [(0.1, "It is understated"), (99.5, "A ledger is missing or has lost events")]
)
def test_a_summary_that_says_something_else_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: float, why: str
) -> None:
    """In either direction; the exit status tells programs."""
    status, text = audit_of(capsys, "--run", str(write_run(tmp_path, said=said)))
    assert status == 1 and f"PROBLEM: train data: the summary says epsilon {said}" in text
    assert why in text


def test_what_no_epsilon_says_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A region's ledger that is not there, a seed, a panel, and a charge that a crash repeated."""
    folder = write_run(tmp_path)
    (folder / "regions" / "South" / "ledger.jsonl").unlink()
    book = Ledger(folder / "regions" / "North" / "ledger.jsonl", CONFIG.delta, {"train": 1e3})
    book.charge(PLAN.update.event("North", 3))
    summary = json.loads((folder / "summary.json").read_text())
    summary["config"] |= {"noise-seed": 0, "user-scores": "panel"}
    (folder / "summary.json").write_text(json.dumps(summary))
    status, said = audit_of(capsys, "--run", str(folder))
    assert status == 1  # one more charge than the summary knows of
    for part in ("No ledger of South", "seeded", "panel's own models", "charged 4 times in 3"):
        assert part in said


def test_a_region_audits_its_own_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At another delta there is nothing to compare the summary with."""
    folder = write_run(tmp_path)
    own = str(folder / "regions" / "North" / "ledger.jsonl")
    given = ["--run", str(folder), "--ledger", own, "--delta", "1e-6"]
    status, said = audit_of(capsys, *given)
    assert status == 0 and "South: the" not in said and "delta 1e-06" in said


def test_a_run_without_ledgers_says_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a deployment each region keeps its own."""
    status, said = audit_of(capsys, "--run", str(tmp_path))
    assert status == 1 and "--ledger FILE" in said
