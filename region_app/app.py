"""The region's ClientApp in a deployment: the uplink, which relays to the coordinator.

It runs on the SuperNode by which a region joins the world's SuperLink, started with

    --node-config 'bridge="127.0.0.1:9095" bridge-token="/etc/regionfed/bridge.token"'

and, where the coordinator is on another machine, `bridge-tls` (a folder: see
`region_app.bridge.endpoint`). It reads nothing of a message but its round: both ends validate.

Flower starts a process per message, so nothing here may import PyTorch.
"""

import logging
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from region_app.bridge.client import BridgeClient
from region_app.bridge.endpoint import Endpoint
from region_app.bridge.protocol import EVALUATE, QUERY, TRAIN
from region_app.site import LIMIT_MIB
from regionfed.discretion import discreet
from regionfed.errors import ConfigurationError, ContractError
from regionfed.logs import TEXT, configure, log_context

log = logging.getLogger(__name__)

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Relay `RegionQuery`."""
    return _relay(message, context, QUERY)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Relay `RegionTrain`."""
    return _relay(message, context, TRAIN)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Relay `RegionPersonalise`."""
    return _relay(message, context, EVALUATE)


@discreet("the uplink")
def _relay(message: Message, context: Context, phase: str) -> Message:
    configure(TEXT)
    settings = dict(context.run_config)
    run = str(settings.get("run-name", ""))
    round_ = 0 if phase == QUERY else _round(message)
    expires = message.metadata.created_at + message.metadata.ttl
    with log_context(run=run, round=round_):
        reply = BridgeClient(bridge_of(context), limit=limit_of(context)).relay(
            message.content,
            run=run,
            round_=round_,
            phase=phase,
            settings=settings,
            timeout=max(expires - time.time(), 0.0),
        )
        log.info("%s: relayed to the coordinator and back", phase)
    return Message(reply, reply_to=message)


def bridge_of(context: Context) -> Endpoint:
    """Read from the node's configuration where the coordinator is.

    Raises
    ------
    ConfigurationError
        Naming the flag to start the SuperNode with.
    """
    address, token, tls = (
        context.node_config.get(key, "") for key in ("bridge", "bridge-token", "bridge-tls")
    )
    if not (isinstance(address, str) and isinstance(token, str) and isinstance(tls, str)) or not (
        address and token
    ):
        raise ConfigurationError(
            "this node does not know where its region's coordinator is. Start its SuperNode with "
            '--node-config \'bridge="127.0.0.1:9095" bridge-token="/path/to/token"\'.'
        )
    return Endpoint(address, Path(token), Path(tls) if tls else None)


def limit_of(context: Context) -> int:
    """Return the bytes that a reply may have: ``limit-mib`` of the node's configuration."""
    given = context.node_config.get("limit-mib", LIMIT_MIB)
    if type(given) is not int or given <= 0:
        raise ConfigurationError(f"limit-mib={given!r}: expected a whole number above 0.")
    return given << 20


def _round(message: Message) -> int:
    config = message.content.get("config")
    round_ = config.get("round") if isinstance(config, ConfigRecord) else None
    if type(round_) is not int:
        raise ContractError("a message without a round cannot be relayed.")
    return round_
