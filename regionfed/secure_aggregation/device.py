"""A device's side of one exchange: five steps, pure but for randomness.

A session goes through its steps in order, each once. So a repeated message never gets a mask
on other data; a device that has forgotten its session, or lost its place, counts as dropped out.
Source: Bonawitz et al. (2017), figure 4.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from regionfed.errors import ContractError
from regionfed.secure_aggregation import masks, shares
from regionfed.secure_aggregation.fixed_point import Ring
from regionfed.secure_aggregation.messages import Advert, survivors_statement
from regionfed.secure_aggregation.signing import check_advert, signed
from regionfed.secure_aggregation.terms import Terms


@dataclass(frozen=True)
class Session:
    """What a device remembers between two steps of one exchange: keys and shares, no data.

    Attributes
    ----------
    terms : str
    device : int
        Its number in the region.
    step : str
        The step that it answered last.
    sealing, masking : bytes
        X25519 private keys.
    seed : bytes
        Of its own mask.
    adverts : list of bytes
        Everybody's, in the order of numbers.
    sharers : list of int
        Devices that have shared their secrets, itself among them; whose masks are in its reply.
    shares : list of bytes
        For each sharer, its share of the masking key, then that of the seed.
    survivors : list of int
        Devices whose masked replies came; itself among them.
    """

    terms: str
    device: int
    step: str
    sealing: bytes
    masking: bytes
    seed: bytes
    adverts: list[bytes] = field(default_factory=list)
    sharers: list[int] = field(default_factory=list)
    shares: list[bytes] = field(default_factory=list)
    survivors: list[int] = field(default_factory=list)

    def agreed(self) -> Terms:
        """Return the terms of this session."""
        return Terms.from_text(self.terms)

    def others(self) -> dict[int, Advert]:
        """Return the adverts by device."""
        return {a.device: a for a in map(Advert.unpack, self.adverts)}

    def require(self, step: str) -> None:
        """Refuse a step that is asked for out of turn, or twice."""
        if self.step != step:
            raise ContractError(
                f"secure aggregation: asked out of turn (this device's last step was '{self.step}')"
            )


def advertise(terms: Terms, device: int, identity: Ed25519PrivateKey) -> tuple[Session, bytes]:
    """Step 1: open a session with fresh keys, and return them signed."""
    session = Session(
        terms=terms.to_text(),
        device=device,
        step="advertise",
        sealing=secrets.token_bytes(masks.KEY),
        masking=secrets.token_bytes(masks.KEY),
        seed=secrets.token_bytes(masks.KEY),
    )
    advert = Advert(
        device=device,
        sealing=masks.public_key(session.sealing),
        masking=masks.public_key(session.masking),
        commitment=hashlib.sha256(session.seed).digest(),
        identity=identity.public_key().public_bytes_raw(),
        signature=bytes(64),
    )
    signature = identity.sign(advert.statement(terms.digest))
    advert = replace(advert, signature=signature)
    return replace(session, adverts=[advert.pack()]), advert.pack()


def share(
    session: Session, adverts: list[bytes], pins: Mapping[int, bytes]
) -> tuple[Session, dict[int, bytes]]:
    """Step 2: check everybody's keys, and return this device's secrets in sealed shares.

    Parameters
    ----------
    session : Session
    adverts : list of bytes
        Of all who take part, this device among them.
    pins : Mapping of int to bytes
        Identity keys that are known already; a device that is not among them is believed.

    Raises
    ------
    ContractError
        If too few take part, or somebody's keys are not in order.
    """
    session.require("advertise")
    terms, digest = session.agreed(), session.agreed().digest
    found = {a.device: a for a in map(Advert.unpack, adverts)}
    if len(found) != len(adverts) or len({a.identity for a in found.values()}) != len(found):
        raise ContractError("secure aggregation: two adverts of one device.")
    if session.device not in found or found[session.device].pack() != session.adverts[0]:
        raise ContractError("secure aggregation: this device's own keys were replaced.")
    _require_enough(terms, len(found))
    for advert in found.values():
        check_advert(advert, digest, terms.devices, pins)
    holders = sorted(found)
    pieces = [
        shares.split(secret, holders, terms.tolerance.threshold)
        for secret in (session.masking, session.seed)
    ]
    own = b"".join(piece[session.device] for piece in pieces)
    sealed = {
        h: masks.seal(
            session.sealing,
            found[h].sealing,
            digest,
            (session.device, h),
            b"".join(piece[h] for piece in pieces),
        )
        for h in holders
        if h != session.device
    }
    session = replace(
        session,
        step="share",
        adverts=[found[h].pack() for h in holders],
        sharers=[session.device],
        shares=[own],
    )
    return session, sealed


def mask(session: Session, sealed: Mapping[int, bytes]) -> Session:
    """Step 3, first half: open what others have sealed. `add_masks` is the other half.

    That it opens under this session's fresh key proves that each sender is alive in this very
    exchange: an advert that was replayed has nobody who could seal for it.

    Raises
    ------
    ContractError
        If too few have shared, or what one sealed is not sound.
    """
    session.require("share")
    terms, adverts = session.agreed(), session.others()
    if not sealed.keys() <= adverts.keys() - {session.device}:
        raise ContractError("secure aggregation: shares of devices that take no part.")
    _require_enough(terms, len(sealed) + 1)
    held = {session.device: session.shares[0]}
    for sender, box in sealed.items():
        way = (sender, session.device)
        held[sender] = masks.unseal(
            session.sealing, adverts[sender].sealing, terms.digest, way, box
        )
    if any(len(piece) != 2 * shares.SHARE for piece in held.values()):
        raise ContractError("secure aggregation: shares of another length.")
    sharers = sorted(held)
    return replace(session, step="mask", sharers=sharers, shares=[held[s] for s in sharers])


def add_masks(session: Session, total: Ring) -> None:
    """Step 3, second half: hide a vector of the ring, in place.

    One expansion for each other device and one for itself. Of two devices the lower number adds
    their mask, the other takes it away.
    """
    digest, adverts = session.agreed().digest, session.others()
    masks.add_mask(total, masks.self_key(session.seed, digest, session.device))
    for other in session.sharers:
        if other == session.device:
            continue
        key = masks.pair_key(session.masking, adverts[other].masking, digest, session.device, other)
        masks.add_mask(total, key, subtract=session.device > other)


def agree(
    session: Session, survivors: list[int], identity: Ed25519PrivateKey
) -> tuple[Session, bytes]:
    """Step 4: sign who is left; once, so that nobody is told of two sets.

    Raises
    ------
    ContractError
        If too few are left, or some never took part.
    """
    session.require("mask")
    terms = session.agreed()
    if survivors != sorted(set(survivors)) or not set(survivors) <= set(session.sharers):
        raise ContractError("secure aggregation: survivors that took no part.")
    if session.device not in survivors:
        raise ContractError("secure aggregation: this device is not among the survivors.")
    _require_enough(terms, len(survivors))
    signature = identity.sign(survivors_statement(terms.digest, survivors))
    return replace(session, step="agree", survivors=survivors), signature


def unmask(session: Session, signatures: Mapping[int, bytes]) -> tuple[Session, list[bytes]]:
    """Step 5: return one share of each device, if enough have signed the same survivors.

    Raises
    ------
    ContractError
        If not.
    """
    session.require("agree")
    terms, adverts = session.agreed(), session.others()
    statement = survivors_statement(terms.digest, session.survivors)
    good = [
        device
        for device, signature in signatures.items()
        if device in session.survivors and signed(adverts[device].identity, statement, signature)
    ]
    _require_enough(terms, len(good))
    out = [
        piece[shares.SHARE :] if sharer in session.survivors else piece[: shares.SHARE]
        for sharer, piece in zip(session.sharers, session.shares, strict=True)
    ]
    # Nothing is left that a second question could be answered with.
    done = Session(session.terms, session.device, "unmask", b"", b"", b"")
    return done, out


def _require_enough(terms: Terms, count: int) -> None:
    least = terms.tolerance.threshold
    if count < least:
        raise ContractError(
            f"secure aggregation: {count} of {terms.devices} devices are left, {least} are needed; "
            f"tolerated-dropouts says how many may fail."
        )
