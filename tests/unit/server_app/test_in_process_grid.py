"""The in-process Grid behaves as a network does: copies, error replies, one answer each."""

from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.run import Run

from server_app.in_process_grid import InProcessGrid, Node
from tests.conftest import RUN_ID, context_of, part


def app_of(answer: Any) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(answer(message, context), reply_to=message)

    return app


def grid_of(*answers: Any) -> InProcessGrid:
    nodes = {i: Node(app_of(answer), context_of(i)) for i, answer in enumerate(answers, 1)}
    return InProcessGrid(nodes, RUN_ID)


def records(value: float = 1.0) -> RecordDict:
    return RecordDict(
        {
            "arrays": ArrayRecord({"v": Array(torch.full((3,), value).numpy())}),
            "config": ConfigRecord({"steps": [1.0, 2.0], "round": 1}),
            "metrics": MetricRecord({"values": [3.0]}),
        }
    )


def to(node: int, content: RecordDict | None = None, kind: str = "train") -> Message:
    return Message(content or records(), dst_node_id=node, message_type=kind)


def who(message: Message, context: Context) -> RecordDict:
    return RecordDict({"config": ConfigRecord({"node": context.node_id})})


def test_each_message_is_answered_by_its_node() -> None:
    """In the order of the messages, with the source and the type that a network would give."""
    replies = list(grid_of(who, who, who).send_and_receive([to(3), to(1), to(2)]))
    assert [part(r.content, "config")["node"] for r in replies] == [3, 1, 2]
    assert [r.metadata.src_node_id for r in replies] == [3, 1, 2]
    assert all(r.metadata.message_type == "train" and not r.has_error() for r in replies)


def test_a_reply_says_what_it_replies_to() -> None:
    """Ids are distinct; `push` and `pull` meet by them."""
    grid = grid_of(who, who)
    ids = grid.push_messages([to(1), to(2)])
    assert len(set(ids)) == 2
    replies = grid.pull_messages(ids)
    assert [r.metadata.reply_to_message_id for r in replies] == ids
    assert grid.pull_messages(ids) == []


def test_replies_come_one_at_a_time() -> None:
    """The next node is asked when the last reply was taken: one vector in memory, not all."""
    asked: list[int] = []

    def count(message: Message, context: Context) -> RecordDict:
        asked.append(context.node_id)
        return who(message, context)

    replies = iter(grid_of(count, count).send_and_receive([to(1), to(2)]))
    next(replies)
    assert asked == [1]
    next(replies)
    assert asked == [1, 2]


def test_what_a_node_raises_costs_its_answer_only() -> None:
    """The error says what was raised; the others answer."""

    def crash(message: Message, context: Context) -> RecordDict:
        raise ValueError("out of memory")

    one, two, three = grid_of(who, crash, who).send_and_receive([to(1), to(2), to(3)])
    assert not one.has_error() and not three.has_error()
    assert two.has_error() and "ValueError: out of memory" in str(two.error.reason)
    assert two.metadata.src_node_id == 2


def test_a_message_type_that_the_app_does_not_answer_is_an_error_reply() -> None:
    """As is a node that does not exist."""
    (reply,) = grid_of(who).send_and_receive([to(1, kind="query")])
    assert reply.has_error()
    (nobody,) = grid_of(who).send_and_receive([to(9)])
    assert nobody.has_error() and "no such node" in str(nobody.error.reason)
    assert nobody.metadata.src_node_id == 9


def meddle(message: Message, context: Context) -> RecordDict:
    """Change everything that a receiver can reach."""
    seen = ConfigRecord(
        {
            "steps": list(part(message.content, "config")["steps"]),
            "round": part(message.content, "config")["round"],
            "values": list(part(message.content, "metrics")["values"]),
            "keys": sorted(message.content),
        }
    )
    part(message.content, "config")["round"] = 99
    part(message.content, "config")["steps"].append(99.0)
    part(message.content, "metrics")["values"][0] = 99.0
    part(message.content, "arrays")["v"] = Array(torch.zeros(9).numpy())
    message.content["more"] = ConfigRecord({})
    return RecordDict({"config": seen})


def test_receivers_cannot_reach_one_another_through_shared_records() -> None:
    """A7: one content sent to two nodes: what the first changes, the second and we do not see."""
    content = records()
    replies = list(grid_of(meddle, meddle).send_and_receive([to(1, content), to(2, content)]))
    for reply in replies:
        assert not reply.has_error(), reply.error.reason
        assert dict(part(reply.content, "config")) == {
            "steps": [1.0, 2.0],
            "round": 1,
            "values": [3.0],
            "keys": ["arrays", "config", "metrics"],
        }
    assert part(content, "config")["round"] == 1 and list(part(content, "config")["steps"]) == [
        1.0,
        2.0,
    ]
    assert list(part(content, "metrics")["values"]) == [3.0] and "more" not in content


def test_arrays_are_shared_and_not_copied() -> None:
    """Immutable bytes need no copy, however many receive them."""
    seen: list[bytes] = []

    def look(message: Message, context: Context) -> RecordDict:
        seen.append(part(message.content, "arrays")["v"].data)
        return who(message, context)

    content = records()
    list(grid_of(look, look).send_and_receive([to(1, content), to(2, content)]))
    assert seen[0] is seen[1] is part(content, "arrays")["v"].data


def test_a_node_keeps_its_context_between_messages() -> None:
    """And no other node has it."""

    def count(message: Message, context: Context) -> RecordDict:
        before = part(context.state, "n")["n"] if "n" in context.state else 0
        context.state["n"] = ConfigRecord({"n": before + 1})
        return RecordDict({"config": ConfigRecord({"n": before + 1})})

    grid = grid_of(count, count)
    replies = grid.send_and_receive([to(1), to(1), to(2)])
    assert [part(r.content, "config")["n"] for r in replies] == [1, 2, 1]


def test_it_offers_the_whole_of_flower_s_grid() -> None:
    """Nodes, messages, run."""
    grid = grid_of(who, who)
    assert grid.get_node_ids() == [1, 2]
    message = grid.create_message(records(), "train", 2, "group", ttl=5.0)
    assert (message.metadata.dst_node_id, message.metadata.ttl) == (2, 5.0)
    assert message.metadata.group_id == "group"
    assert grid.run.run_id == RUN_ID
    grid.set_run(Run.create_empty(11))
    assert grid.run.run_id == 11


@pytest.mark.parametrize("kind", ["train", "train.special"])
def test_subtypes_reach_their_own_function(kind: str) -> None:
    """`train.gradient` is not `train`."""
    app = app_of(lambda m, c: RecordDict({"config": ConfigRecord({"kind": "train"})}))

    @app.train("special")
    def special(message: Message, context: Context) -> Message:
        content = RecordDict({"config": ConfigRecord({"kind": "train.special"})})
        return Message(content, reply_to=message)

    grid = InProcessGrid({1: Node(app, context_of(1))}, RUN_ID)
    (reply,) = grid.send_and_receive([to(1, kind=kind)])
    assert part(reply.content, "config")["kind"] == kind
