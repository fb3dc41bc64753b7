"""The summary: an epsilon that is never too little."""

import pytest

from regionfed.privacy.plan import plan_privacy
from regionfed.records import RoundRecord
from server_app.summary import spent_by
from tests.conftest import tiny_config

PLAN = plan_privacy(tiny_config(target_epsilon=8.0), sketch=True, votes=True)


@pytest.mark.parametrize(
    ("told", "spent"),
    [
        ((), 0.0),
        ((1.0, 2.0), 2.0),
        ((1.0, 2.0, None), 2.0),
        ((3.0, 2.0), 3.0),
        ((None,), 8.0),
    ],
)
def test_what_is_spent_stays_spent(told: tuple[float | None, ...], spent: float) -> None:
    """A last round without an answer is no epsilon of 0; where nobody told, the budget bounds."""
    rows = [RoundRecord(round=i, rounds=9, epsilon=e) for i, e in enumerate(told, 1)]
    assert spent_by(rows, PLAN) == spent
