"""The checkpoint holds all that a run needs to go on, and replaces the last one whole."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord

from regionfed.errors import RunError
from regionfed.vector import to_arrays
from server_app.checkpoint import load_checkpoint, save_checkpoint
from server_app.in_process_grid import InProcessGrid
from strategies.optimisers import Adam, Momentum, ServerOptimiserFactory
from strategies.regionfed import RegionFed, ServerState
from tests.conftest import RUN_ID, tiny_config

P = 5
STATE = ServerState(
    round=3,
    theta=torch.linspace(-1.0, 1.0, P),
    average=torch.linspace(0.0, 1.0, P),
    centre=0.1 + 0.2,
    spread=1e-17,
    optimiser={"mean": torch.full((P,), 0.25), "steps": torch.tensor(3)},
)


def test_everything_comes_back_exactly(tmp_path: Path) -> None:
    """Tensors bit for bit, numbers to the last digit, the settings as they were."""
    config = tiny_config(regions=3, clip_norm=0.125)
    save_checkpoint(tmp_path, config, STATE)
    back_config, back = load_checkpoint(tmp_path)
    assert back_config == config
    assert (back.round, back.centre, back.spread) == (STATE.round, STATE.centre, STATE.spread)
    assert torch.equal(back.theta, STATE.theta) and torch.equal(back.average, STATE.average)
    assert set(back.optimiser) == set(STATE.optimiser)
    assert all(torch.equal(back.optimiser[k], v) for k, v in STATE.optimiser.items())


def test_before_any_conflict_there_is_no_centre(tmp_path: Path) -> None:
    """None stays None; so does an optimiser that has done nothing."""
    state = replace(STATE, centre=None, spread=None, optimiser={"steps": torch.tensor(0)})
    save_checkpoint(tmp_path, tiny_config(), state)
    _, back = load_checkpoint(tmp_path)
    assert back.centre is None and back.spread is None
    assert set(back.optimiser) == {"steps"}


@pytest.mark.parametrize("make", [Momentum, Adam])
def test_a_restored_optimiser_takes_the_same_step(
    tmp_path: Path, make: ServerOptimiserFactory
) -> None:
    """Through the file, not only through memory."""
    optimiser, other = make(0.5, 0.9), make(0.5, 0.9)
    g = torch.linspace(1.0, 2.0, P)
    theta = optimiser.step(STATE.theta, g)
    save_checkpoint(tmp_path, tiny_config(), replace(STATE, optimiser=optimiser.state_dict()))
    other.load_state_dict(load_checkpoint(tmp_path)[1].optimiser)
    assert torch.equal(other.step(theta, g), optimiser.step(theta, g))


def test_the_last_one_counts(tmp_path: Path) -> None:
    """One file, replaced."""
    for round_ in (1, 2):
        save_checkpoint(tmp_path, tiny_config(), replace(STATE, round=round_))
    assert load_checkpoint(tmp_path)[1].round == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_model_that_is_its_own_average_is_saved(tmp_path: Path) -> None:
    """M3: theta and average may be one tensor; what is saved must not depend on that."""
    save_checkpoint(tmp_path, tiny_config(), replace(STATE, average=STATE.theta))
    _, back = load_checkpoint(tmp_path)
    assert torch.equal(back.theta, STATE.theta) and torch.equal(back.average, STATE.theta)


def test_a_run_can_be_saved_at_its_start_and_after_a_failed_first_round(tmp_path: Path) -> None:
    """F8: even a run whose first round nobody answered leaves a checkpoint."""
    config = tiny_config(regions=1, max_failed_rounds=2)
    strategy = RegionFed(
        config,
        Momentum(1.0, 0.9),
        {1: "North"},
        ("toy",),
        "layout",
        observers=[lambda _, state: save_checkpoint(tmp_path, config, state)],
    )
    save_checkpoint(tmp_path, config, strategy.state_at_start(STATE.theta))
    assert load_checkpoint(tmp_path)[1].round == 0
    with pytest.raises(RunError, match="2 rounds in a row"):
        strategy.start(
            InProcessGrid({}, RUN_ID), ArrayRecord(to_arrays("theta", STATE.theta)), num_rounds=5
        )
    _, back = load_checkpoint(tmp_path)
    assert back.round == 2 and torch.equal(back.theta, STATE.theta)


def test_no_checkpoint_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """As is a damaged one."""
    with pytest.raises(RunError, match="checkpoint"):
        load_checkpoint(tmp_path)
    save_checkpoint(tmp_path, tiny_config(), STATE)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RunError, match="checkpoint"):
        load_checkpoint(tmp_path)
