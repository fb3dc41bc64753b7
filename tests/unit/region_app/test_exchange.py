"""One exchange: everybody asked, every reply validated, a fixed order, a bounded wait."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Array, ConfigRecord, Message, RecordDict

from region_app import exchange as module
from region_app.exchange import await_nodes, exchange
from regionfed.contract import GradientReply, GradientRequest, encode
from regionfed.errors import RunError
from server_app.in_process_grid import InProcessGrid, Node
from tests.conftest import RUN_ID, Script, context_of, part, scripted_grid, steady

REQUEST = GradientRequest(1, "layout", 0.5, 1.0, 8.0, 0, 2, torch.zeros(3))
LENGTHS = {"p": 3, "k": 2}


def device(value: float) -> Script:
    return steady(torch.full((3,), value), loss_sum=value)


def devices(n: int = 3) -> list[Script]:
    return [device(float(i)) for i in range(1, n + 1)]


class Reordered(InProcessGrid):
    """A grid that changes what comes back, and when."""

    def __init__(
        self, scripts: list[Script], change: Callable[[list[Message]], list[Message]]
    ) -> None:
        nodes = {i: Node(s.app(), context_of(i)) for i, s in enumerate(scripts, 1)}
        super().__init__(nodes, RUN_ID)
        self.change = change
        self.timeout: float | None = None
        self.sent: list[Message] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        self.timeout = timeout
        self.sent = list(messages)
        return self.change(list(super().send_and_receive(self.sent)))


def asked(grid: InProcessGrid, nodes: list[int]) -> tuple[list[GradientReply], list[str]]:
    reasons: list[str] = []
    replies = list(
        exchange(
            grid, nodes, REQUEST, GradientReply, LENGTHS, timeout=9.0, quarantine=reasons.append
        )
    )
    return replies, reasons


@pytest.mark.parametrize(
    "order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [1, 0, 2], [2, 0, 1], [0, 2, 1]]
)
def test_replies_come_in_the_order_of_node_ids(order: list[int]) -> None:
    """F7: a sum does not depend on who answered first."""
    grid = Reordered(devices(), lambda replies: [replies[i] for i in order])
    replies, reasons = asked(grid, [1, 2, 3])
    assert [r.loss for r in replies] == [1.0, 2.0, 3.0] and reasons == []


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_who_does_not_answer_is_left_out_and_named(missing: int, late: bool) -> None:
    """The others are summed all the same, in order."""

    def change(replies: list[Message]) -> list[Message]:
        rest = [r for i, r in enumerate(replies) if i != missing]
        return rest[::-1] if late else rest

    replies, reasons = asked(Reordered(devices(), change), [1, 2, 3])
    assert [r.loss for r in replies] == [float(i) for i in (1, 2, 3) if i != missing + 1]
    assert reasons == [f"node {missing + 1}: no answer: offline, or silent for 9 s"]


def test_nobody_answers() -> None:
    """No reply is no sum, and a reason for each."""
    replies, reasons = asked(Reordered(devices(), lambda _: []), [1, 2, 3])
    assert replies == [] and len(reasons) == 3


def test_a_second_reply_of_one_node_does_not_count() -> None:
    """One device, one contribution: the first."""
    grid = Reordered(devices(2), lambda r: [r[0], r[0], r[1], r[1]])
    replies, reasons = asked(grid, [1, 2])
    assert [r.loss for r in replies] == [1.0, 2.0]
    assert reasons == [f"node {i}: a reply that nobody asked for" for i in (1, 2)]


def test_a_reply_of_a_node_that_was_not_asked_does_not_count() -> None:
    """Whoever else speaks is not heard."""

    class Intruder(InProcessGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            sent = list(messages)
            extra = Message(sent[0].content, dst_node_id=3, message_type="train.gradient")
            return super().send_and_receive([extra, *sent])

    nodes = {i: Node(s.app(), context_of(i)) for i, s in enumerate(devices(), 1)}
    replies, reasons = asked(Intruder(nodes, RUN_ID), [1, 2])
    assert [r.loss for r in replies] == [1.0, 2.0]
    assert reasons == ["node 3: a reply that nobody asked for"]


def crash(_: Any) -> Any:
    raise ValueError("disk on fire")


def bad(**arrays: Any) -> Callable[[Any], RecordDict]:
    def answer(_: Any) -> RecordDict:
        records = encode(GradientReply(torch.ones(3), torch.zeros(2), 1.0))
        for name, value in arrays.items():
            part(records, "arrays")[f"{name}/0"] = Array(value.numpy())
        return records

    return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (crash, "disk on fire"),
        (bad(total=torch.tensor([1.0, float("nan"), 0.0])), "'total': holds nan or inf"),
        (bad(total=torch.tensor([1.0, float("inf"), 0.0])), "'total': holds nan or inf"),
        (bad(total=torch.zeros(1, 3)), "'total': expected float32 of one axis"),
        (bad(total=torch.zeros(2)), "'total': expected 3 elements, got 2"),
        (bad(sketch=torch.zeros(3)), "'sketch': expected 2 elements, got 3"),
        (bad(more=torch.zeros(3)), r"unknown \['more'\]"),
        (lambda _: RecordDict({"config": ConfigRecord({})}), "lacks record 'arrays'"),
    ],
)
def test_a_reply_that_breaks_the_contract_is_refused_with_its_reason(
    answer: Callable[[Any], Any], reason: str
) -> None:
    """A4, A5: it costs that device's contribution and nothing else; node and key are named."""
    scripts = devices()
    scripts[1] = Script(gradient=answer)
    replies, reasons = asked(scripted_grid(scripts), [1, 2, 3])
    assert [r.loss for r in replies] == [1.0, 3.0]
    (said,) = reasons
    assert said.startswith("node 2: ")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(said)


