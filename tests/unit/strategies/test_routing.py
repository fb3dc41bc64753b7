"""A constructed world in which Dynamic sends a region each way, twice the same."""

from pathlib import Path

import pytest
import torch

from regionfed.contract import GradientReply, GradientRequest, LossReply, ProfileReply, ScoreReply
from tests.conftest import Run, Script, run_rounds, scripted_world, tiny_config

P = 4
CLOTHES, FOOD = [0.9, 0.1], [0.1, 0.9]


def region(pull: float, examples: int, shares: list[float]) -> list[Script]:
    """Return one device that pulls so far, has so many examples, and asks for such things."""

    def gradient(request: GradientRequest) -> GradientReply:
        mean = request.point - pull * torch.ones(P)
        return GradientReply(0.5 * examples * mean, torch.zeros(request.sketch_size), 0.0)

    return [
        Script(
            gradient=gradient,
            loss=lambda r: LossReply([0.0] * len(r.steps)),
            metrics=lambda _: ScoreReply([1.0, 0.5, 0.5]),
            profile=lambda r: ProfileReply(examples, [s * examples for s in shares][: r.labels]),
        )
    ]


WORLD = {
    "Odd": lambda: region(9.0, 1000, CLOTHES),  # far off, and asks for other things
    "Large": lambda: region(0.0, 4000, FOOD),
    "Plain": lambda: region(0.0, 1000, FOOD),
    "Like": lambda: region(0.5, 1000, FOOD),
}


def run(folder: Path) -> Run:
    config = tiny_config(
        regions=4,
        rounds=1,
        personaliser="dynamic",
        conflict="debiased",
        rho_every=1,
        noise_seed=3,
        target_epsilon=50.0,
    )
    scripts = {name: make() for name, make in WORLD.items()}
    grid, names = scripted_world(folder, scripts, config, labels=2)
    return run_rounds(grid, names, config, torch.zeros(P), labels=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("world"))


def test_each_way_is_gone_by_somebody_and_the_reason_says_why(world: Run) -> None:
    """Meta for conflict and labels, Interp for size, Grad for the rest."""
    regions = world.records[-1].regions
    assert {name: r.strategy for name, r in regions.items()} == {
        "Odd": "meta",
        "Large": "interp",
        "Plain": "grad",
        "Like": "grad",
    }
    reasons = {name: r.reason or "" for name, r in regions.items()}
    assert "label divergence" in reasons["Odd"] and "above" in reasons["Odd"]
    assert "above 1.5 x mean" in reasons["Large"]
    assert "not above 1.5 x mean" in reasons["Plain"]


def test_the_ways_are_the_same_when_the_run_is_repeated(world: Run, tmp_path: Path) -> None:
    """Bit for bit, under noise: same route, reason, rho and alpha."""
    again = run(tmp_path)
    assert again.records[-1].regions == world.records[-1].regions
    assert torch.equal(again.states[-1].theta, world.states[-1].theta)


def test_what_the_search_cost_is_written_down(world: Run) -> None:
    """Eight points in one message to the region's one device."""
    for record in world.records[-1].regions.values():
        assert (record.rho_evaluations, record.rho_messages) == (8, 1)
