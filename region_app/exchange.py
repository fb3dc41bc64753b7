"""One exchange with a region's devices: ask all, validate each reply, add up what is sound.

Nothing of a device is kept past the sum: not its records, not its identity.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from regionfed.contract import decode, encode, message_type
from regionfed.errors import ContractError, RunError
from regionfed.flower import own_copy

R = TypeVar("R")

# Called with the reason for each reply that was refused or never came.
Quarantine = Callable[[str], None]


def await_nodes(grid: Grid, expected: int, timeout: float, who: str) -> list[int]:
    """Wait until `expected` nodes have joined and return their ids, sorted.

    Raises
    ------
    RunError
        After `timeout` seconds, saying how many are there and how many are missing.
    """
    deadline = time.monotonic() + timeout
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
    """Ask every node and yield the replies that keep the contract, in the order of node ids.

    The fixed order makes a sum independent of who answered first; a grid that yields replies in
    that order has only one of them in memory. Each node gets records of its own (they share
    the immutable arrays), and of several replies from one node only the first counts. No node
    is no message: an empty cohort is an empty sum.
    """
    if not nodes:
        return
    records = encode(request)
    messages = [
        Message(
            own_copy(records), dst_node_id=node, message_type=message_type(request), ttl=timeout
        )
        for node in nodes
    ]
    waiting = deque(nodes)  # the next to be yielded stands first
    early: dict[int, R] = {}  # sound replies that came before their turn
    answered: set[int] = set()
    for message in grid.send_and_receive(messages, timeout=timeout):
        node = message.metadata.src_node_id
        if node not in nodes or node in answered:
            quarantine(f"node {node}: a reply that nobody asked for")
            continue
        answered.add(node)
        if message.has_error():
            quarantine(f"node {node}: {message.error.reason}")
            continue
        try:
            early[node] = decode(reply, message.content, lengths)
        except ContractError as error:
            quarantine(f"node {node}: {error}")
            continue
        while waiting and waiting[0] in answered:
            if (turn := waiting.popleft()) in early:
                yield early.pop(turn)
    for node in waiting:
        if node in early:
            yield early.pop(node)
        elif node not in answered:
            quarantine(f"node {node}: no answer within {timeout:g} s")
