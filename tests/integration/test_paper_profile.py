"""The published settings, run as they are: the run finishes and says what they protect."""

from pathlib import Path

import pytest

from regionfed.config import Config
from regionfed.privacy.plan import TRAIN
from regionfed.privacy.planner import DROWNED
from regionfed.records import Summary
from server_app.federation import prepare
from server_app.run import execute, warnings


def paper(folder: Path, model: Path, **settings: bool | int | float | str) -> Config:
    return Config.from_run_config(
        {
            "profile": "paper",
            "rounds": 2,
            "rho-every": 2,
            "regions": 2,
            "clients-per-region": 2,
            "examples-per-client": 60,
            "size-noise-multiplier": 5.0,
            "model": str(model),
            "trainable": "final_layer_norm",
            "workers": 1,
            "run-dir": str(folder),
            "evaluation-privacy": "panel",
            **settings,
        }
    )


@pytest.fixture(scope="module")
def ran(t5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, list[str]]:
    """A run of two rounds, and what it said."""
    said: list[str] = []
    config = paper(tmp_path_factory.mktemp("runs"), t5_folder)
    return execute(config, say=said.append, report=True), said


def test_the_run_finishes_and_each_region_has_a_way(ran: tuple[Summary, list[str]]) -> None:
    """Grad, Interp or Meta, uphill where the sign is theirs; rho from their search."""
    summary, _ = ran
    assert summary.status == "finished" and summary.rounds == 2
    for region in summary.regions.values():
        assert region.strategy in {"grad", "interp", "meta"}
        assert ("published sign" in (region.reason or "")) == (region.strategy != "interp")
        assert region.rho is not None and region.rho >= 0.034
        assert (region.rho_evaluations, region.rho_messages) == (47, 2)


def test_epsilon_is_what_the_mechanism_has(ran: tuple[Summary, list[str]], t5_folder: Path) -> None:
    """The noise is as set; the run says what it protects, for an example and for a region."""
    summary, said = ran
    privacy = summary.privacy
    plan = prepare(Config.from_run_config(dict(summary.config))).plan
    assert plan.update.parts[0].noise_std == 4.0
    assert privacy.target_epsilon == plan.budgets[TRAIN]
    assert privacy.epsilon is not None and privacy.epsilon <= plan.budgets[TRAIN]
    assert privacy.units["example"] == privacy.epsilon
    assert privacy.units["region emptied"] < privacy.units["region replaced"]
    assert "promise a region nothing" in privacy.statement
    assert any("epsilon per region" in line for line in said)


def test_it_warns_that_noise_drowns_the_signal(ran: tuple[Summary, list[str]]) -> None:
    """With the numbers: noise on a weight, and its norm against the clip."""
    _, said = ran
    warned = [line for line in said if line.startswith("WARNING")]
    assert any("noise will drown the signal" in line for line in warned)
    assert any("times the signal" in line for line in warned)


def test_the_practical_default_needs_no_warning(t5_folder: Path, tmp_path: Path) -> None:
    """Its steps are cut to a limit below what drowns."""
    config = Config.from_run_config({"model": str(t5_folder), "trainable": ""})
    assert config.noise_limit < DROWNED
    assert warnings(config, prepare(config)) == []


def test_small_regions_are_warned_that_their_steps_are_cut(t5_folder: Path) -> None:
    """Noise stays within its limit then, and so does what the model learns."""
    config = Config.from_run_config({"model": str(t5_folder), "examples-per-client": 20})
    (said,) = warnings(config, prepare(config))
    assert "noise-limit=0.06" in said and "will learn little" in said
