"""What a coordinator remembers, and keeps on its own disk: released or derived values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from regionfed.tensors import load_state, save_state


@dataclass(frozen=True)
class RegionState:
    """A region after a round.

    Attributes
    ----------
    round : int
        The last round that it took part in; 0 before the first.
    direction : torch.Tensor
        theta_r = rho * direction, (p,).
    rho, alpha : float
    examples : float
        The region's size as released: noised, once.
    histogram : list of float
        Its labels, released with the size; empty where nothing needs them.
    strategy, reason : str
        How the direction came about.
    rho_evaluations, rho_messages : int
        What the searches for rho have cost so far: points a device evaluated, messages sent.
    """

    round: int
    direction: torch.Tensor
    rho: float
    alpha: float
    examples: float
    histogram: list[float] = field(default_factory=list)
    strategy: str = ""
    reason: str = ""
    rho_evaluations: int = 0
    rho_messages: int = 0

    def own_part(self) -> torch.Tensor:
        """Return alpha_r * theta_r, what this region adds to the global model."""
        return (self.alpha * self.rho) * self.direction


class StateFolder:
    """The last two states and the last replies, on the region's disk.

    Two states, for the server may have to go back one round: it can crash after a region has
    finished a round and before it has itself.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, state: RegionState) -> None:
        """Save a state and forget all but the newest two."""
        save_state(
            self._folder / f"state-{state.round}.safetensors",
            {"direction": state.direction},
            {
                one.name: getattr(state, one.name)
                for one in fields(state)
                if one.name != "direction"
            },
        )
        for old in self._rounds()[:-2]:
            (self._folder / f"state-{old}.safetensors").unlink()

    def load(self, at_most: int) -> RegionState | None:
        """Return the newest state of a round up to `at_most`, or None.

        A region that sat rounds out goes on from the last round it took part in.
        """
        rounds = [r for r in self._rounds() if r <= at_most]
        if not rounds:
            return None
        tensors, facts = load_state(self._folder / f"state-{rounds[-1]}.safetensors")
        return RegionState(direction=tensors["direction"], **facts)

    def newest(self) -> int:
        """Return the round of the newest state; -1 where there is none."""
        return max(self._rounds(), default=-1)

    def save_release(
        self,
        name: str,
        round_: int,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, Any],
    ) -> None:
        """Keep a released reply: a retry gets the same values, never a second draw of noise."""
        save_state(self._release(name), tensors, {"at": round_, **facts})

    def load_release(
        self, name: str, round_: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return the reply that was released in a round, if that was the last one."""
        if not self._release(name).exists():
            return None
        tensors, facts = load_state(self._release(name))
        return (tensors, facts) if facts.pop("at") == round_ else None

    def _release(self, name: str) -> Path:
        return self._folder / f"release-{name}.safetensors"

    def _rounds(self) -> list[int]:
        return sorted(
            int(path.stem.split("-")[1]) for path in self._folder.glob("state-*.safetensors")
        )
