"""A region's memory: the last two states and the last replies, exactly."""

from pathlib import Path

import pytest
import torch

from region_app.state import RegionState, StateFolder


def state(round_: int) -> RegionState:
    return RegionState(round_, torch.full((3,), float(round_)), 0.5, 0.75, 123.25)


def test_the_own_part_is_alpha_rho_direction() -> None:
    """What a region adds to the global model."""
    own = RegionState(1, torch.tensor([2.0, -4.0]), rho=0.5, alpha=0.75, examples=1.0).own_part()
    assert torch.equal(own, torch.tensor([0.75, -1.5]))


def test_a_state_comes_back_exactly(tmp_path: Path) -> None:
    """Also in another process: the folder is all there is."""
    StateFolder(tmp_path).save(state(3))
    back = StateFolder(tmp_path).load(3)
    assert back is not None
    assert torch.equal(back.direction, state(3).direction)
    assert (back.round, back.rho, back.alpha, back.examples) == (3, 0.5, 0.75, 123.25)


def test_an_empty_folder_has_no_state(tmp_path: Path) -> None:
    """None, not an error: the region is new."""
    assert StateFolder(tmp_path).load(5) is None


def test_only_the_newest_two_are_kept(tmp_path: Path) -> None:
    """Two, so that the server may go back one round; ten rounds sort after nine."""
    folder = StateFolder(tmp_path)
    for round_ in (0, 8, 9, 10):
        folder.save(state(round_))
    loaded = [folder.load(r) for r in (8, 9, 10, 99)]
    assert [s.round if s else None for s in loaded] == [None, 9, 10, 10]
    assert len(list(tmp_path.glob("state-*"))) == 2


def test_a_region_that_sat_rounds_out_goes_on_from_its_last(tmp_path: Path) -> None:
    """The newest state up to the round that is asked for."""
    folder = StateFolder(tmp_path)
    folder.save(state(2))
    loaded = folder.load(7)
    assert loaded is not None and loaded.round == 2


def test_a_release_is_found_in_its_own_round_only(tmp_path: Path) -> None:
    """D10: a retry gets the very same values; another round gets none of them."""
    folder = StateFolder(tmp_path)
    values = {"update": torch.tensor([0.1, 0.2])}
    folder.save_release("update", 4, values, {"quarantined": 2})
    found = StateFolder(tmp_path).load_release("update", 4)
    assert found is not None
    assert torch.equal(found[0]["update"], values["update"]) and found[1] == {"quarantined": 2}
    assert folder.load_release("update", 3) is None
    assert folder.load_release("update", 5) is None
    assert folder.load_release("scores", 4) is None


def test_a_newer_release_replaces_the_older(tmp_path: Path) -> None:
    """One file per kind of reply, whatever the number of rounds."""
    folder = StateFolder(tmp_path)
    for round_ in range(3):
        folder.save_release("update", round_, {"update": torch.full((2,), float(round_))}, {})
    found = folder.load_release("update", 2)
    assert found is not None and float(found[0]["update"][0]) == 2.0
    assert len(list(tmp_path.iterdir())) == 1


def test_a_crash_while_saving_leaves_the_older_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file takes its name only when it is whole."""
    folder = StateFolder(tmp_path)
    folder.save(state(1))

    def crash(*_: object) -> Path:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="power cut"):
            folder.save(state(2))
    loaded = StateFolder(tmp_path).load(2)
    assert loaded is not None and loaded.round == 1
