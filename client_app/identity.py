"""Which device this is: one resolver for simulation and for real SuperNodes."""

from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context

from regionfed.errors import ConfigurationError


@dataclass(frozen=True)
class Identity:
    """A device: its region, and its number within it."""

    region: str
    index: int


def identity_of(context: Context) -> Identity:
    """Read ``region`` and ``partition-id`` from the node's configuration.

    Raises
    ------
    ConfigurationError
        Naming the flag to start the SuperNode with. Flower gives a partition-id by itself only
        in its own simulation; a real node is told.
    """
    region = context.node_config.get("region")
    index = context.node_config.get("partition-id")
    if not isinstance(region, str) or type(index) is not int:
        raise ConfigurationError(
            f"this node does not know who it is (region={region!r}, partition-id={index!r}). "
            f"Start its SuperNode with --node-config 'region=\"UK\" partition-id=0'."
        )
    return Identity(region, index)


def state_folder(context: Context) -> Path:
    """Return the device's own folder: ``state-folder`` of the node's configuration, or a default.

    What is large and stays on the device lies there. Flower's `Context.state` is shipped from
    process to process with every message.
    """
    who = identity_of(context)
    given = context.node_config.get("state-folder")
    if isinstance(given, str) and given:
        return Path(given).expanduser()
    return Path.home() / ".regionfed" / "devices" / who.region / str(who.index)
