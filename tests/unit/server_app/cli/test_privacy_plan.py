"""The command `regionfed privacy plan`: the table, JSON beside it, and warnings with numbers."""

import json

import pytest

from server_app.cli.main import main

PUBLISHED = ["--noise-multiplier", "4", "--sampling-rate", "0.1", "--rounds", "50"]


def test_the_table_says_all_that_an_epsilon_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Unit, delta, sampling, neighbouring relation and accountant stand beside the numbers."""
    assert main(["privacy", "plan", *PUBLISHED, "--delta", "1e-5"]) == 0
    said = capsys.readouterr().out
    for part in ("0.684", "1.653", "8.59", "20.68", "delta 1e-05", "Poisson, rate 0.1"):
        assert part in said
    for part in ("add-or-remove-one", "replace-one", "PLD (dp-accounting", "all in every round"):
        assert part in said
    assert "WARNING: beyond 0.03" in said and "0.0833" in said


def test_json_of_one_unit(capsys: pytest.CaptureFixture[str]) -> None:
    """The same numbers, for programs."""
    assert main(["privacy", "plan", *PUBLISHED, "--unit", "example", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    alone, in_mean = said["plans"]
    assert alone["epsilon"] == pytest.approx(0.684, abs=5e-4) and alone["delta"] == 1e-5
    assert in_mean["epsilon"] == pytest.approx(1.65, abs=5e-3)
    assert {p["unit"] for p in said["plans"]} == {"example"}
    assert alone["neighbouring"] == "add-or-remove-one" and alone["sampling"] == "Poisson, rate 0.1"
    foreseen = said["forecast"]
    assert foreseen["verdict"] == "faint" and "PLD" in said["accountant"]
    assert foreseen["unit"] == "example" and foreseen["units"] == 6000.0
    assert not any(isinstance(value, dict) for value in foreseen.values())


def test_a_region_needs_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """And gets no forecast of units that are clipped by themselves."""
    given = ["--noise-multiplier", "4", "--rounds", "50", "--unit", "region", "--json"]
    assert main(["privacy", "plan", *given]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [round(p["epsilon"], 1) for p in said["plans"]] == [8.6, 20.7]
    assert said["forecast"] is None


def test_too_little_is_an_error_that_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, exit status 1."""
    assert main(["privacy", "plan", "--rounds", "5"]) == 1
    assert "Give all but one of them, for example --noise-multiplier 4" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["nan", "-1", "0", "inf"])
def test_numbers_that_are_none_are_misuse(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """D1, on the command line."""
    assert main(["privacy", "plan", "--rounds", "5", "--noise-multiplier", value]) == 2
    assert "--noise-multiplier" in capsys.readouterr().err
