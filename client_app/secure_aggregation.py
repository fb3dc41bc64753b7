"""A Flower mod that masks and noises a device's replies, in front of any ClientApp.

    app = ClientApp(mods=[secure_aggregation])

The app answers the contract as ever; what it replies to an exchange that is summed leaves the
device only as integers that look random, with the device's share of noise in them. See
docs/secure_aggregation.md.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp.typing import ClientAppCallable

from client_app.identity import Identity, identity_of, state_folder
from regionfed.config import Config
from regionfed.contract import EXCHANGES, decode, encode, numbers
from regionfed.discretion import discreet
from regionfed.durable import write_atomic
from regionfed.errors import ContractError, RunError
from regionfed.privacy.inventory import INVENTORY
from regionfed.privacy.plan import SCORE_BOUND
from regionfed.privacy.units import UNITS
from regionfed.randomness import randomness_source
from regionfed.secure_aggregation import device as steps
from regionfed.secure_aggregation.device import Session
from regionfed.secure_aggregation.fixed_point import fixed_point
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
    detach,
)
from regionfed.secure_aggregation.terms import Terms, tolerance_of

_STATE = "secure-aggregation"


def _summed() -> dict[str, type]:
    """Return the reply that is expected, by message type, of every exchange that is summed."""
    return {
        ask.NAME: reply  # type: ignore[attr-defined] # every request has one
        for way, ask, reply in EXCHANGES
        if way == "region -> device" and INVENTORY[reply.__name__]
    }


@dataclass(frozen=True)
class _Here:
    """A device at one message."""

    message: Message
    context: Context
    config: Config
    who: Identity
    folder: Path

    def answer(self, reply: object) -> Message:
        return Message(encode(reply), reply_to=self.message)

    def session(self) -> Session:
        record = self.context.state.config_records.get(_STATE)
        if record is None:
            raise ContractError("secure aggregation: this device has no exchange under way.")
        values: dict[str, Any] = dict(record)
        session = Session(**values)
        if session.agreed().message_type != self.message.metadata.message_type:
            raise ContractError("secure aggregation: a step of another exchange.")
        return session

    def keep(self, session: Session) -> None:
        self.context.state[_STATE] = ConfigRecord(asdict(session))


def secure_aggregation(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer the steps of a secure exchange; pass on what is none.

    Where the run's configuration, or the device's own, asks for secure aggregation, a request for
    something that is summed is refused unless it comes as such a step.
    """
    with discreet("this device"):
        config = Config.from_run_config(context.run_config)
        step = detach(message.content)
        wanted = (config.secure_aggregation, context.node_config.get(_STATE, "off"))
        if step is None:
            if wanted != ("off", "off") and message.metadata.message_type in SUMMED:
                raise ContractError(
                    "this device answers only under secure aggregation: "
                    "set secure-aggregation='pairwise'."
                )
            return call_next(message, context)
        if config.secure_aggregation == "off":
            raise ContractError("secure aggregation is off: set secure-aggregation='pairwise'.")
        here = _Here(message, context, config, identity_of(context), state_folder(context))
        return _ANSWERS[type(step)](here, step, call_next)


def _advertise(here: _Here, step: AdvertiseRequest, call_next: ClientAppCallable) -> Message:
    del call_next
    terms = Terms.from_text(step.terms)
    _check_terms(here, terms)
    _require_unfinished(here, terms)
    session, advert = steps.advertise(terms, here.who.index, identity_key(here.folder))
    here.keep(session)
    return here.answer(AdvertiseReply(advert))


def _share(here: _Here, step: ShareRequest, call_next: ClientAppCallable) -> Message:
    del call_next
    session = here.session()
    given = here.context.node_config.get("peer-keys")
    registry = Path(given) if isinstance(given, str) and given else here.folder / "peers.json"
    pins = _load_pins(registry)
    if given and len(pins) != session.agreed().devices:
        raise ContractError(
            f"{len(pins)} devices are in peer-keys, {session.agreed().devices} are said to take "
            f"part: register all of them, and no others."
        )
    session, sealed = steps.share(session, step.adverts, pins)
    if not given:
        # Trust on first use: from now on each of these is this one, or refused.
        seen = {a.device: a.identity for a in map(Advert.unpack, step.adverts)}
        if not seen.items() <= pins.items():
            known = {str(device): key.hex() for device, key in sorted({**pins, **seen}.items())}
            write_atomic(registry, json.dumps(known, indent=1).encode())
    here.keep(session)
    return here.answer(ShareReply(list(sealed), list(sealed.values())))


def _mask(here: _Here, step: MaskRequest, call_next: ClientAppCallable) -> Message:
    if len(set(step.senders)) != len(step.senders) or len(step.senders) != len(step.sealed):
        raise ContractError("secure aggregation: senders and boxes do not fit.")
    session = here.session()
    terms = session.agreed()
    _check_request(here, terms)
    session = steps.mask(session, dict(zip(step.senders, step.sealed, strict=True)))
    # Before anything is computed: whatever happens now, this step is not done again.
    here.keep(session)
    reply = call_next(here.message, here.context)
    if reply.has_error():
        return reply
    values = numbers(decode(SUMMED[terms.message_type], reply.content, {}))
    who = here.who
    source = randomness_source(here.config.noise_seed)
    purpose = ("share of noise", here.config.seed, terms.round, terms.exchange)
    vector = fixed_point(terms).encode(values, source(*purpose, who.region, who.index))
    steps.add_masks(session, vector)
    return here.answer(MaskReply(vector))


def _agree(here: _Here, step: AgreeRequest, call_next: ClientAppCallable) -> Message:
    del call_next
    session, signature = steps.agree(here.session(), step.survivors, identity_key(here.folder))
    here.keep(session)
    return here.answer(AgreeReply(signature))


