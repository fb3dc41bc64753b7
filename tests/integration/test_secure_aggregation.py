"""A whole run under secure aggregation: what coordinators receive, and what comes of it.

The simulation's own wiring with a tiny model, overheard on three sides: what each device's app
replies in the open, what the device has before it puts its masks on, and every message that a
coordinator gets. One device vanishes in the middle of one exchange.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

import client_app.app
import server_app.simulation
from client_app.secure_aggregation import SUMMED
from region_app.secure_sum import SecureSum
from region_app.summation import Question, Sums
from regionfed.config import Config
from regionfed.contract import decode, numbers
from regionfed.privacy.ledger import LedgerEvent, read_ledger
from regionfed.records import Summary
from regionfed.secure_aggregation import device
from regionfed.secure_aggregation.device import Session
from regionfed.secure_aggregation.fixed_point import Ring, fixed_point
from regionfed.secure_aggregation.messages import MaskReply
from regionfed.secure_aggregation.terms import Terms
from server_app.cli.main import main
from server_app.in_process_grid import InProcessGrid, Node
from server_app.run import execute

ROUNDS, REGIONS, DEVICES = 2, 2, 4
# In round 2 this device does not answer when it is asked for its masked gradient; one of four may.
LOST_ROUND, LOST_DEVICE, LOST_REGION = 2, 1, "US"
STEPS = ("advertise", "share", "mask", "agree", "unmask")


@dataclass(frozen=True)
class Covered:
    """A reply of one device to one exchange, before and after its masks."""

    region: str
    terms: Terms
    device: int
    before: Ring
    after: Ring


@dataclass
class Overheard:
    """A run, and all that went on in its regions.

    Attributes
    ----------
    open : list
        What apps replied, behind the masks: message type and its numbers by field.
    covered : list of Covered
    received : list
        What coordinators got: region, step, and the message.
    released : list
        What coordinators made of it: region, question, and the sums by part.
    """

    config: Config
    summary: Summary = field(init=False)
    open: list[tuple[str, dict[str, torch.Tensor]]] = field(default_factory=list)
    covered: list[Covered] = field(default_factory=list)
    received: list[tuple[str, str, Message]] = field(default_factory=list)
    released: list[tuple[str, Question, Sums]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.summary.paths["folder"])

    def masked(self) -> list[Ring]:
        """Return the vectors that coordinators got."""
        return [
            decode(MaskReply, message.content, {}).masked
            for _, step, message in self.received
            if step == "mask"
        ]

    def events(self, region: str) -> tuple[LedgerEvent, ...]:
        return read_ledger(self.folder / "regions" / region / "ledger.jsonl")


def overhear(config: Config, patch: pytest.MonkeyPatch) -> Overheard:
    """Execute a run with an ear on every side of the masks, and one device that vanishes."""
    heard = Overheard(config)

    def listen(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        kind = message.metadata.message_type
        heard.open.append((kind, numbers(decode(SUMMED[kind], reply.content, {}))))
        return reply

    class DeviceGrid(InProcessGrid):
        def __init__(self, nodes: dict[int, Node], run_id: int) -> None:
            super().__init__(nodes, run_id)
            (self.region,) = {str(n.context.node_config["region"]) for n in nodes.values()}

        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterator[Message]:
            for message in messages:
                (step,) = (name for name in message.content if name.startswith("secure."))
                if self.vanishes(message, step):
                    continue
                here.append(self.region)
                (reply,) = super().send_and_receive([message], timeout=timeout)
                here.pop()
                heard.received.append((self.region, step.removeprefix("secure."), reply))
                yield reply

        def vanishes(self, message: Message, step: str) -> bool:
            asked = message.content.config_records.get("config", {})
            return (self.region, message.metadata.dst_node_id, step) == (
                LOST_REGION,
                LOST_DEVICE + 1,
                "secure.mask",
            ) and (message.metadata.message_type, asked.get("round")) == (
                "train.gradient",
                LOST_ROUND,
            )

    here: list[str] = []
    put_on, release = device.add_masks, SecureSum.released

    def add_masks(session: Session, total: Ring) -> None:
        before = total.copy()
        put_on(session, total)
        heard.covered.append(
            Covered(here[-1], session.agreed(), session.device, before, total.copy())
        )

    def released(self: SecureSum, nodes: list[int], question: Question) -> Sums:
        sums = release(self, nodes, question)
        kept = {name: vector.clone() for name, vector in sums.items()}
        heard.released.append((self._devices.region, question, kept))
        return sums

    patch.setattr(server_app.simulation, "InProcessGrid", DeviceGrid)
    patch.setattr(client_app.app, "app", client_app.app.make_app([listen]))
    patch.setattr(device, "add_masks", add_masks)
    patch.setattr(SecureSum, "released", released)
    heard.summary = execute(config, say=lambda _: None, report=False)
    return heard


@pytest.fixture(scope="module")
def heard(t5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Overheard:
    """Two rounds: sizes, updates, votes and noised scores, all of them under masks."""
    config = Config.from_run_config(
        {
            "secure-aggregation": "pairwise",
            "rounds": ROUNDS,
            "rho-every": 2,
            "regions": REGIONS,
            "clients-per-region": DEVICES,
            "examples-per-client": 60,
            "size-noise-multiplier": 5.0,
            "user-steps": 0,
            "model": str(t5_folder),
            "trainable": "",
            "workers": 1,
            "run-dir": str(tmp_path_factory.mktemp("runs")),
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        return overhear(config, patch)


def test_the_run_was_whole(heard: Overheard) -> None:
    """Else the rest proves nothing: all exchanges, in five steps, and one device lost in one."""
    assert heard.summary.status == "finished" and not heard.summary.failures
    exchanges = REGIONS * (1 + ROUNDS + 1 + 1)  # size, updates, votes, scores
    assert {kind for kind, _ in heard.open} == set(SUMMED) - {"train.delta"}
    assert len(heard.released) == exchanges
    assert len(heard.open) == len(heard.covered) == exchanges * DEVICES - 1
    sent = [step for _, step, _ in heard.received]
    assert {step: sent.count(step) for step in STEPS} == {
        "advertise": exchanges * DEVICES,
        "share": exchanges * DEVICES,
        **dict.fromkeys(("mask", "agree", "unmask"), exchanges * DEVICES - 1),
    }
    assert any(bool(values["total"].any()) for _, values in heard.open if "total" in values)


def test_the_audit_agrees_with_the_ledgers(
    heard: Overheard, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one device's absence costs no privacy, and the ledger says that it was absent."""
    assert main(["privacy", "audit", "--run", str(heard.folder), "--events"]) == 0
    said = capsys.readouterr().out
    assert "they agree" in said and "noised by a region's devices" in said
    assert said.count(f"{DEVICES - 1} of {DEVICES} devices drew their shares") == 1
    privacy = heard.summary.privacy
    assert 0.0 < privacy.epsilon <= heard.config.target_epsilon
    assert "its region's coordinator included" in privacy.statement
    assert {row["by"] for row in privacy.events} == {"each region's devices"}
    for region in heard.summary.regions:
        for event in heard.events(region):
            lost = (region, event.round) == (LOST_REGION, LOST_ROUND)
            less = lost and event.release.startswith("update")
            assert event.drawn.startswith(f"distributed noise: {DEVICES - less} of {DEVICES} dev")


