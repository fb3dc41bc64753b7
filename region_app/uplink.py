"""The region as the world sees it: a ClientApp that relays two messages to a coordinator."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from region_app.coordinator import Coordinator
from regionfed.contract import RegionPersonalise, RegionTrain, decode, encode


def make_uplink(coordinator: Coordinator) -> ClientApp:
    """Return the ClientApp of a region whose coordinator lives in this process."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        request = decode(RegionTrain, message.content, {})
        return Message(encode(coordinator.train(request)), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        del context
        request = decode(RegionPersonalise, message.content, {})
        return Message(encode(coordinator.personalise(request)), reply_to=message)

    return app
