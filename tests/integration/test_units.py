"""A tiny run of each unit, from its settings to its summary."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from regionfed.config import Config
from regionfed.privacy.units import UNITS
from server_app.cli.main import main
from server_app.run import execute

WHOM = {
    "example": "each training example",
    "example-on-schedule": "each training example",
    "example-in-mean": "each training example",
    "client": "each device with all its examples",
    "region": "each region with all its data",
}


def config_of(unit: str, folder: Path, model: Path, **settings: Any) -> Config:
    return Config.from_run_config(
        {
            "unit": unit,
            "conflict": "sketch" if UNITS[unit].sketches else "raw",
            "user-steps": 0,
            "rounds": 2,
            "rho-every": 2,
            "evaluate-every": 2,
            "regions": 2,
            "clients-per-region": 3,
            "examples-per-client": 30,
            "size-noise-multiplier": 5.0,
            "sampling-rate": 0.5,
            "client-steps": 2,
            "model": str(model),
            "trainable": "final_layer_norm",
            "workers": 1,
            "run-dir": str(folder),
            **settings,
        }
    )


def epsilon_anew(events: list[dict[str, Any]], delta: float) -> float:
    """Compose a ledger's events with dp-accounting alone."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    alike = Counter((e["noise_multiplier"], e["sampling_rate"]) for e in events)
    for (z, q), count in alike.items():
        gaussian = dp_event.GaussianDpEvent(z)
        one = gaussian if q == 1.0 else dp_event.PoissonSampledDpEvent(q, gaussian)
        accountant.compose(one, count)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("unit", UNITS)
def test_a_run_of_each_unit_finishes_and_says_what_it_spent(
    unit: str, tmp_path: Path, t5_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary's epsilon is the one of its ledgers, counted anew; the audit signs."""
    config = config_of(unit, tmp_path, t5_folder)
    summary = execute(config, say=lambda _: None, report=True)
    assert summary.status == "finished" and not summary.failures
    folder = Path(summary.paths["folder"])
    written = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    privacy = written["privacy"]
    spent = []
    for ledger in folder.glob("regions/*/ledger.jsonl"):
        events = [json.loads(line) for line in ledger.read_text().splitlines()]
        assert {e["unit"] for e in events} == {UNITS[unit].protects}
        train = [e for e in events if e["population"] == "train"]
        spent.append(epsilon_anew(train, config.delta))
    assert len(spent) == 2
    assert privacy["epsilon"] == pytest.approx(max(spent), abs=5e-3)
    assert privacy["epsilon"] <= config.target_epsilon
    # Unit, delta, sampling, relation, accountant and whom it protects from whom.
    assert privacy["unit"] == UNITS[unit].protects
    assert privacy["neighbouring"] == UNITS[unit].neighbouring
    assert privacy["sampling"] == UNITS[unit].sampling_words(0.5)
    for words in (WHOM[unit], "against everyone outside of its region's coordinator", "1e-05"):
        assert words in privacy["statement"]
    for words in (privacy["neighbouring"], privacy["sampling"], "PLD (dp-accounting"):
        assert words in privacy["statement"]
    said = (folder / "report.html").read_text(encoding="utf-8")
    assert WHOM[unit] in said
    capsys.readouterr()
    assert main(["privacy", "audit", "--run", str(folder)]) == 0
    audited = capsys.readouterr().out
    assert f"{UNITS[unit].neighbouring} one {UNITS[unit].protects}" in audited
    assert "they agree" in audited


def test_a_unit_s_whole_epsilon_has_the_scores_in_it(tmp_path: Path, t5_folder: Path) -> None:
    """A device's held-out examples are its own: no second epsilon beside the first."""
    summary = execute(config_of("client", tmp_path, t5_folder), say=lambda _: None, report=False)
    assert summary.evaluation.epsilon is None
    assert "the epsilon above has them in it" in summary.evaluation.statement
    assert any(event["release"] == "held-out scores" for event in summary.privacy.events)