def test_what_a_coordinator_is_sent_is_what_devices_covered(heard: Overheard) -> None:
    """The control: the vectors that were overheard on devices are those that arrived, masked."""
    assert [v.tobytes() for v in heard.masked()] == [c.after.tobytes() for c in heard.covered]


def wire(message: Message) -> bytes:
    """Return all bytes that a message carries in arrays and settings."""
    arrays = [
        array.data for record in message.content.array_records.values() for array in record.values()
    ]
    values = [v for record in message.content.config_records.values() for v in record.values()]
    flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return b"|".join([*arrays, *(v for v in flat if isinstance(v, bytes))])


def test_no_message_that_a_coordinator_receives_holds_an_unmasked_reply(heard: Overheard) -> None:
    """Neither what an app replied, nor that with noise on it, in any message of any step."""
    for _, step, message in heard.received:
        assert not message.has_error()
        names = {"arrays", "config"} if step == "mask" else {"config"}
        assert set(message.content) == names  # no number that was computed
    # A sum of zeros is nobody's secret, and a number of four bytes may turn up by chance.
    secrets = [v.numpy() for _, values in heard.open for v in values.values() if bool(v.any())]
    secrets += [c.before for c in heard.covered]
    secrets = [secret for secret in secrets if len(secret) > 2]
    assert len(secrets) > len(heard.covered)
    everything = b"|".join(wire(message) for _, _, message in heard.received)
    for secret in secrets:
        assert secret.tobytes() not in everything
        assert secret[: len(secret) // 2 + 1].tobytes() not in everything


def test_a_masked_reply_has_nothing_in_common_with_the_reply(heard: Overheard) -> None:
    """What masks add to is as good as uniform, so that coordinates agree by chance alone."""
    masked = heard.masked()
    assert len(masked) == len(heard.covered)
    for vector in masked:
        for covered in heard.covered:
            if (vector.shape, vector.dtype) == (covered.before.shape, covered.before.dtype):
                # Of 2^32 values: two that are alike in one pair come less than once in 1e9 runs.
                assert int((vector == covered.before).sum()) <= 1
    for covered in heard.covered:
        difference = covered.after - covered.before
        share = difference.astype(np.float64) / 2.0 ** (8 * difference.itemsize)
        # Ten standard deviations of the mean of so many uniform numbers.
        assert abs(share.mean() - 0.5) < 10.0 * (12 * len(share)) ** -0.5


def test_what_is_released_is_the_sum_over_who_is_left(heard: Overheard) -> None:
    """Noised by the devices, unmasked exactly: of three devices where the fourth vanished."""
    for region, question, sums in heard.released:
        of_it = [c for c in heard.covered if c.region == region and asked_by(question, c.terms)]
        lost = (region, question.round) == (LOST_REGION, LOST_ROUND)
        less = lost and "update" in question.parts.values()
        assert sorted(c.device for c in of_it) == [
            i for i in range(DEVICES) if not less or i != LOST_DEVICE
        ]
        fixed = fixed_point(of_it[0].terms)
        total = fixed.zeros()
        for covered in of_it:
            total += covered.before
        for name, vector in fixed.decode(total).items():
            assert torch.equal(sums[question.parts[name]], vector)


def asked_by(question: Question, terms: Terms) -> bool:
    kind: Any = type(question.request)
    return (terms.message_type, terms.round, terms.number) == (
        kind.NAME,
        question.round,
        question.number or 0,
    )
