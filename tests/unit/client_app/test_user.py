"""A user's own model on disk: whole, and of use on the model it was made on alone."""

import json
from pathlib import Path

import pytest
import torch

from client_app.adapt import UserPart
from client_app.user import (
    FACTS,
    MODEL,
    UserModel,
    fingerprint,
    load_user,
    save_facts,
    save_user,
)
from regionfed.errors import RunError
from regionfed.tensors import save_state

POINT = torch.tensor([1.0, 2.0, 3.0])


def user_of(point: torch.Tensor) -> UserModel:
    own = UserPart(torch.tensor([0.5, 0.0, -1.0]), 0.75, 0.25)
    return UserModel(own, "UK", "layout", fingerprint(point))


def test_theta_u_is_the_region_s_model_and_the_weighted_part() -> None:
    """theta + alpha_r theta_r + alpha_u theta_u_local."""
    expected = torch.tensor([1.375, 2.0, 2.25])
    assert torch.equal(user_of(POINT).on(POINT), expected)


def test_it_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    """Bit for bit, facts included; saving again replaces it."""
    save_user(tmp_path, user_of(2.0 * POINT))
    save_user(tmp_path, user_of(POINT))
    found = load_user(tmp_path)
    assert torch.equal(found.own.part, user_of(POINT).own.part)
    assert (found.own.alpha, found.own.conflict) == (0.75, 0.25)
    assert (found.region, found.layout) == ("UK", "layout")
    assert found.belongs_to(POINT) and not found.belongs_to(2.0 * POINT)


def test_on_another_model_it_is_refused() -> None:
    """A region that was trained on since needs a new part, and the error says so."""
    with pytest.raises(RunError, match=r"region UK.*Adapt again"):
        user_of(POINT).on(POINT + 1e-6)


def test_no_model_or_another_file_is_refused(tmp_path: Path) -> None:
    """The error names the folder and what makes one."""
    with pytest.raises(RunError, match="regionfed adapt"):
        load_user(tmp_path)
    save_state(tmp_path / MODEL, {"direction": POINT}, {"alpha": 1.0})
    with pytest.raises(RunError, match="not a user's model"):
        load_user(tmp_path)


def test_facts_are_for_people(tmp_path: Path) -> None:
    """Plain JSON in the language that they are in."""
    save_facts(tmp_path, {"region": "東京", "alpha": 0.5})
    text = (tmp_path / FACTS).read_text(encoding="utf-8")
    assert "東京" in text and json.loads(text)["alpha"] == 0.5
