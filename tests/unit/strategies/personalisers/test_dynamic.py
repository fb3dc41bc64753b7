"""Dynamic: the way that fits a region, with the reason in words."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regionfed.config import Config
from regionfed.personaliser import PERSONALISERS
from strategies.personalisers.dynamic import Dynamic, route
from strategies.personalisers.grad import Grad
from strategies.personalisers.interp import Interp
from strategies.personalisers.meta import Meta
from tests.conftest import released

NUMBER = st.floats(0.0, 1e6)
THRESHOLDS = {"conflict_threshold": 1.0, "divergence_threshold": 0.1, "size_threshold": 1.5}


def way(**facts: Any) -> tuple[str, str]:
    base = {"conflict": 1.0, "median_conflict": 1.0, "divergence": 0.0}
    sizes = {"examples": 100.0, "mean_examples": 100.0}
    return route(released(**{**base, **sizes, **facts}), **THRESHOLDS)


def test_each_region_goes_its_way_and_is_told_why() -> None:
    """Both d_r and h_r for Meta, n_r for Interp, else Grad; the numbers are in the reason."""
    name, why = way(conflict=1.25, divergence=0.125)
    assert name == "meta"
    assert why == "conflict 1.25 above 1 and label divergence 0.125 above 0.1"
    name, why = way(examples=151.0)
    assert name == "interp" and why.startswith("size 151 above 1.5 x mean 100; not meta, for")
    name, why = way()
    assert name == "grad" and "size 100 not above 1.5 x mean 100" in why
    assert "conflict 1 not above 1" in why


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"conflict": 2.0}, "grad"),
        ({"divergence": 0.5}, "grad"),
        ({"conflict": 2.0, "examples": 200.0}, "interp"),
        ({"divergence": 0.5, "examples": 200.0}, "interp"),
        ({"conflict": 2.0, "divergence": 0.5, "examples": 200.0}, "meta"),
        ({"conflict": 2.0, "divergence": 0.1}, "grad"),
        ({"examples": 150.0}, "grad"),
    ],
)
def test_meta_comes_first_and_a_threshold_must_be_exceeded(
    facts: dict[str, float], name: str
) -> None:
    assert way(**facts)[0] == name


@given(NUMBER, NUMBER, NUMBER, NUMBER, NUMBER)
def test_the_way_depends_on_nothing_else(d: float, m: float, h: float, n: float, mu: float) -> None:
    """Deterministic, for any numbers; the conflict's unit does not matter."""
    facts = {"conflict": d, "median_conflict": m, "divergence": h, "examples": n}
    first = way(**facts, mean_examples=mu)
    assert first == way(**facts, mean_examples=mu)
    assert first[0] in {"grad", "interp", "meta"}
    scaled = {**facts, "conflict": 4.0 * d, "median_conflict": 4.0 * m}
    assert way(**scaled, mean_examples=mu)[0] == first[0]


def test_it_does_what_the_chosen_personaliser_does() -> None:
    """Same direction, its name, both reasons."""
    config = Config(local_steps=3)
    dynamic = Dynamic(config)
    facts = {"update": torch.tensor([2.0, 0.0]), "global_update": torch.tensor([1.0, 1.0])}
    cases = {
        "meta": (Meta(config), {"conflict": 9.0, "median_conflict": 1.0, "divergence": 9.0}),
        "interp": (Interp(config), {"examples": 9.0, "mean_examples": 1.0}),
        "grad": (Grad(config), {}),
    }

    def query(point: torch.Tensor, inner_step: float = 0.0) -> torch.Tensor:
        return point + 1.0

    for name, (personaliser, numbers) in cases.items():
        given = released(**facts, **numbers)
        proposal, expected = dynamic.propose(given, query), personaliser.propose(given, query)
        assert torch.equal(proposal.direction, expected.direction)
        assert proposal.strategy == name and proposal.reason.endswith(expected.reason)


def test_its_noise_is_planned_for_the_dearest_way() -> None:
    """It may ask for as many gradients as Interp, and for one at least."""
    assert Dynamic(Config(local_steps=5)).queries == 5
    assert Dynamic(Config(local_steps=1)).queries == 1
    dynamic = PERSONALISERS.load("dynamic")(Config())
    assert isinstance(dynamic, Dynamic) and dynamic.compares_labels and not dynamic.accumulates
