"""Shamir's secret sharing over a prime field that holds a whole 256-bit secret.

Written here because the libraries at hand do not fit: pycryptodome's shares 128 bits at a time in
a field whose arithmetic is a Python loop a bit. Source: Shamir (1979), "How to share a secret".
"""

import secrets
from collections.abc import Mapping, Sequence

from regionfed.errors import ContractError

# The least prime above 2^256.
PRIME = 2**256 + 297
SECRET = 32
SHARE = 33


def split(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Return a share for each holder; any `threshold` of them recover the secret.

    Fewer tell nothing at all: for every secret there are equally many polynomials through them.

    Parameters
    ----------
    secret : bytes
        32 bytes.
    holders : sequence of int
        Distinct, each at least 0.
    threshold : int
        At least 1, at most the number of holders.
    """
    if len(secret) != SECRET or not 1 <= threshold <= len(set(holders)) == len(holders):
        raise ValueError("a secret of 32 bytes, distinct holders and a threshold within them")
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return {h: _at(coefficients, h + 1).to_bytes(SHARE, "big") for h in holders}


def _at(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def weights(holders: Sequence[int]) -> dict[int, int]:
    """Return Lagrange's coefficients at 0: the secret is the weighted sum of the shares."""
    out = {}
    for h in holders:
        above, below = 1, 1
        for other in holders:
            if other != h:
                above = above * (other + 1) % PRIME
                below = below * (other - h) % PRIME
        out[h] = above * pow(below, -1, PRIME) % PRIME
    return out


def combine(shares: Mapping[int, bytes], weight: Mapping[int, int]) -> bytes:
    """Return the secret of shares by holder.

    Parameters
    ----------
    shares : Mapping of int to bytes
        By holder; as many as the threshold, or more.
    weight : Mapping of int to int
        `weights` of the same holders.

    Raises
    ------
    ContractError
        If they are no shares of 32 bytes.
    """
    total = 0
    for holder, share in shares.items():
        total += weight[holder] * int.from_bytes(share, "big")
    try:
        return (total % PRIME).to_bytes(SECRET, "big")
    except OverflowError as error:
        raise ContractError("secure aggregation: shares that belong to no secret.") from error
