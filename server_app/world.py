"""The world's ServerApp in a deployment: the same run as in simulation, over regions that are real.

It runs on the world's SuperLink, whose nodes are the regions' uplinks.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from regionfed.config import Config
from regionfed.contract import RegionName, RegionQuery, decode, encode, message_type
from regionfed.errors import ConfigurationError, ContractError, RunError
from regionfed.flower import reason_of
from regionfed.logs import JSON, TEXT, configure
from server_app.federation import Federation
from server_app.polling_grid import PollingGrid, pause
from server_app.run import Connect, Regions, Say, execute
from server_app.stopping import StopWatch

log = logging.getLogger(__name__)

app = ServerApp()

ASK_SECONDS = 60.0  # that a node has to say which region it is
AGAIN_SECONDS = 2.0  # before one that was not ready is asked again


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation of the regions that have joined; goes on with a run of the same name."""
    # Tables are for people: to a machine each line is a message.
    say = log.info if configure(TEXT) == JSON else print
    config = Config.from_run_config(context.run_config)
    if not config.run_name:
        raise ConfigurationError(
            "run-name is empty: a deployed run needs a name, the same in the world and in its "
            "regions, for a region finds its ledger by it."
        )
    with StopWatch() as watch:
        execute(config, connect=deployed(grid, watch.reason), say=say, stopping=watch.reason)


def deployed(grid: Grid, stopping: Callable[[], str], say: Say = print) -> Connect:
    """Return what connects a run with the regions behind a SuperLink."""
    polling = PollingGrid(grid, stopping)

    @contextmanager
    def connect(config: Config, federation: Federation, folder: Path) -> Iterator[Regions]:
        del folder  # regions keep theirs themselves
        names = list(federation.regions.values())
        yield polling, find_regions(polling, names, config.join_timeout, stopping, say)

    return connect


def find_regions(
    grid: PollingGrid, names: Sequence[str], timeout: float, stopping: Callable[[], str], say: Say
) -> dict[int, str]:
    """Ask each node which region it is, until all that are declared have joined.

    Raises
    ------
    RunError
        After `timeout` seconds, naming who is missing and what the nodes that are there said; or
        where two nodes are one region, or one is none that is declared.
    """
    deadline = time.monotonic() + timeout
    found: dict[int, str] = {}
    said: dict[int, str] = {}
    told: list[str] = []
    while True:
        new = [node for node in grid.get_node_ids() if node not in found]
        for node, answer in _introductions(grid, new):
            if isinstance(answer, RegionName):
                _accept(found, node, answer.region, names)
                said.pop(node, None)
            else:
                said[node] = answer
        missing = [name for name in names if name not in found.values()]
        if not missing:
            return dict(sorted(found.items(), key=lambda entry: names.index(entry[1])))
        if time.monotonic() >= deadline:
            heard = "".join(f" Node {node}: {why}" for node, why in said.items())
            raise RunError(
                f"{len(missing)} of {len(names)} declared regions have not joined within "
                f"{timeout:g} s: {', '.join(missing)}. Start their uplinks and coordinators, or "
                f"declare fewer (regions).{heard}"
            )
        if missing != told:
            told = missing
            there = len(names) - len(missing)
            say(f"{there} of {len(names)} regions have joined; waiting for {', '.join(missing)}")
        again = time.monotonic() + AGAIN_SECONDS
        while time.monotonic() < again:
            pause(stopping)


def _accept(found: dict[int, str], node: int, region: str, names: Sequence[str]) -> None:
    if region not in names:
        raise RunError(
            f"node {node} is region '{region}', which this run does not have: {', '.join(names)}."
        )
    if region in found.values():
        raise RunError(f"two nodes are region '{region}': unregister one of them.")
    found[node] = region


def _introductions(
    grid: PollingGrid, nodes: Sequence[int]
) -> Iterator[tuple[int, "RegionName | str"]]:
    """Yield who each node is, or why it does not say."""
    messages = [
        Message(
            encode(RegionQuery()),
            dst_node_id=node,
            message_type=message_type(RegionQuery()),
            ttl=ASK_SECONDS,
        )
        for node in nodes
    ]
    for reply in grid.send_and_receive(messages, timeout=ASK_SECONDS):
        node = reply.metadata.src_node_id
        if node not in nodes:
            continue
        if reply.has_error():
            yield node, reason_of(reply)
            continue
        try:
            yield node, decode(RegionName, reply.content, {})
        except ContractError as error:
            yield node, str(error)