def test_a_header_that_claims_terabytes_costs_only_its_sender() -> None:
    """A reply must never take the region's process down with it."""
    good = Array(torch.zeros(3).numpy())
    lying = good.data.replace(b"(3,), ", b"(10000000000000,), ").replace(b" " * 13 + b"\n", b"\n")

    def answer(_: Any) -> RecordDict:
        records = encode(GradientReply(torch.ones(3), torch.zeros(2), 1.0))
        part(records, "arrays")["total/0"] = Array("float32", (3,), good.stype, lying)
        return records

    replies, reasons = asked(scripted_grid([device(1.0), Script(gradient=answer)]), [1, 2])
    assert [r.loss for r in replies] == [1.0] and len(reasons) == 1


def test_each_node_gets_records_of_its_own() -> None:
    """A7: messages share immutable arrays, never a record."""
    grid = Reordered(devices(2), lambda r: r)
    asked(grid, [1, 2])
    one, two = (message.content for message in grid.sent)
    assert one is not two
    assert all(one[name] is not two[name] for name in one)
    assert part(one, "arrays")["point/0"].data is part(two, "arrays")["point/0"].data
    part(one, "config")["round"] = 99
    assert part(two, "config")["round"] == 1


def test_the_deadline_is_given_to_grid_and_messages() -> None:
    """F5: a dead node costs the deadline, not Flower's twelve hours."""
    grid = Reordered(devices(1), lambda r: r)
    asked(grid, [1])
    assert grid.timeout == 9.0 and grid.sent[0].metadata.ttl == 9.0


# ------------------------------------------------------------------------------ await_nodes
class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0.0
        self.now += seconds


class Joining(InProcessGrid):
    """A grid whose nodes join at given times."""

    def __init__(self, clock: Clock, joins: dict[int, float]) -> None:
        super().__init__({}, RUN_ID)
        self.clock, self.joins = clock, {n: clock.now + t for n, t in joins.items()}

    def get_node_ids(self) -> list[int]:
        return [n for n, at in self.joins.items() if at <= self.clock.now]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr(module, "time", fake)
    return clock


def test_it_waits_for_the_declared_nodes(clock: Clock) -> None:
    """Late ones included; ids come sorted."""
    grid = Joining(clock, {9: 0.0, 5: 3.0, 7: 10.0})
    assert await_nodes(grid, 3, 60.0, "region North") == [5, 7, 9]
    assert clock.now >= 110.0


def test_it_does_not_wait_when_all_are_there(clock: Clock) -> None:
    """Not even with a timeout of 0."""
    assert await_nodes(Joining(clock, {2: 0.0, 1: 0.0}), 2, 0.0, "region North") == [1, 2]
    assert clock.now == 100.0


def test_it_stops_waiting_and_says_who_is_missing(clock: Clock) -> None:
    """A bound, then an error that names the region and the numbers, and what to do."""
    with pytest.raises(RunError, match=r"region North: 1 of 3 .* 60 s; 2 are missing.*declare"):
        await_nodes(Joining(clock, {1: 0.0, 2: 61.0, 3: 99.0}), 3, 60.0, "region North")
    assert clock.now - 100.0 < 62.0