def _unmask(here: _Here, step: UnmaskRequest, call_next: ClientAppCallable) -> Message:
    del call_next
    if len(step.signers) != len(step.signatures):
        raise ContractError("secure aggregation: signers and signatures do not fit.")
    session = here.session()
    terms = session.agreed()
    _require_unfinished(here, terms)
    proof = dict(zip(step.signers, step.signatures, strict=True))
    session, shares = steps.unmask(session, proof)
    # On the disk before the shares leave: a device that restarts still knows.
    _finish(here, terms)
    here.keep(session)
    return here.answer(UnmaskReply(shares))


_ANSWERS: dict[type, Callable[[_Here, Any, ClientAppCallable], Message]] = {
    AdvertiseRequest: _advertise,
    ShareRequest: _share,
    MaskRequest: _mask,
    AgreeRequest: _agree,
    UnmaskRequest: _unmask,
}

SUMMED = _summed()


# ------------------------------------------------------------------------------------- checks
def _check_terms(here: _Here, terms: Terms) -> None:
    """Refuse terms that are not what this device's own configuration says."""
    config = here.config
    exact = terms.message_type == "evaluate.metrics" and config.evaluation_privacy != "noised"
    noised = config.privacy_mode == "dp" and not exact
    floor = here.context.node_config.get("least-noise-multiplier", 0.0)
    wrong = [
        what
        for what, good in {
            "run": terms.run == str(here.context.run_id),
            "round": terms.round <= config.rounds,
            "message type": terms.message_type == here.message.metadata.message_type,
            "tolerance": terms.tolerance == tolerance_of(config, terms.devices),
            "examples": terms.examples == config.examples_per_client,
            "device": here.who.index < terms.devices,
            "fields": set(terms.fields) <= _fields(terms.message_type),
            "noise": not noised or 0.0 < min(terms.noise) >= float(floor),
        }.items()
        if not good
    ]
    if wrong:
        raise ContractError(
            f"secure aggregation: the coordinator's {', '.join(wrong)} is not what this device's "
            f"configuration allows: both ends must have the same settings."
        )


def _fields(kind: str) -> set[str]:
    return set(INVENTORY[SUMMED[kind].__name__])


def _check_request(here: _Here, terms: Terms) -> None:
    """Refuse a request that is not what the terms were agreed for.

    Noise is as large as the bounds that were agreed: another one would have it too small.
    """
    asked = here.message.content.config_records.get("config") or ConfigRecord()
    expected = {
        "round": terms.round,
        "query": terms.number,
        "sampling_rate": here.config.sampling_rate,
        "as_one": UNITS[here.config.unit].as_one,
    }
    bounds = _bounds(asked)
    wrong = [name for name, value in expected.items() if asked.get(name, value) != value]
    wrong += [
        f"bound of {field}"
        for field, bound in zip(terms.fields, terms.bounds, strict=True)
        if bounds[field] != bound
    ]
    if wrong:
        raise ContractError(
            f"secure aggregation: what is asked for is not what was agreed: {', '.join(wrong)}."
        )


def _bounds(asked: ConfigRecord) -> dict[str, object]:
    """Return what bounds an example in each field of a reply: as asked for, or as it is counted."""
    clip, cap = asked.get("clip_norm"), asked.get("loss_cap")
    return {
        "total": clip,
        "sketch": clip,
        "loss": cap,
        "differences": clip,
        "scores": SCORE_BOUND,
        "examples": 1.0,
        "histogram": 1.0,
    }


# ----------------------------------------------------------------------------------- own files
def identity_key(folder: Path) -> Ed25519PrivateKey:
    """Return the device's own Ed25519 key, made when it is first asked for.

    Raises
    ------
    RunError
        If the file holds no key.
    """
    path = folder / "identity.key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        key = Ed25519PrivateKey.generate()
        # Nobody but its owner may ever have been able to read it.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "wb") as out:
            out.write(key.private_bytes_raw().hex().encode())
            out.flush()
            os.fsync(out.fileno())
        return key
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip()))
    except ValueError as error:
        raise RunError(
            f"{path} holds no Ed25519 key (32 bytes in hexadecimal): {error}."
        ) from error


def _load_pins(path: Path) -> dict[int, bytes]:
    """Return the identity keys by device that a file holds; none where there is no file."""
    if not path.exists():
        return {}
    try:
        return {int(k): bytes.fromhex(v) for k, v in json.loads(path.read_bytes()).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise RunError(
            f'{path}: expected identity keys by device, {{"0": "<hexadecimal>"}} ({error}).'
        ) from error


def _finished(here: _Here) -> dict[str, dict[str, Any]]:
    path = here.folder / "exchanges.json"
    if not path.exists():
        return {}
    try:
        found: dict[str, dict[str, Any]] = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); restore it, or start a new run.") from error
    return found


def _require_unfinished(here: _Here, terms: Terms) -> None:
    """Refuse to let a second sum of one exchange be opened, or one of a round that is past."""
    last = _finished(here).get(terms.run, {"round": 0, "exchanges": []})
    past = terms.round < last["round"]
    if past or (terms.round == last["round"] and terms.exchange in last["exchanges"]):
        raise ContractError(
            f"secure aggregation: round {terms.round}, '{terms.exchange}' was opened already; "
            f"once more would be a second release."
        )


def _finish(here: _Here, terms: Terms) -> None:
    all_ = _finished(here)
    last = all_.get(terms.run)
    if last is None or last["round"] < terms.round:
        last = {"round": terms.round, "exchanges": []}
    last["exchanges"] = [*last["exchanges"], terms.exchange]
    write_atomic(here.folder / "exchanges.json", json.dumps({**all_, terms.run: last}).encode())
