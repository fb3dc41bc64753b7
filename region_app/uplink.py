"""The region as the world sees it: a ClientApp that relays two messages to a coordinator."""

from collections.abc import Callable
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from region_app.coordinator import Coordinator
from regionfed.contract import RegionPersonalise, RegionTrain, decode, encode
from regionfed.discretion import discreet

Request = TypeVar("Request", RegionTrain, RegionPersonalise)


def make_uplink(coordinator: Coordinator) -> ClientApp:
    """Return the ClientApp of a region whose coordinator lives in this process."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        return _relay(message, RegionTrain, coordinator.train)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        del context
        return _relay(message, RegionPersonalise, coordinator.personalise)

    return app


@discreet("the coordinator")
def _relay(message: Message, kind: type[Request], answer: Callable[[Request], object]) -> Message:
    return Message(encode(answer(decode(kind, message.content, {}))), reply_to=message)
