"""Five steps between devices, without Flower: what cancels, what is refused, what nobody learns."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy import stats

from regionfed.errors import ContractError
from regionfed.randomness import SeededRandomness
from regionfed.secure_aggregation import device, masks
from regionfed.secure_aggregation.device import Session
from regionfed.secure_aggregation.fixed_point import Ring, fixed_point
from regionfed.secure_aggregation.messages import Advert, survivors_statement
from regionfed.secure_aggregation.terms import Terms
from regionfed.secure_aggregation.unmasking import remove_masks

LENGTH = 40
LEVEL = 1e-3


def terms_of(devices: int = 7, dropouts: int = 2, colluders: int = 1, **changes: Any) -> Terms:
    terms = Terms(
        run="7",
        round=1,
        message_type="train.gradient",
        number=0,
        nonce="00",
        devices=devices,
        dropouts=dropouts,
        colluders=colluders,
        fields=["total"],
        lengths=[LENGTH],
        bounds=[0.5],
        noise=[0.0],
        examples=100,
    )
    return replace(terms, **changes)


class Room:
    """All devices of one exchange, and the coordinator that carries their messages."""

    def __init__(self, terms: Terms, identities: dict[int, Ed25519PrivateKey] | None = None):
        self.terms = terms
        self.fixed = fixed_point(terms)
        numbers = range(terms.devices)
        self.identities = identities or {i: Ed25519PrivateKey.generate() for i in numbers}
        self.sessions: dict[int, Session] = {}
        self.adverts: dict[int, bytes] = {}
        self.sealed: dict[int, dict[int, bytes]] = {}
        self.masked: dict[int, Ring] = {}

    def advertise(self, absent: Iterable[int] = ()) -> None:
        for i in set(range(self.terms.devices)) - set(absent):
            opened = device.advertise(self.terms, i, self.identities[i])
            self.sessions[i], self.adverts[i] = opened

    def share(self, absent: Iterable[int] = ()) -> None:
        for i in self.adverts.keys() - set(absent):
            out = device.share(self.sessions[i], list(self.adverts.values()), {})
            self.sessions[i], self.sealed[i] = out

    def boxes(self, receiver: int) -> dict[int, bytes]:
        return {s: box[receiver] for s, box in self.sealed.items() if s != receiver}

    def mask(self, values: dict[int, torch.Tensor], absent: Iterable[int] = ()) -> None:
        for i in self.sealed.keys() - set(absent):
            self.sessions[i] = device.mask(self.sessions[i], self.boxes(i))
            vector = self.fixed.encode({"total": values[i]}, SeededRandomness(0)("noise", i))
            device.add_masks(self.sessions[i], vector)
            self.masked[i] = vector

    def agree(self) -> dict[int, bytes]:
        signatures = {}
        for i in sorted(self.masked):
            signed = device.agree(self.sessions[i], sorted(self.masked), self.identities[i])
            self.sessions[i], signatures[i] = signed
        return signatures

    def unmask(self, signatures: dict[int, bytes], absent: Iterable[int] = ()) -> torch.Tensor:
        given = {}
        for i in signatures.keys() - set(absent):
            self.sessions[i], given[i] = device.unmask(self.sessions[i], signatures)
        total = self.fixed.zeros()
        for vector in self.masked.values():
            total += vector
        remove_masks(
            total,
            self.terms.digest,
            {i: Advert.unpack(a) for i, a in self.adverts.items()},
            sharers=sorted(self.sealed),
            survivors=sorted(self.masked),
            given=given,
        )
        return self.fixed.decode(total)["total"]


def some_values(devices: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {i: torch.randn(LENGTH, generator=generator) for i in range(devices)}


def all_steps(
    room: Room, values: dict[int, torch.Tensor], gone: dict[str, list[int]]
) -> torch.Tensor:
    room.advertise(gone.get("advertise", []))
    room.share(gone.get("share", []))
    room.mask(values, gone.get("mask", []))
    return room.unmask(room.agree(), gone.get("unmask", []))


@pytest.mark.parametrize(
    "gone",
    [
        {},
        {"advertise": [6]},
        {"share": [0, 3]},
        {"mask": [0, 6]},
        {"unmask": [2, 5]},
        {"advertise": [1], "mask": [4]},
        {"share": [1], "unmask": [0]},
    ],
    ids=str,
)
def test_the_sum_is_that_of_the_survivors_wherever_devices_vanish(
    gone: dict[str, list[int]],
) -> None:
    """Exact up to half a step a device, with as many drop-outs as are tolerated, at any step."""
    room, values = Room(terms_of()), some_values(7)
    total = all_steps(room, values, gone)
    lost = {i for step in ("advertise", "share", "mask") for i in gone.get(step, [])}
    assert sorted(room.masked) == sorted(set(range(7)) - lost)
    expected = sum(v.double() for i, v in values.items() if i not in lost)
    step = room.fixed.segments[0].step
    # What float32 adds is far below that.
    assert float((total.double() - expected).abs().max()) <= 7 * (step / 2) * 1.01


@pytest.mark.parametrize("step", ["advertise", "share", "mask", "unmask"])
def test_one_more_than_tolerated_and_devices_open_nothing(step: str) -> None:
    """Three of seven are gone where two may be: the next step is refused by the devices."""
    room, values = Room(terms_of()), some_values(7)
    with pytest.raises(ContractError, match="4 of 7 devices are left, 5 are needed"):
        if step == "unmask":
            room.advertise()
            room.share()
            room.mask(values)
            signatures = room.agree()
            few = dict(list(signatures.items())[:4])
            room.sessions[0], _ = device.unmask(room.sessions[0], few)
        else:
            all_steps(room, values, {step: [0, 1, 2]})


def masked_room() -> Room:
    room = Room(terms_of())
    room.advertise()
    room.share()
    room.mask(some_values(7))
    return room


def test_each_masked_reply_is_uniform_and_so_is_each_sum_of_a_few() -> None:
    """The coordinator's view: chi-square on bytes of one, of six, of differences."""
    terms = terms_of(lengths=[20_000])
    room = Room(terms)
    values = {i: torch.full((20_000,), 0.25) for i in range(7)}
    room.advertise()
    room.share()
    room.mask(values)
    views = [room.masked[0], room.masked[0] - room.masked[1]]
    views.append(sum(room.masked[i] for i in range(1, 7)))  # type: ignore[arg-type]
    views.append(sum(room.masked.values()))  # type: ignore[arg-type] # self masks are on it still
    plain = room.fixed.encode({"total": values[0]}, SeededRandomness(0)("noise", 0))
    for view in views:
        counts = np.bincount(view.view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > LEVEL
        assert not np.array_equal(view, plain)
        assert abs(np.corrcoef(view.astype(float)[:-1], view.astype(float)[1:])[0, 1]) < 0.05
    # The control: without masks it is anything but uniform.
    assert stats.chisquare(np.bincount(plain.view(np.uint8), minlength=256)).pvalue < 1e-9


def test_what_the_coordinator_carries_holds_no_secret_and_no_value() -> None:
    """Neither a private key, nor a seed, nor a device's own vector is in any message."""
    room = Room(terms_of())
    room.advertise()
    secrets = {piece for s in room.sessions.values() for piece in (s.sealing, s.masking, s.seed)}
    room.share()
    values = some_values(7)
    room.mask(values)
    signatures = room.agree()
    sent = [*room.adverts.values(), *signatures.values()]
    sent += [box for boxes in room.sealed.values() for box in boxes.values()]
    sent += [vector.tobytes() for vector in room.masked.values()]
    wire = b"".join(sent)
    assert len(secrets) == 21 and not any(secret in wire for secret in secrets)
    for i, value in values.items():
        plain = room.fixed.encode({"total": value}, SeededRandomness(0)("noise", i))
        assert plain.tobytes() not in wire and value.numpy().tobytes() not in wire


def tampered(advert: bytes, at: int) -> bytes:
    return advert[:at] + bytes([advert[at] ^ 1]) + advert[at + 1 :]


@pytest.mark.parametrize("at", [3, 4, 36, 68, 100, 132], ids=str)
def test_an_advert_that_was_changed_anywhere_is_refused(at: int) -> None:
    """Number, keys, commitment, identity, signature."""
    room = Room(terms_of())
    room.advertise()
    room.adverts[2] = tampered(room.adverts[2], at)
    with pytest.raises(ContractError, match=r"not signed|two adverts|declared"):
        device.share(room.sessions[0], list(room.adverts.values()), {})


def test_swapped_keys_are_refused() -> None:
    """Two devices' keys under each other's names; own keys replaced; a pinned identity changed."""
    room = Room(terms_of())
    room.advertise()
    one, two = Advert.unpack(room.adverts[1]), Advert.unpack(room.adverts[2])
    others = [a for i, a in room.adverts.items() if i not in {1, 2}]
    swapped = [replace(one, device=2).pack(), replace(two, device=1).pack()]
    with pytest.raises(ContractError, match="not signed for this exchange"):
        device.share(room.sessions[0], [*others, *swapped], {})
    impostor = Room(terms_of())
    impostor.advertise()
    everybody = {**room.adverts, 0: impostor.adverts[0]}
    with pytest.raises(ContractError, match="own keys were replaced"):
        device.share(room.sessions[0], list(everybody.values()), {})
    pins = {i: Advert.unpack(a).identity for i, a in room.adverts.items()}
    everybody = {**room.adverts, 3: impostor.adverts[3]}
    with pytest.raises(ContractError, match="not the one that was pinned"):
        device.share(room.sessions[0], list(everybody.values()), pins)


@pytest.mark.parametrize(
    "change", [{"round": 2}, {"noise": [1.0]}, {"nonce": "01"}, {"dropouts": 1}], ids=str
)
def test_keys_of_other_terms_are_refused(change: dict[str, Any]) -> None:
    """An advert of another round, attempt or noise level: replayed, or told to some alone."""
    room = Room(terms_of())
    room.advertise()
    other = Room(terms_of(**change), room.identities)
    other.advertise()
    everybody = {**room.adverts, 4: other.adverts[4]}
    with pytest.raises(ContractError, match="device 4: its keys are not signed"):
        device.share(room.sessions[0], list(everybody.values()), {})


def test_an_advert_replayed_within_the_same_terms_is_found_out_when_shares_are_opened() -> None:
    """Its signature is right, but nobody alive can seal under its key."""
    terms = terms_of()
    old = Room(terms)
    old.advertise()
    room = Room(terms, old.identities)
    room.advertise()
    told = {**room.adverts, 5: old.adverts[5]}
    for i in range(7):
        adverts = room.adverts if i == 5 else told
        out = device.share(room.sessions[i], list(adverts.values()), {})
        room.sessions[i], room.sealed[i] = out
    with pytest.raises(ContractError, match="device 5 sealed for device 0 is not sound"):
        device.mask(room.sessions[0], room.boxes(0))


def test_shares_sealed_for_another_device_are_refused() -> None:
    """The coordinator cannot hand one device's box to another."""
    room = Room(terms_of())
    room.advertise()
    room.share()
    boxes = room.boxes(0) | {3: room.sealed[3][1]}
    with pytest.raises(ContractError, match="is not sound"):
        device.mask(room.sessions[0], boxes)


def _twice_share(room: Room) -> None:
    device.share(room.sessions[0], list(room.adverts.values()), {})


def _twice_mask(room: Room) -> None:
    device.mask(room.sessions[0], room.boxes(0))


def _other_survivors(room: Room) -> None:
    room.agree()
    device.agree(room.sessions[0], [0, 1, 2, 3, 4], room.identities[0])


def _twice_unmask(room: Room) -> None:
    signatures = room.agree()
    room.sessions[0], _ = device.unmask(room.sessions[0], signatures)
    device.unmask(room.sessions[0], signatures)


@pytest.mark.parametrize(
    "again", [_twice_share, _twice_mask, _other_survivors, _twice_unmask], ids=lambda f: f.__name__
)
def test_no_step_is_done_twice(again: Callable[[Room], None]) -> None:
    """D10: no mask on other data, no second set of survivors, no second opening."""
    with pytest.raises(ContractError, match="out of turn"):
        again(masked_room())


def test_two_sets_of_survivors_cannot_both_be_opened() -> None:
    """A coordinator that tells halves of the region other sets gathers too few signatures."""
    room = masked_room()
    statement = {}
    for i in range(7):
        told = [0, 1, 2, 3, 4] if i < 4 else [2, 3, 4, 5, 6]
        room.sessions[i], statement[i] = device.agree(room.sessions[i], told, room.identities[i])
    for i in range(7):
        with pytest.raises(ContractError, match=r"[34] of 7 devices are left, 5 are needed"):
            device.unmask(room.sessions[i], statement)


def test_a_forged_signature_counts_for_nothing() -> None:
    """Nor does one of a device that is not among the survivors."""
    room = masked_room()
    signatures = room.agree()
    stranger = Ed25519PrivateKey.generate()
    said = survivors_statement(room.terms.digest, sorted(room.masked))
    for i in (1, 2, 3):
        signatures[i] = stranger.sign(said)
    with pytest.raises(ContractError, match="4 of 7 devices are left"):
        device.unmask(room.sessions[0], signatures)


def test_a_wrong_share_hides_the_sum_and_is_found_out() -> None:
    """What a lying device brings about is an error, not a release of rubbish."""
    room = masked_room()
    signatures = room.agree()
    piece = room.sessions[3].shares[0]
    room.sessions[3] = replace(
        room.sessions[3], shares=[piece[:-1] + bytes([piece[-1] ^ 1]), *room.sessions[3].shares[1:]]
    )
    with pytest.raises(ContractError, match="device 0's secret recover another"):
        room.unmask(signatures)


def test_keys_are_whole_and_fresh() -> None:
    """256 bits each, another for each exchange and purpose; both ends of a pair agree."""
    private = [bytes([i]) * 32 for i in (1, 2)]
    public = [masks.public_key(key) for key in private]
    one = masks.pair_key(private[0], public[1], b"d" * 32, 0, 1)
    assert one == masks.pair_key(private[1], public[0], b"d" * 32, 1, 0) and len(one) == 32
    assert one != masks.pair_key(private[0], public[1], b"e" * 32, 0, 1)
    assert one != masks.pair_key(private[0], public[1], b"d" * 32, 0, 2)
    assert masks.self_key(one, b"d" * 32, 0) != masks.self_key(one, b"d" * 32, 1)
    with pytest.raises(ContractError, match="unusable public key"):
        masks.pair_key(private[0], bytes(32), b"d" * 32, 0, 1)


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
def test_a_mask_comes_off_as_it_went_on(dtype: str) -> None:
    """Also over the edges of blocks, and it is the keystream of the key."""
    size = (1 << 20) + 5
    total = np.arange(size).astype(dtype)
    masks.add_mask(total, bytes(32))
    assert len(np.unique(total - np.arange(size).astype(dtype))) > 0.99 * size
    # The first block of AES-256 of zero under the zero key (FIPS 197, SP 800-38A layout).
    block = 16 // total.itemsize
    first = (total[:block] - np.arange(block).astype(dtype)).tobytes()
    assert first.hex() == "dc95c078a2408989ad48a21492842087"
    masks.add_mask(total, bytes(32), subtract=True)
    assert np.array_equal(total, np.arange(size).astype(dtype))
