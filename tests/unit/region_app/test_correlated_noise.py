"""Rows of correlated noise: as the matrix says, whatever is restarted, skipped or asked again."""

from pathlib import Path

import numpy as np
import pytest
import torch

from region_app.correlated_noise import CorrelatedNoise
from regionfed.errors import PrivacyError
from regionfed.privacy.banded import strategy

ROUNDS, BANDS, SIZE = 9, 4, 5
FRESH = torch.randn(ROUNDS, SIZE, generator=torch.Generator().manual_seed(0))


class Source:
    """Fresh normals, each asked for once at most."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, round_: int, size: int) -> torch.Tensor:
        assert size == SIZE
        self.asked.append(round_)
        return FRESH[round_ - 1]


@pytest.mark.parametrize("bands", [1, 2, BANDS, ROUNDS])
@pytest.mark.parametrize("rounds", [range(1, ROUNDS + 1), (1, 2, 6, 9)])
def test_rows_are_those_of_the_inverse(tmp_path: Path, bands: int, rounds: range) -> None:
    """Also where rounds were skipped, and with a process of its own for each."""
    expected = np.linalg.inv(strategy(ROUNDS, bands)) @ FRESH.double().numpy()
    source = Source()
    for round_ in rounds:
        noise = CorrelatedNoise(tmp_path / "noise.safetensors", ROUNDS, bands)
        row = noise.row(round_, SIZE, source)
        np.testing.assert_allclose(row, expected[round_ - 1], atol=1e-5)
        assert torch.equal(noise.row(round_, SIZE, source), row)
    assert source.asked == list(range(1, max(rounds) + 1))


def test_a_row_that_later_ones_followed_is_refused(tmp_path: Path) -> None:
    """It would be on two sums, and show their difference."""
    noise = CorrelatedNoise(tmp_path / "noise.safetensors", ROUNDS, BANDS)
    noise.row(3, SIZE, Source())
    with pytest.raises(PrivacyError, match="round 2 was noised long ago"):
        noise.row(2, SIZE, Source())
