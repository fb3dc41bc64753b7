"""The noise of the rounds behind, which the next rounds take part of back; on the region's disk."""

from collections.abc import Callable
from pathlib import Path

import torch

from regionfed.errors import PrivacyError
from regionfed.privacy.banded import correlated, strategy_row
from regionfed.tensors import load_state, save_state


class CorrelatedNoise:
    """Rows of ``C^-1 Z`` for a part of a release, one a round, each made once.

    What is kept is as secret as the data: with it whoever has the releases has the sums.

    Parameters
    ----------
    path : Path
        File with the last rows; it outlives the process, for a round that was not finished gets
        the row that it had.
    rounds, bands : int
        T and b: each row depends on the b - 1 before it.
    """

    def __init__(self, path: Path, rounds: int, bands: int) -> None:
        self._path = path
        self._rounds = rounds
        self._bands = bands

    def row(
        self, round_: int, size: int, fresh: Callable[[int, int], torch.Tensor]
    ) -> torch.Tensor:
        """Return the row of a round (size,), and those that were skipped before it first.

        Parameters
        ----------
        round_ : int
            From 1.
        size : int
        fresh : callable
            Returns independent standard normals (n,) for a round and n, asked once for each.

        Raises
        ------
        PrivacyError
            If a later row was made: the same row on two sums would show their difference.
        """
        at, rows = self._read()
        if round_ < at:
            raise PrivacyError(
                f"round {round_} was noised long ago, and round {at} since: correlated noise "
                f"cannot be drawn twice. Start a new run."
            )
        for current in range(at + 1, round_ + 1):
            weights = strategy_row(self._rounds, self._bands, current)
            past = rows[: len(weights) - 1]
            made = correlated(weights, fresh(current, size), past[::-1])
            rows = [made, *rows][: max(self._bands - 1, 1)]
        if round_ > at:
            save_state(self._path, {str(age): row for age, row in enumerate(rows)}, {"at": round_})
        return rows[0].clone()

    def _read(self) -> tuple[int, list[torch.Tensor]]:
        """Return the round of the newest row, and the rows, newest first."""
        if not self._path.exists():
            return 0, []
        tensors, facts = load_state(self._path)
        return int(facts["at"]), [tensors[str(age)] for age in range(len(tensors))]
