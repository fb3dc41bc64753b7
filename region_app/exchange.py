"""One exchange with a region's devices: ask all, validate each reply, add up what is sound.

Nothing of a device is kept past the sum: not its records, not its identity.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from regionfed.contract import decode, encode, message_type
from regionfed.errors import ContractError, RunError
from regionfed.flower import own_copy, reason_of

log = logging.getLogger(__name__)

R = TypeVar("R")

# Called with the reason for each reply that was refused or never came.
Quarantine = Callable[[str], None]


def await_nodes(grid: Grid, expected: int, timeout: float, who: str) -> list[int]:
    """Wait until `expected` nodes have joined and return their ids, sorted.

    Who watches is told of each change meanwhile.

    Raises
    ------
    RunError
        After `timeout` seconds, saying how many are there and how many are missing.
    """
    deadline = time.monotonic() + timeout
    told = -1
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= expected:
            return nodes
        if time.monotonic() >= deadline:
            raise RunError(
                f"{who}: {len(nodes)} of {expected} declared nodes have joined after "
                f"{timeout:g} s; {expected - len(nodes)} are missing. Start them, or declare "
                f"fewer (regions, clients-per-region)."
            )
        if len(nodes) != told:
            told = len(nodes)
            log.warning("%s: waiting: %d of %d declared nodes have joined", who, told, expected)
        time.sleep(0.2)


def exchange(
    grid: Grid,
    nodes: list[int],
    request: object,
    reply: type[R],
    lengths: Mapping[str, int],
    *,
    timeout: float,
    quarantine: Quarantine,
) -> Iterator[R]:
    """Ask every node the same and yield the replies that keep the contract; see `ask`.

    Each node gets records of its own (they share the immutable arrays).
    """
    records = encode(request)
    asked = {node: own_copy(records) for node in nodes}
    kind = message_type(request)
    answers = ask(grid, asked, kind, reply, lengths, timeout=timeout, quarantine=quarantine)
    for _, answer in answers:
        yield answer


def ask(
    grid: Grid,
    requests: Mapping[int, RecordDict],
    kind: str,
    reply: type[R],
    lengths: Mapping[str, int],
    *,
    timeout: float,
    quarantine: Quarantine,
) -> Iterator[tuple[int, R]]:
    """Ask each node and yield (node, reply) for what keeps the contract, in the requests' order.

    The fixed order makes a sum independent of who answered first; a grid that yields replies in
    that order has only one of them in memory. Of several replies from one node only the first
    counts. No node is no message: an empty cohort is an empty sum.
    """
    if not requests:
        return
    messages = [
        Message(records, dst_node_id=node, message_type=kind, ttl=timeout)
        for node, records in requests.items()
    ]
    waiting = deque(requests)  # the next to be yielded stands first
    early: dict[int, R] = {}  # sound replies that came before their turn
    answered: set[int] = set()
    for message in grid.send_and_receive(messages, timeout=timeout):
        node = message.metadata.src_node_id
        if node not in requests or node in answered:
            quarantine(f"node {node}: a reply that nobody asked for")
            continue
        answered.add(node)
        if message.has_error():
            quarantine(f"node {node}: {reason_of(message)}")
            continue
        try:
            early[node] = decode(reply, message.content, lengths)
        except ContractError as error:
            quarantine(f"node {node}: {error}")
            continue
        while waiting and waiting[0] in answered:
            if (turn := waiting.popleft()) in early:
                yield turn, early.pop(turn)
    for node in waiting:
        if node in early:
            yield node, early.pop(node)
        elif node not in answered:
            quarantine(f"node {node}: no answer: offline, or silent for {timeout:g} s")
