"""One example that cannot be computed costs itself alone."""

from collections.abc import Sequence

import pytest
import torch

from client_app.datasets.dataset import Example
from client_app.gradients import clipped_sums, loss_differences
from client_app.isolation import isolated
from client_app.task import score_sums
from regionfed.vector import Layout
from tests.conftest import ToyTask, toy_example

SOUND = [toy_example([i, 1.0], 3.0) for i in range(7)]
# Encoding this one raises: it is no number.
ODD = Example("toy", "1.0 x", "0", "group")


def total(part: Sequence[int]) -> int:
    if 5 in part:
        raise ValueError("five")
    return sum(part)


@pytest.mark.parametrize("batches", [[[1, 5, 3], [4]], [[5], [1, 3, 4]], [[1, 3], [4, 5]]])
def test_only_the_culprit_is_left_out(batches: list[list[int]]) -> None:
    done = list(isolated(total, batches))
    assert sum(result for _, result in done) == 8
    assert sorted(v for part, _ in done for v in part) == [1, 3, 4]


def test_sound_batches_come_whole_and_in_order() -> None:
    assert list(isolated(total, [[3, 1], [], [2]])) == [([3, 1], 4), ([2], 2)]


def test_work_that_never_succeeds_says_why() -> None:
    with pytest.raises(ValueError, match="five"):
        list(isolated(total, [[5, 5], [5]]))
    assert list(isolated(total, [])) == []


def test_one_example_changes_a_devices_sums_by_its_bounds_alone() -> None:
    task = ToyTask(2)
    layout = Layout.of(task.module)
    point = layout.read(task.module)
    sums = [
        clipped_sums(
            task, layout, point, e, clip_norm=0.5, loss_cap=8.0, signs={}, microbatch=4
        ).total
        for e in (SOUND, [*SOUND, ODD])
    ]
    assert torch.allclose(sums[0], sums[1], atol=1e-6) and bool(sums[0].any())
    votes = [
        loss_differences(
            task,
            layout,
            point,
            torch.ones(layout.size),
            steps=[0.5, 1.0],
            examples=e,
            clip_norm=1.0,
            microbatch=4,
        )
        for e in (SOUND, [*SOUND, ODD])
    ]
    assert votes[0] == pytest.approx(votes[1], abs=1e-6) and any(votes[0])
    scores = [score_sums(task, layout.tensors(point), e, ("toy",)) for e in (SOUND, [*SOUND, ODD])]
    assert scores[0].counts == scores[1].counts == (7.0,)
    assert scores[0].sums == pytest.approx(scores[1].sums)
