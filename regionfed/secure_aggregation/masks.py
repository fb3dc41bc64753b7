"""Keys that two devices agree on, and keystreams that hide a vector and cancel in a sum.

X25519 for the agreement, HKDF-SHA256 for its keys, AES-256 in counter mode for the keystream: all
from `cryptography`. A key is bound to one exchange and one purpose, and expanded once.
"""

import struct

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from regionfed.errors import ContractError
from regionfed.secure_aggregation.fixed_point import Ring

KEY = 32
# A key seals one message in its life, so that its nonce may be fixed.
_NONCE = bytes(12)
_BLOCK = 1 << 20


def public_key(private: bytes) -> bytes:
    """Return the X25519 public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _derived(secret: bytes, digest: bytes, purpose: str, *devices: int) -> bytes:
    info = b"regionfed secure aggregation " + purpose.encode()
    info += struct.pack(f">{len(devices)}I", *devices)
    return HKDF(hashes.SHA256(), KEY, salt=digest, info=info).derive(secret)


def _shared(private: bytes, public: bytes) -> bytes:
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:  # a point of small order, or not 32 bytes
        raise ContractError(f"secure aggregation: unusable public key ({error}).") from error


def pair_key(private: bytes, public: bytes, digest: bytes, one: int, other: int) -> bytes:
    """Return the mask key of two devices; both come to the same."""
    return _derived(_shared(private, public), digest, "pair", *sorted((one, other)))


def self_key(seed: bytes, digest: bytes, device: int) -> bytes:
    """Return the key of the mask that a device has for itself."""
    return _derived(seed, digest, "self", device)


def seal(private: bytes, public: bytes, digest: bytes, way: tuple[int, int], text: bytes) -> bytes:
    """Encrypt for one device what the coordinator carries; `way` is (sender, receiver)."""
    key = _derived(_shared(private, public), digest, "seal", *way)
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, digest)


def unseal(
    private: bytes, public: bytes, digest: bytes, way: tuple[int, int], sealed: bytes
) -> bytes:
    """Decrypt what `seal` made.

    Raises
    ------
    ContractError
        If it is anything else: another's, of another exchange, replayed, or tampered with.
    """
    key = _derived(_shared(private, public), digest, "seal", *way)
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, digest)
    except InvalidTag as error:
        raise ContractError(
            f"secure aggregation: what device {way[0]} sealed for device {way[1]} is not sound."
        ) from error


def add_mask(total: Ring, key: bytes, *, subtract: bool = False) -> None:
    """Add a key's keystream to a vector of the ring, in place, or take it away again."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    size = total.dtype.itemsize
    zeros = memoryview(bytes(_BLOCK * size))
    # A counter mode writes what it reads, and the library wants room for one block more.
    buffer = np.empty(_BLOCK * size + 16, np.uint8)
    for start in range(0, len(total), _BLOCK):
        part = total[start : start + _BLOCK]
        written = stream.update_into(zeros[: part.nbytes], buffer)  # type: ignore[arg-type]
        mask = buffer[:written].view(total.dtype)
        if subtract:
            part -= mask
        else:
            part += mask
