"""The audit counts anew, says what does not fit, and trusts no single number in a ledger."""

import math
from dataclasses import replace

import pytest

from regionfed.privacy.accountant import count_releases, epsilon, epsilon_rdp
from regionfed.privacy.audit import audit, joint_noise
from regionfed.privacy.ledger import LedgerEvent
from regionfed.privacy.mechanism import GaussianSum
from regionfed.privacy.unit import Part
from regionfed.privacy.units import UNITS

JOINT = GaussianSum(
    "update+loss",
    "train",
    UNITS["example"],
    0.1,
    (Part("update", 0.5, 3.0), Part("loss", 8.0, 6.0)),
)
SIZE = GaussianSum("region size", "train", UNITS["example"], 1.0, (Part("size", 1.0, 20.0),))
SCORES = GaussianSum(
    "held-out scores", "held-out", UNITS["example"], 1.0, (Part("scores", 3**0.5, 9.0),)
)


def events_of(region: str, rounds: int) -> list[LedgerEvent]:
    updates = [JOINT.event(region, r) for r in range(1, rounds + 1)]
    return [SIZE.event(region, 0), *updates, SCORES.event(region, rounds)]


def test_joint_releases_are_one_mechanism() -> None:
    """z_eff = (sum z_i^-2)^-1/2; one part without noise leaves none."""
    assert joint_noise({"a": 3.0, "b": 6.0}) == pytest.approx((1 / 9 + 1 / 36) ** -0.5)
    assert joint_noise({"a": 3.0, "b": 0.0}) == 0.0 == joint_noise({})


def test_a_region_s_sum_is_that_of_its_events_by_both_accountants() -> None:
    """Training and held-out data apart; groups say what each kind costs alone."""
    found = audit({"North": events_of("North", 5)}, 1e-5)
    (north,) = found.regions
    counts = count_releases([(JOINT.noise_multiplier, 0.1)] * 5 + [(20.0, 1.0)])
    assert north.spent["train"].pld == epsilon(counts, 1e-5)
    assert north.spent["train"].rdp == epsilon_rdp(counts, 1e-5) > north.spent["train"].pld
    assert north.spent["held-out"].pld == epsilon((((9.0, 1.0), 1),), 1e-5)
    size, update, scores = north.groups
    assert (update.count, update.first, update.last, update.to) == (5, 1, 5, "server")
    assert update.parts == (("update", 0.5, 3.0), ("loss", 8.0, 6.0))
    assert size.alone.pld < north.spent["train"].pld and scores.population == "held-out"
    assert found.problems == ()


def test_the_worst_region_bounds_everybody() -> None:
    """They hold different people, so epsilons are not added."""
    found = audit({"North": events_of("North", 2), "South": events_of("South", 9)}, 1e-5)
    assert found.spent["train"] == found.regions[1].spent["train"]


@pytest.mark.parametrize(
    ("tampered", "said"),
    [
        ({"noise_multiplier": 30.0}, "its parts make z_eff 2.68328, 30 is said"),
        ({"region": "South"}, "the event is of region 'South'"),
        ({"noise": {"update": 3.0}}, "noise and sensitivity name other parts"),
        ({"sensitivity": {"secret": 1.0}, "noise": {}}, "secret is in no inventory"),
    ],
)
def test_an_event_that_does_not_fit_is_a_problem(tampered: dict[str, object], said: str) -> None:
    """Each is named with region, round and release."""
    event = replace(JOINT.event("North", 3), **tampered)  # type: ignore[arg-type]
    (problem,) = audit({"North": [event]}, 1e-5).problems
    assert problem.startswith("North, round 3, 'update+loss'") and said in problem


def test_a_release_without_noise_is_infinite_by_both() -> None:
    """Never a number."""
    naked = replace(SCORES, parts=(Part("scores", 3**0.5, 0.0),))
    found = audit({"North": [naked.event("North", 1)]}, 1e-5)
    assert found.spent["held-out"].pld == found.spent["held-out"].rdp == math.inf
