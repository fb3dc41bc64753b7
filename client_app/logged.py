"""A Flower mod that has a device log of which region, device and round it speaks."""

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from regionfed.logs import configure, log_context


def logged(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Pass a message on; whatever is missing of what it is about is left out."""
    configure()
    config = message.content.get("config")
    round_ = config.get("round", "") if isinstance(config, ConfigRecord) else ""
    node = context.node_config
    with log_context(
        run=str(context.run_config.get("run-name", "")),
        region=str(node.get("region", "")),
        device=str(node.get("partition-id", "")),
        round=round_ if type(round_) is int else "",
    ):
        return call_next(message, context)
