"""Flower's simulation without Ray: its backend runs a ClientApp in this process.

`flwr run .` starts Ray beside the ServerApp (14 s of processor time, 500 MB, and its own handler of
SIGTERM) to carry messages to virtual nodes. Our regions live elsewhere, and Ray would carry none.
Flower has no setting for another backend; it imports one by module name when it needs it, and finds
this one in its place. Where that name has changed, Ray starts as ever, and nothing else differs.
"""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

_REPLACED = "flwr.server.superlink.fleet.vce.backend.raybackend"


class InProcessBackend:
    """Answers messages to virtual nodes one at a time, here."""

    num_workers = 1

    def __init__(self, backend_config: object) -> None:
        del backend_config
        self._load: Callable[[], ClientApp] = ClientApp

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        """Take the ClientApp that answers."""
        self._load = app_fn

    def is_worker_idle(self) -> bool:
        """Tell Flower that a message can be taken."""
        return True

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        """Answer one message."""
        return self._load()(message, context), context

    def terminate(self) -> None:
        """Nothing runs elsewhere."""


def spare_ray() -> bool:
    """In `flwr-simulation`, let Flower find `InProcessBackend` where it looks for Ray's.

    Returns whether it will. To be called while the app's modules are imported: Flower loads the
    ClientApp just before its backend.
    """
    if Path(sys.argv[0]).name != "flwr-simulation" or _REPLACED in sys.modules:
        return False
    try:
        if find_spec(_REPLACED) is None:
            return False
    except ImportError:
        return False
    module: Any = ModuleType(_REPLACED)
    module.RayBackend = InProcessBackend
    sys.modules[_REPLACED] = module
    return True
