"""Who a device is: an Ed25519 key of its own, and the keys of others that it has pinned."""

from collections.abc import Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from regionfed.errors import ContractError
from regionfed.secure_aggregation.messages import Advert


def signed(public: bytes, statement: bytes, signature: bytes) -> bool:
    """Say whether a signature is that of a public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def check_advert(advert: Advert, digest: bytes, devices: int, pins: Mapping[int, bytes]) -> None:
    """Refuse an advert that its device did not sign for these terms.

    Raises
    ------
    ContractError
        Naming the device, and what to do about it.
    """
    if advert.device >= devices:
        raise ContractError(f"device {advert.device}: only {devices} devices are declared.")
    pinned = pins.get(advert.device)
    if pinned is not None and pinned != advert.identity:
        raise ContractError(
            f"device {advert.device}: its identity key is not the one that was pinned. If the "
            f"device was replaced, take its old key out of peers.json on each device."
        )
    if not signed(advert.identity, advert.statement(digest), advert.signature):
        raise ContractError(f"device {advert.device}: its keys are not signed for this exchange.")
