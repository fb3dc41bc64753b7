"""What Flower has to be told, and what it says."""

import pytest
from flwr.app import Error, Message, RecordDict

from regionfed.flower import ensure_identity, reason_of


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "<class 'regionfed.errors.RunError'>:<'region UK serves run 'a', not 'b'.'>",
            "region UK serves run 'a', not 'b'.",
        ),
        ("<class 'ValueError'>:<'two\nlines'>", "two\nlines"),
        ("Node unavailable", "Node unavailable"),
        ("", "error without a reason"),
    ],
)
def test_an_error_s_own_words(said: str, reason: str) -> None:
    ensure_identity(1)
    asked = Message(RecordDict(), dst_node_id=1, message_type="query")
    assert reason_of(Message(Error(code=0, reason=said), reply_to=asked)) == reason
