"""The region as the world sees it: a ClientApp that relays two messages to a coordinator."""

from collections.abc import Callable
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from region_app.coordinator import Coordinator
from regionfed.contract import RegionPersonalise, RegionTrain, decode, encode
from regionfed.discretion import discreet
from regionfed.logs import log_context

Request = TypeVar("Request", RegionTrain, RegionPersonalise)


def make_uplink(coordinator: Coordinator) -> ClientApp:
    """Return the ClientApp of a region whose coordinator lives in this process."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _relay(message, context, RegionTrain, coordinator.train)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _relay(message, context, RegionPersonalise, coordinator.personalise)

    return app


@discreet("the coordinator")
def _relay(
    message: Message, context: Context, kind: type[Request], answer: Callable[[Request], object]
) -> Message:
    request = decode(kind, message.content, {})
    about = {key: str(context.node_config.get(key, "")) for key in ("run", "region")}
    with log_context(**about, round=request.round):
        return Message(encode(answer(request)), reply_to=message)
