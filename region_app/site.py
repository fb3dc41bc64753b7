"""A region's own place: what its operator says of it, in a file on the coordinator's machine.

.. code-block:: toml

    region = "UK"
    folder = "/var/lib/regionfed"   # ledger, state and replies; nothing of it leaves

    [bridge]
    address = "127.0.0.1:9095"
    token = "/etc/regionfed/bridge.token"
    # tls = "/etc/regionfed/tls"    # ca.crt, tls.crt, tls.key; needed beyond this machine

The environment variable `FILE` names the file. None of it is in the run configuration, which every
device of the region is sent.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from region_app.bridge.endpoint import Endpoint
from regionfed.errors import ConfigurationError

FILE = "REGIONFED_REGION"
LIMIT_MIB = 16 * 1024


@dataclass(frozen=True)
class Site:
    """Where a region's coordinator runs.

    Attributes
    ----------
    region : str
    folder : Path
        Below it each run has a folder of its own name.
    bridge : Endpoint
        Where its uplink finds it.
    limit : int
        Bytes that a message over the bridge may have (`limit-mib` in the file).
    devices : int
        How many devices the region declares; 0 for as many as the dataset says.
    seeded_noise : bool
        Whether runs with a `noise-seed`, which voids privacy, are let in: for tests alone.
    """

    region: str
    folder: Path
    bridge: Endpoint
    limit: int = LIMIT_MIB << 20
    devices: int = 0
    seeded_noise: bool = False

    @classmethod
    def load(cls, environment: Mapping[str, str] = os.environ) -> "Site":
        """Read the file that the environment names.

        Raises
        ------
        ConfigurationError
            Naming the file and the entry that is missing, unknown or malformed.
        """
        path = environment.get(FILE, "")
        if not path:
            raise ConfigurationError(
                f"this coordinator does not know which region it is of: let {FILE} name its file "
                f"(docs/deployment.md) where the region's SuperExec is started."
            )
        try:
            content = tomllib.loads(Path(path).read_text("utf-8"))
            return cls._of(content)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(f"{path}: {type(error).__name__}: {error}.") from None

    @classmethod
    def _of(cls, content: dict[str, Any]) -> "Site":
        bridge = dict(content.pop("bridge"))
        endpoint = Endpoint(
            address=_text(bridge, "address"),
            token=Path(_text(bridge, "token")),
            tls=Path(_text(bridge, "tls")) if "tls" in bridge else None,
        )
        site = cls(
            region=_text(content, "region"),
            folder=Path(_text(content, "folder")),
            bridge=endpoint,
            limit=_count(content, "limit-mib", LIMIT_MIB) << 20,
            devices=_count(content, "devices", 0),
            seeded_noise=content.pop("seeded-noise", False) is True,
        )
        if unknown := sorted([*content, *bridge]):
            raise ValueError(f"unknown entries {unknown}")
        return site


def _text(table: dict[str, Any], key: str) -> str:
    value = table.pop(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key}={value!r} is no text")
    return value


def _count(table: dict[str, Any], key: str, default: int) -> int:
    value = table.pop(key, default)
    if type(value) is not int or value < 0:
        raise ValueError(f"{key}={value!r} is no whole number from 0")
    return value
