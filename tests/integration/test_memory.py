"""Memory does not grow with rounds, and a region keeps nothing of its devices but their sum."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regionfed.contract import GradientReply, LossReply, ScoreReply
from tests.conftest import Forgetful, Run, run_rounds, scripted_world, steady, tiny_config

SIZE = 12_345  # no other vector in the process is as long


@pytest.fixture(autouse=True)
def _only_what_is_new() -> Iterator[None]:
    """Leave out of `gc` what was there before: libraries, a million objects to walk each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def alive(kind: type) -> list[Any]:
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is kind]


def vectors_alive() -> int:
    """Return how many storages as long as the model are held by anybody."""
    tensors = [t for t in alive(torch.Tensor) if t.numel() == SIZE]
    return len({t.untyped_storage().data_ptr() for t in tensors})


class Counting(Run):
    """Counts the model's vectors after each round instead of keeping states."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: list[int] = []

    def observe(self, record: Any, state: Any) -> None:
        del state
        self.records.append(record)
        self.vectors.append(vectors_alive())


def test_vectors_in_memory_do_not_grow_with_rounds(tmp_path: Path) -> None:
    config = tiny_config(
        rounds=12, rho_every=1, evaluate_every=1, noise_multiplier=2.0, target_epsilon=4.0
    )
    scripts = {name: [steady(torch.ones(SIZE)) for _ in range(5)] for name in ("North", "South")}
    for script in (s for region in scripts.values() for s in region):
        script.asked = Forgetful()
    grid, names = scripted_world(tmp_path, scripts, config)
    run = run_rounds(grid, names, config, torch.zeros(SIZE), run=Counting())
    assert isinstance(run, Counting)
    assert len(run.vectors) == 12
    assert min(run.vectors) > 0
    # The first rounds fill what is kept for a retry; from then on nothing is added.
    assert max(run.vectors[3:]) == min(run.vectors[3:])


def test_a_region_keeps_no_reply_of_a_device(tmp_path: Path) -> None:
    config = tiny_config(
        rounds=2, rho_every=1, evaluate_every=1, noise_multiplier=2.0, target_epsilon=4.0
    )
    kinds = (GradientReply, LossReply, ScoreReply)
    scripts = {name: [steady(torch.ones(SIZE)) for _ in range(3)] for name in ("North", "South")}
    grid, names = scripted_world(tmp_path, scripts, config)
    run_rounds(grid, names, config, torch.zeros(SIZE))
    assert [reply for kind in kinds for reply in alive(kind)] == []
