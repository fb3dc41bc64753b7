"""What all devices of one exchange agree on before they answer it: the terms, signed by each."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from regionfed.config import Config
from regionfed.errors import ContractError

# Keeps a lying sender from asking for endless work.
_MOST_DEVICES = 65_536


@dataclass(frozen=True)
class Tolerance:
    """How many of a region's devices may fail, and how many may side with the coordinator.

    Attributes
    ----------
    devices : int
        n, as declared.
    dropouts : int
        D: how many may vanish during one exchange, at whatever step.
    colluders : int
        K: how many may tell the coordinator all they know.
    """

    devices: int
    dropouts: int
    colluders: int

    @property
    def threshold(self) -> int:
        """Devices that every step needs, ``t = n - D``; so many shares recover a secret.

        ``2 t > n + K`` (see `tolerance_of`), so that no two sets of survivors can both gather t
        signatures; ``t > K``, so that colluders recover nothing by themselves.
        """
        return self.devices - self.dropouts

    @property
    def honest(self) -> int:
        """Devices whose noise is in every sum and known to nobody: ``h = n - D - K``, at least."""
        return self.devices - self.dropouts - self.colluders

    @property
    def excess(self) -> float:
        """The most that the noise in a sum can be, over what is accounted: ``sqrt(n / h)``."""
        return math.sqrt(self.devices / self.honest)


def tolerance_of(config: Config, devices: int) -> Tolerance:
    """Return what a configuration tolerates in a region of so many devices.

    The configuration has ``2 d + k < 1`` for the fractions, hence ``2 D + K < n``.
    """
    return Tolerance(
        devices,
        math.floor(config.tolerated_dropouts * devices),
        math.floor(config.tolerated_colluders * devices),
    )


def excess_of(config: Config, devices: int) -> float:
    """Return the most that noise can be, over what is accounted: 1 if the coordinator draws it."""
    return 1.0 if config.secure_aggregation == "off" else tolerance_of(config, devices).excess


@dataclass(frozen=True)
class Terms:
    """One exchange: which it is, who takes part, what is summed, under how much noise.

    Attributes
    ----------
    run : str
        Flower's run id.
    round : int
    message_type : str
        Flower message type of the request that it carries.
    number : int
        Which of a round's requests of that type.
    nonce : str
        Fresh for each attempt; hexadecimal.
    devices, dropouts, colluders : int
        See `Tolerance`.
    fields : list of str
        Fields of the reply that are summed, in this order.
    lengths : list of int
    bounds : list of float
        L2 bound on what one example adds to each field.
    noise : list of float
        Noise multiplier that the sum of each field has at least; 0 is none.
    examples : int
        The most examples that a device is declared to hold.
    """

    run: str
    round: int
    message_type: str
    number: int
    nonce: str
    devices: int
    dropouts: int
    colluders: int
    fields: list[str]
    lengths: list[int]
    bounds: list[float]
    noise: list[float]
    examples: int

    @property
    def tolerance(self) -> Tolerance:
        """Who may fail."""
        return Tolerance(self.devices, self.dropouts, self.colluders)

    def to_text(self) -> str:
        """Return the one text that stands for these terms."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def exchange(self) -> str:
        """Name the exchange among those of its round."""
        return f"{self.message_type} {self.number}"

    @property
    def digest(self) -> bytes:
        """SHA-256 of the text: keys are bound to it and signatures cover it."""
        return hashlib.sha256(self.to_text().encode()).digest()

    @classmethod
    def from_text(cls, text: str) -> "Terms":
        """Read terms, or refuse them.

        Raises
        ------
        ContractError
            Naming what is wrong.
        """
        try:
            values = json.loads(text)
            terms = cls(**values)
        except (ValueError, TypeError, RecursionError) as error:
            raise ContractError(f"terms of secure aggregation: unreadable ({error}).") from error
        for one in fields(cls):
            _check_type(one.name, one.type, getattr(terms, one.name))
        terms._check_values()
        if terms.to_text() != text:
            raise ContractError("terms of secure aggregation: not written as they must be.")
        return terms

    def _check_values(self) -> None:
        n, t = self.devices, self.tolerance
        whole = 0 < n <= _MOST_DEVICES and self.dropouts >= 0 and self.colluders >= 0
        if not whole or 2 * self.dropouts + self.colluders >= n:
            raise ContractError(
                f"terms of secure aggregation: of {n} devices {self.dropouts} may drop out and "
                f"{self.colluders} collude; 2 dropouts + colluders must be less than the devices."
            )
        columns = (self.fields, self.lengths, self.bounds, self.noise)
        numbers = [*self.bounds, *self.noise]
        if (
            len({len(column) for column in columns}) != 1
            or len(set(self.fields)) != len(self.fields)
            or not self.fields
            or any(length < 0 for length in self.lengths)
            or any(not math.isfinite(v) or v < 0.0 for v in numbers)
            or any(bound <= 0.0 for bound in self.bounds)
            or self.examples < 1
            or self.round < 0
            or t.honest < 1
        ):
            raise ContractError("terms of secure aggregation: fields and numbers do not fit.")


_ITEMS: dict[str, type] = {"list[str]": str, "list[int]": int, "list[float]": float}


def _check_type(name: str, declared: Any, value: Any) -> None:
    said = declared if isinstance(declared, str) else getattr(declared, "__name__", "")
    said = str(declared) if said == "list" else said
    if said in _ITEMS:
        good = isinstance(value, list) and all(type(v) is _ITEMS[said] for v in value)
    else:
        good = type(value).__name__ == said
    if not good:
        raise ContractError(f"terms of secure aggregation: '{name}' is no {said}.")
