"""Nothing forgotten: every field that crosses a tier is released under noise, or says why not."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from regionfed import contract
from regionfed.contract import GradientReply, LossReply, ProfileReply, ScoreReply
from regionfed.privacy import inventory
from regionfed.privacy.inventory import INVENTORY, PUBLIC, RELEASES, messages, undeclared
from regionfed.privacy.plan import plan_privacy
from tests.conftest import (
    TASKS,
    Script,
    coordinator_of,
    personalise_request,
    tiny_config,
    train_request,
)

ROOT = Path(__file__).resolve().parents[4]
P = 4
FIELDS = [
    (name, field.name) for name, kind in messages().items() for field in dataclasses.fields(kind)
]


@pytest.mark.parametrize(("message", "field"), FIELDS, ids=[".".join(f) for f in FIELDS])
def test_each_field_has_a_release_or_a_reason(message: str, field: str) -> None:
    """A part that a mechanism of the plan charges to the ledger, or words."""
    how = INVENTORY[message][field]
    parts = {
        part.name
        for mechanism in every_mechanism()
        for part in mechanism.parts
        if part.name == how.part
    }
    assert (how.part and parts == {how.part}) or (not how.part and len(how.reason) > 20)


def every_mechanism() -> list[Any]:
    """Return the mechanisms of a run that releases everything."""
    plan = plan_privacy(tiny_config(), sketch=True, votes=True, anew=True, queries=2, labels=3)
    return [plan.update, plan.vote, plan.query, plan.size, plan.scores]


def test_contract_and_inventory_agree() -> None:
    """No field is forgotten, no entry is stale."""
    assert undeclared() == []


def test_each_part_of_the_plan_is_a_known_release() -> None:
    """And none is described that nobody makes."""
    assert {p.name for m in every_mechanism() for p in m.parts} == set(RELEASES)


def test_a_new_field_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a message that gained a field fails, until somebody has thought about it."""

    @dataclass(frozen=True)
    class LossReply(contract.LossReply):
        variance: float = 0.0

    exchanges = [
        (way, ask, LossReply if reply is contract.LossReply else reply)
        for way, ask, reply in contract.EXCHANGES
    ]
    monkeypatch.setattr(contract, "EXCHANGES", tuple(exchanges))
    assert undeclared() == ["LossReply.variance"]


def test_what_never_leaves_a_region_is_only_in_replies_of_devices() -> None:
    """Nothing that goes to the server is excused by staying in the region."""
    for name, entry in INVENTORY.items():
        for field, how in entry.items():
            if how.part and how.reason:
                assert (name, field) and name in {
                    "GradientReply",
                    "LossReply",
                    "ScoreReply",
                    "ProfileReply",
                }


# ------------------------------------------------------------------------------ is it true?
def script_of(scale: float) -> Script:
    """Return a device whose every datum depends on `scale`."""
    return Script(
        gradient=lambda r: GradientReply(
            scale * torch.linspace(0.1, 0.4, P), torch.full((r.sketch_size,), scale), scale
        ),
        loss=lambda r: LossReply([scale * step for step in r.steps]),
        metrics=lambda _: ScoreReply([scale] * (3 * len(TASKS))),
        profile=lambda r: ProfileReply(1000 + int(scale), [scale] * r.labels),
    )


def everything(folder: Path, scale: float) -> dict[str, Any]:
    """Return all that crosses in one round, by message and field, at seeded noise."""
    config = tiny_config(
        rounds=1, rho_every=1, evaluation_privacy="noised", personaliser="dynamic", user_steps=1
    )
    script = script_of(scale)
    coordinator = coordinator_of(folder, [script], config, labels=3)
    theta = torch.zeros(P)
    update = coordinator.train(train_request(theta))
    request = personalise_request(
        theta, torch.ones(P), mean_examples=1.0, global_histogram=[1.0] * 3
    )
    out = {}
    for message in (update, coordinator.personalise(request), *script.asked):
        for field in dataclasses.fields(message):
            key = f"{type(message).__name__}.{field.name}"
            out.setdefault(key, []).append(getattr(message, field.name))
    return out


def test_what_is_called_public_does_not_change_with_the_data(tmp_path: Path) -> None:
    """Other gradients, losses, scores, sizes and labels: public fields stay, releases change."""
    one, two = everything(tmp_path / "one", 1.0), everything(tmp_path / "two", 2.0)
    assert set(one) == set(two)
    checked = {"public": 0, "released": 0}
    for key, values in one.items():
        name, field = key.split(".")
        how = INVENTORY[name][field]
        same = repr(values) == repr(two[key])
        if how.reason == PUBLIC:
            assert same, key
            checked["public"] += 1
        elif how.part and not how.reason:
            assert not same, key
            checked["released"] += 1
    assert checked["public"] > 20 and checked["released"] == 6


def test_the_documentation_has_the_tables() -> None:
    """One source: what docs/privacy.md shows is what the code says."""
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    assert inventory.releases_table() in text
    assert inventory.fields_table() in text
