"""The region as the world sees it: a ClientApp that relays two messages to a coordinator."""

import logging
from collections.abc import Callable
from typing import TypeVar

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from region_app.coordinator import Coordinator
from regionfed.contract import RegionPersonalise, RegionTrain, decode, encode
from regionfed.errors import RegionFedError, RunError

log = logging.getLogger(__name__)

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


def _relay(message: Message, kind: type[Request], answer: Callable[[Request], object]) -> Message:
    """Answer a message; of an unforeseen error the world learns the type and no more.

    Our own errors are written to be read by others. The text of any other may quote data.
    """
    try:
        return Message(encode(answer(decode(kind, message.content, {}))), reply_to=message)
    except RegionFedError:
        raise
    except Exception as error:
        log.exception("the coordinator failed")
        raise RunError(
            f"the coordinator failed ({type(error).__name__}); the region's own log says why"
        ) from None
