"""The coordinator's arithmetic: take the masks off a sum, with the shares that devices gave."""

import hashlib
from collections.abc import Mapping, Sequence

from regionfed.errors import ContractError
from regionfed.secure_aggregation import masks, shares
from regionfed.secure_aggregation.fixed_point import Ring
from regionfed.secure_aggregation.messages import Advert


def remove_masks(
    total: Ring,
    digest: bytes,
    adverts: Mapping[int, Advert],
    *,
    sharers: Sequence[int],
    survivors: Sequence[int],
    given: Mapping[int, Sequence[bytes]],
) -> None:
    """Turn the sum of the survivors' masked replies into the sum of their replies, in place.

    Parameters
    ----------
    total : Ring
        Sum of masked replies.
    digest : bytes
        Of the terms.
    adverts : Mapping of int to Advert
    sharers : sequence of int
        In order; the devices whose masks are in the replies.
    survivors : sequence of int
        The devices whose replies are in the sum.
    given : Mapping of int to sequence of bytes
        By device that answered the last step: its shares, in the order of `sharers`.

    Raises
    ------
    ContractError
        If the shares recover other secrets than were advertised: some device gave a wrong one.
    """
    weight = shares.weights(sorted(given))
    for i, device in enumerate(sharers):
        held = {holder: pieces[i] for holder, pieces in given.items()}
        secret = shares.combine(held, weight)
        if device in survivors:
            _require(device, hashlib.sha256(secret).digest() == adverts[device].commitment)
            masks.add_mask(total, masks.self_key(secret, digest, device), subtract=True)
            continue
        _require(device, masks.public_key(secret) == adverts[device].masking)
        for other in survivors:
            key = masks.pair_key(secret, adverts[other].masking, digest, device, other)
            # What the survivor added to hide from this device, the device would have taken away.
            masks.add_mask(total, key, subtract=other < device)


def _require(device: int, sound: bool) -> None:
    if not sound:
        raise ContractError(
            f"secure aggregation: the shares of device {device}'s secret recover another one; "
            f"some device gave a wrong share, and the sum stays hidden."
        )
