"""Sums of which the coordinator sees nothing but the noised end: secure aggregation.

The coordinator carries what devices seal for each other, adds masked replies up, and is given the
means to take the masks off their sum only. See docs/secure_aggregation.md.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import TypeVar

from flwr.app import RecordDict

from region_app.exchange import ask
from region_app.summation import Devices, Question, Sums
from regionfed.config import Config
from regionfed.contract import encode, message_type
from regionfed.errors import ContractError, RunError
from regionfed.flower import own_copy
from regionfed.privacy.ledger import LedgerEvent
from regionfed.privacy.unit import Part
from regionfed.secure_aggregation.fixed_point import FixedPoint, fixed_point
from regionfed.secure_aggregation.messages import (
    Advert,
    AdvertiseReply,
    AdvertiseRequest,
    AgreeReply,
    AgreeRequest,
    MaskReply,
    MaskRequest,
    ShareReply,
    ShareRequest,
    UnmaskReply,
    UnmaskRequest,
    attach,
)
from regionfed.secure_aggregation.signing import check_advert
from regionfed.secure_aggregation.terms import Terms, tolerance_of
from regionfed.secure_aggregation.unmasking import remove_masks

R = TypeVar("R")

_STEPS = 5


class SecureSum:
    """Pairwise masks over all devices of a region, noise drawn by the devices.

    Everybody is asked, and sums are noised as they are: a unit for which devices are drawn or a
    mean is clipped is refused with the settings.

    A region sits the exchange out when fewer than ``t = n - D`` devices are left at any step: then
    nothing was released. The ledger is charged before the last step, which releases.
    """

    def __init__(self, devices: Devices, config: Config) -> None:
        self._devices = devices
        self._config = config
        self._tolerance = tolerance_of(config, devices.declared)
        # Identity keys as first seen: one device cannot pose as another to the coordinator.
        self._pins: dict[int, bytes] = {}

    def released(self, nodes: list[int], question: Question) -> Sums:
        """Run the five steps and return the noised sum by part."""
        terms = self._terms(question)
        asking = _Asking(self._devices, question, self._config.device_timeout)
        adverts, places = self._advertise(asking, nodes, terms)
        boxes = self._share(asking, adverts, places)
        fixed = fixed_point(terms)
        total = fixed.zeros()
        survivors: list[int] = []
        for device, reply in asking.step(
            {d: MaskRequest(list(boxes[d]), list(boxes[d].values())) for d in boxes},
            places,
            MaskReply,
            {"ring": fixed.length},
            carry=True,
        ):
            if reply.masked.dtype != fixed.dtype:
                self._refuse(device, f"masked in {reply.masked.dtype}, not {fixed.dtype}")
                continue
            total += reply.masked
            survivors.append(device)
        survivors.sort()
        self._enough(survivors)
        signatures = {
            device: reply.signature
            for device, reply in asking.step(
                dict.fromkeys(survivors, AgreeRequest(survivors)), places, AgreeReply
            )
        }
        self._enough(signatures)
        event = self._event(question, fixed, len(survivors))
        self._devices.ledger.charge(event)
        proof = UnmaskRequest(list(signatures), list(signatures.values()))
        sharers = sorted(boxes)
        given = {
            device: reply.shares
            for device, reply in asking.step(dict.fromkeys(signatures, proof), places, UnmaskReply)
            if self._fits(device, reply.shares, len(sharers))
        }
        self._enough(given)
        try:
            remove_masks(
                total, terms.digest, adverts, sharers=sharers, survivors=survivors, given=given
            )
        except ContractError as error:
            raise RunError(f"region {self._devices.region}: {error}") from error
        return {question.parts[field]: v for field, v in fixed.decode(total).items()}

    def noise_std(self, part: Part, length: int) -> float:
        """Return the noise when nobody drops out: sqrt(n / h) of what is accounted."""
        terms = replace(
            self._blank_terms(),
            lengths=[length],
            bounds=[part.bound],
            noise=[part.noise_multiplier],
        )
        (segment,) = fixed_point(terms).segments
        return part.noise_multiplier * segment.sensitivity * self._tolerance.excess

    # ------------------------------------------------------------------------------- steps
    def _advertise(
        self, asking: "_Asking", nodes: list[int], terms: Terms
    ) -> tuple[dict[int, Advert], dict[int, int]]:
        """Return the adverts that are in order, and the node of each device."""
        adverts: dict[int, Advert] = {}
        places: dict[int, int] = {}
        opening = AdvertiseRequest(terms.to_text())
        here = {node: node for node in nodes}
        for node, reply in asking.step(dict.fromkeys(nodes, opening), here, AdvertiseReply):
            try:
                advert = Advert.unpack(reply.advert)
                check_advert(advert, terms.digest, terms.devices, self._pins)
            except ContractError as error:
                self._devices.quarantine(f"node {node}: {error}")
                continue
            if advert.device in adverts:
                self._devices.quarantine(f"node {node}: a second device {advert.device}")
                continue
            adverts[advert.device] = advert
            places[advert.device] = node
        self._enough(adverts)
        self._pins |= {device: advert.identity for device, advert in adverts.items()}
        return dict(sorted(adverts.items())), places

    def _share(
        self, asking: "_Asking", adverts: Mapping[int, Advert], places: Mapping[int, int]
    ) -> dict[int, dict[int, bytes]]:
        """Return what each device that shared is to open: by receiver, then by sender."""
        everybody = ShareRequest([advert.pack() for advert in adverts.values()])
        sealed: dict[int, dict[int, bytes]] = {}
        for device, reply in asking.step(dict.fromkeys(adverts, everybody), places, ShareReply):
            if sorted(reply.receivers) != sorted(adverts.keys() - {device}) or len(
                reply.receivers
            ) != len(reply.sealed):
                self._refuse(device, "shares for others than were asked for")
                continue
            sealed[device] = dict(zip(reply.receivers, reply.sealed, strict=True))
        self._enough(sealed)
        return {
            receiver: {
                sender: box[receiver] for sender, box in sealed.items() if sender != receiver
            }
            for receiver in sealed
        }

    def _fits(self, device: int, shares: list[bytes], expected: int) -> bool:
        if len(shares) == expected:
            return True
        self._refuse(device, f"{len(shares)} shares, not {expected}")
        return False

    def _refuse(self, device: int, reason: str) -> None:
        self._devices.quarantine(f"device {device}: {reason}")

    def _enough(self, left: Sized) -> None:
        least = self._tolerance.threshold
        if len(left) < least:
            raise RunError(
                f"region {self._devices.region}: {len(left)} of {self._tolerance.devices} devices "
                f"are left and secure aggregation needs {least}; nothing was released, it sits "
                f"the round out. tolerated-dropouts says how many may fail."
            )

    # ------------------------------------------------------------------------------- terms
    def _blank_terms(self) -> Terms:
        return Terms(
            run=str(self._devices.grid.run.run_id),
            round=0,
            message_type="",
            number=0,
            nonce="",
            devices=self._tolerance.devices,
            dropouts=self._tolerance.dropouts,
            colluders=self._tolerance.colluders,
            fields=["sum"],
            lengths=[1],
            bounds=[1.0],
            noise=[0.0],
            examples=self._config.examples_per_client,
        )

    def _terms(self, question: Question) -> Terms:
        parts = {part.name: part for part in question.mechanism.parts}
        summed = [parts[name] for name in question.parts.values()]
        return replace(
            self._blank_terms(),
            round=question.round,
            message_type=message_type(question.request),
            number=question.number or 0,
            nonce=secrets.token_hex(16),
            fields=list(question.lengths),
            lengths=list(question.lengths.values()),
            bounds=[part.bound for part in summed],
            noise=[part.noise_multiplier for part in summed],
        )

    def _event(self, question: Question, fixed: FixedPoint, answered: int) -> LedgerEvent:
        """Return the ledger's event: the least noise that there is, over the rounded sum."""
        event = question.mechanism.event(self._devices.region, question.charged_to)
        tolerance = self._tolerance
        return replace(
            event,
            sensitivity={question.parts[s.name]: s.sensitivity for s in fixed.segments},
            drawn=(
                f"distributed noise: {answered} of {tolerance.devices} devices drew their shares; "
                f"at most {tolerance.dropouts} may drop out and {tolerance.colluders} collude"
            ),
        )


@dataclass
class _Asking:
    """Asks devices the steps of one exchange, with one deadline for all of them."""

    devices: Devices
    question: Question
    timeout: float
    done: int = 0

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.timeout

    def step(
        self,
        requests: Mapping[int, object],
        places: Mapping[int, int],
        reply: type[R],
        lengths: Mapping[str, int] | None = None,
        *,
        carry: bool = False,
    ) -> Iterator[tuple[int, R]]:
        """Ask devices one step and yield (device, reply); `carry` the question itself with it."""
        own = encode(self.question.request) if carry else RecordDict()
        records = {places[d]: attach(own_copy(own), request) for d, request in requests.items()}
        numbers = {places[device]: device for device in requests}
        left = max(self._deadline - time.monotonic(), 1.0)
        # Whoever is silent holds up one step, and may not eat up the time of the others.
        timeout = left / (_STEPS - self.done)
        self.done += 1
        kind = message_type(self.question.request)
        for node, answer in ask(
            self.devices.grid,
            records,
            kind,
            reply,
            lengths or {},
            timeout=timeout,
            quarantine=self.devices.quarantine,
        ):
            yield numbers[node], answer
