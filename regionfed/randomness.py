"""Where randomness comes from: reproducible seeds for learning, secure noise for privacy.

Two kinds that must never be mixed up:

* *seeds* (data, initialisation, sketch signs) are derived from the run's seed by name, so
  that a run does not depend on global state or on the order of arrival;
* *private randomness* (noise, Poisson sampling) is a keystream of AES-256 in counter mode.
  Its key comes from the operating system, is used for one release, and is never stored.
  A test may pass a key derived from a seed instead: the same code then runs reproducibly.
"""

import hashlib
import secrets
from typing import Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

_UNIFORM_STEP = 2.0**-53
# No value of `PrivateRandomness.normal_block` is further from 0: sqrt(2 ln 2^65) = 9.493.
NORMAL_REACH = 9.5
# One block of doubles stays in cache and keeps the peak memory of a 60M vector near its size.
_BLOCK = 1 << 20


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed for a purpose, e.g. ``derive_seed(seed, run, round, region)``.

    SHA-256 over the parts' representations: stable over processes, versions and platforms.
    """
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class PrivateRandomness:
    """A stream of private randomness, keyed once.

    Parameters
    ----------
    key : bytes
        32 bytes; from `secrets.token_bytes` unless a test asks for reproducibility.
    """

    def __init__(self, key: bytes) -> None:
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def uniform(self, size: int) -> NDArray[np.float64]:
        """Return `size` numbers in (0, 1], 53 random bits each; shape (size,)."""
        words = np.frombuffer(self._stream.update(bytes(8 * size)), dtype="<u8")
        return ((words >> np.uint64(11)).astype(np.float64) + 1.0) * _UNIFORM_STEP

    def normal(self, size: int) -> torch.Tensor:
        """Return `size` standard normals; float32, shape (size,).

        Box-Muller in double precision. Each value is the sum of two independent normals over
        sqrt(2), which closes the floating-point attack of Mironov (2012) in the way of Holohan
        and Braghin (2021): inverting a sum of draws needs a search that a single draw does not.
        """
        out = torch.empty(size, dtype=torch.float32)
        view = out.numpy()
        for start in range(0, size, _BLOCK):
            stop = min(start + _BLOCK, size)
            n = stop - start
            u = self.uniform(4 * n).reshape(4, n)
            radius = np.sqrt(-2.0 * np.log(u[:2]))
            view[start:stop] = (radius * np.cos(2.0 * np.pi * u[2:])).sum(0) * np.sqrt(0.5)
        return out

    def normal_block(self, size: int) -> NDArray[np.float64]:
        """Return `size` standard normals in double precision, for who rounds them to integers.

        Box-Muller on 64 random bits a value. None is beyond 9.493, where a Gaussian has a mass of
        2.3e-21; shape (size,).
        """
        half = (size + 1) // 2
        words = np.frombuffer(self._stream.update(bytes(16 * half)), dtype="<u8")
        radius = words[:half].astype(np.float64)
        radius *= 2.0**-64
        radius += 2.0**-65
        np.log(radius, out=radius)
        radius *= -2.0
        # Half a step above 1 would be a root of less than nothing.
        np.sqrt(np.maximum(radius, 0.0, out=radius), out=radius)
        angle = words[half:].astype(np.float64)
        angle *= 2.0 * np.pi * 2.0**-64
        out = np.empty(2 * half)
        np.multiply(np.cos(angle), radius, out=out[:half])
        np.multiply(np.sin(angle), radius, out=out[half:])
        return out[:size]

    def bernoulli(self, probability: float, size: int) -> NDArray[np.bool_]:
        """Return `size` independent coins; the Poisson sample of a set. Shape (size,)."""
        return self.uniform(size) <= probability


class RandomnessSource(Protocol):
    """Gives private randomness for one named release."""

    def __call__(self, *purpose: object) -> PrivateRandomness:
        """Return a fresh stream for `purpose`; asking twice gives an independent stream."""
        ...


def secure_randomness(*purpose: object) -> PrivateRandomness:
    """Return a stream with a key from the operating system; `purpose` does not enter it."""
    del purpose
    return PrivateRandomness(secrets.token_bytes(32))


class SeededRandomness:
    """Reproducible private randomness FOR TESTS ONLY: whoever knows the seed removes the noise."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, *purpose: object) -> PrivateRandomness:
        """Return the stream of `purpose`; the same purpose gives the same stream."""
        name = "\x1f".join(map(str, ("noise for tests", self._seed, *purpose)))
        return PrivateRandomness(hashlib.sha256(name.encode()).digest())


def randomness_source(noise_seed: int) -> RandomnessSource:
    """Return the source that a configuration asks for: secure unless ``noise_seed >= 0``."""
    return secure_randomness if noise_seed < 0 else SeededRandomness(noise_seed)
