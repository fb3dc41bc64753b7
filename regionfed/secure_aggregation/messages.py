"""The messages of one secure exchange: five steps, each asked by the coordinator.

Source: Bonawitz et al. (2017), "Practical secure aggregation", figure 4, with its consistency
check. A step travels under the message type of the exchange that it serves, in a record of its
own name, so that a Flower mod meets it in front of any ClientApp that answers the exchange.
"""

import struct
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

import numpy as np
from flwr.app import RecordDict

from regionfed.contract import Length, decode, encode
from regionfed.errors import ContractError

M = TypeVar("M")

Masked = Annotated[np.ndarray, Length("ring")]


@dataclass(frozen=True)
class AdvertiseRequest:
    """Step 1, coordinator to device: these are the terms; give me your keys for them."""

    NAME: ClassVar[str] = "secure.advertise"

    terms: str


@dataclass(frozen=True)
class AdvertiseReply:
    """Device to coordinator, for all others: a packed `Advert`."""

    advert: bytes


@dataclass(frozen=True)
class ShareRequest:
    """Step 2, coordinator to device: the adverts of all who take part."""

    NAME: ClassVar[str] = "secure.share"

    adverts: list[bytes]


@dataclass(frozen=True)
class ShareReply:
    """Device to coordinator: shares of its two secrets, sealed for each other device."""

    receivers: list[int]
    sealed: list[bytes]


@dataclass(frozen=True)
class MaskRequest:
    """Step 3, coordinator to device: what others sealed for it, beside the request itself."""

    NAME: ClassVar[str] = "secure.mask"

    senders: list[int]
    sealed: list[bytes]


@dataclass(frozen=True)
class MaskReply:
    """Device to coordinator: its noised reply under masks, uniform in the ring by itself."""

    masked: Masked


@dataclass(frozen=True)
class AgreeRequest:
    """Step 4, coordinator to device: the devices whose masked replies came."""

    NAME: ClassVar[str] = "secure.agree"

    survivors: list[int]


@dataclass(frozen=True)
class AgreeReply:
    """Device to coordinator, for all others: its signature on the survivors."""

    signature: bytes


@dataclass(frozen=True)
class UnmaskRequest:
    """Step 5, coordinator to device: proof that enough devices saw the same survivors."""

    NAME: ClassVar[str] = "secure.unmask"

    signers: list[int]
    signatures: list[bytes]


@dataclass(frozen=True)
class UnmaskReply:
    """Device to coordinator: of each device that shared, one share; in the order of numbers.

    Of a survivor the share of its own mask's seed, of one that dropped out the share of the key of
    its pairwise masks; never both.
    """

    shares: list[bytes]


EXCHANGES: tuple[tuple[str, type, type], ...] = (
    ("region -> device", AdvertiseRequest, AdvertiseReply),
    ("region -> device", ShareRequest, ShareReply),
    ("region -> device", MaskRequest, MaskReply),
    ("region -> device", AgreeRequest, AgreeReply),
    ("region -> device", UnmaskRequest, UnmaskReply),
)

REQUESTS: dict[str, type] = {ask.NAME: ask for _, ask, _ in EXCHANGES}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Advert:
    """A device's public keys for one exchange, signed together with the digest of its terms.

    Attributes
    ----------
    device : int
    sealing, masking : bytes
        X25519 public keys: of what is sealed for it, and of its pairwise masks.
    commitment : bytes
        SHA-256 of the seed of its own mask: wrong shares of it are found out.
    identity : bytes
        Its Ed25519 public key, which others have pinned.
    signature : bytes
        Of `statement`.
    """

    device: int
    sealing: bytes
    masking: bytes
    commitment: bytes
    identity: bytes
    signature: bytes

    def pack(self) -> bytes:
        """Return the advert as it travels."""
        values = (self.sealing, self.masking, self.commitment, self.identity, self.signature)
        return _ADVERT.pack(self.device, *values)

    @classmethod
    def unpack(cls, data: bytes) -> "Advert":
        """Read an advert, or refuse it; its signature is another matter."""
        if len(data) != _ADVERT.size:
            raise ContractError(f"secure aggregation: an advert of {len(data)} bytes.")
        return cls(*_ADVERT.unpack(data))

    def statement(self, digest: bytes) -> bytes:
        """Return what is signed: these keys, of this device, for these terms."""
        keys = self.sealing + self.masking + self.commitment + self.identity
        return b"regionfed advert" + digest + struct.pack(">I", self.device) + keys


_ADVERT = struct.Struct(">I32s32s32s32s64s")


def survivors_statement(digest: bytes, survivors: list[int]) -> bytes:
    """Return what devices sign about who is left."""
    return b"regionfed survivors" + digest + struct.pack(f">{len(survivors)}I", *survivors)


def attach(records: RecordDict, step: object) -> RecordDict:
    """Add a step's request to records, as a record of its own."""
    records[str(type(step).NAME)] = encode(step)["config"]  # type: ignore[attr-defined]
    return records


def detach(records: RecordDict) -> object | None:
    """Take a step's request out of records and return it; None where there is none.

    Raises
    ------
    ContractError
        If there are several, or it is malformed.
    """
    names = [name for name in records if name.startswith("secure.")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in REQUESTS:
        raise ContractError(f"secure aggregation: unknown steps {sorted(names)}.")
    kind = REQUESTS[names[0]]
    found: object = decode(kind, RecordDict({"config": records.pop(names[0])}), {})
    return found
