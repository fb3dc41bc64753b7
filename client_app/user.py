"""A user's own model on the device's disk."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from client_app.adapt import UserPart
from regionfed.durable import write_atomic
from regionfed.errors import RunError
from regionfed.tensors import load_state, save_state

MODEL = "user.safetensors"
FACTS = "user.json"


def fingerprint(vector: torch.Tensor) -> str:
    """Return a hash of a vector's values: two are the same bits when it is equal."""
    return hashlib.sha256(vector.contiguous().numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class UserModel:
    """A user's own part and the region's model that it belongs to.

    Attributes
    ----------
    own : UserPart
    region : str
    layout : str
        Fingerprint of the model's layout.
    base : str
        Fingerprint of theta + alpha_r theta_r; on any other the part means nothing.
    """

    own: UserPart
    region: str
    layout: str
    base: str

    def belongs_to(self, point: torch.Tensor) -> bool:
        """Say whether it was made on this very model of the region."""
        return self.base == fingerprint(point)

    def on(self, point: torch.Tensor) -> torch.Tensor:
        """Return theta_u = theta + alpha_r theta_r + alpha_u theta_u_local, (p,).

        Raises
        ------
        RunError
            If `point` is another model of the region than the part was made on.
        """
        if not self.belongs_to(point):
            raise RunError(
                f"this user's model was made on another model of region {self.region}: "
                f"that one has been trained since, or is of another run. Adapt again."
            )
        return point + self.own.alpha * self.own.part


def save_user(folder: Path, user: UserModel) -> None:
    """Replace the user's model in a folder."""
    facts = {
        "alpha": user.own.alpha,
        "conflict": user.own.conflict,
        "region": user.region,
        "layout": user.layout,
        "base": user.base,
    }
    save_state(folder / MODEL, {"part": user.own.part}, facts)


def save_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write down, for people, what a user's model came to; it stays beside the model."""
    text = json.dumps(facts, ensure_ascii=False, indent=2) + "\n"
    write_atomic(folder / FACTS, text.encode())


def load_user(folder: Path) -> UserModel:
    """Read the user's model from a folder.

    Raises
    ------
    RunError
        If there is none, or it cannot be read.
    """
    if not (folder / MODEL).is_file():
        raise RunError(
            f"no user's model in {folder}: expected {MODEL}. `regionfed adapt` makes one."
        )
    tensors, facts = load_state(folder / MODEL)
    try:
        own = UserPart(tensors["part"], facts.pop("alpha"), facts.pop("conflict"))
        return UserModel(own, **facts)
    except (KeyError, TypeError) as error:
        raise RunError(f"{folder / MODEL} is not a user's model ({error}).") from error
