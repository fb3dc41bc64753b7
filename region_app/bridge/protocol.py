"""What goes over the bridge: frames, and records as bytes; nothing is pickled.

A call is a stream of frames each way. A frame is one gRPC message: a byte that says its kind, then

======  =========================================================================
``H``   the header, JSON in UTF-8: `Request`, or `Reply`
``D``   the next bytes of the body; a frame carries `CHUNK` of them at most
``E``   the end: SHA-256 of the body, 32 bytes
======  =========================================================================

in this order: one H, any number of D, one E. Only one chunk has to fit into a message, so that no
limit on messages limits a model. The body is 8 bytes (big-endian) with the length of the manifest,
the manifest (JSON), then the bytes of all arrays in the manifest's order. The manifest says of each
record its kind (``array``, ``config``, ``metric``) and its entries; those of an array are
``[dtype, shape, stype, length]``.

Whoever reads states how much it takes; what is longer than that, or than its header says, is
refused before it is kept.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from regionfed.config import Value
from regionfed.errors import ContractError

VERSION = 1
SERVICE = "regionfed.Bridge"
RELAY = f"/{SERVICE}/Relay"

CHUNK = 1 << 20
FRAME_LIMIT = 4 << 20  # a header, or a chunk of another's size
MANIFEST_LIMIT = 64 << 20
_LENGTH = 8

_HEADER, _DATA, _END = b"H", b"D", b"E"
_KINDS: dict[str, Any] = {"array": ArrayRecord, "config": ConfigRecord, "metric": MetricRecord}

QUERY, TRAIN, EVALUATE = "query", "train", "evaluate"
PHASES = (QUERY, TRAIN, EVALUATE)

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Request:
    """The header of a request.

    Attributes
    ----------
    run : str
        The setting ``run-name``.
    round : int
        0 for a query.
    phase : str
        The type of the message that is relayed: one of `PHASES`.
    size : int
        Bytes of the body.
    settings : dict of str to bool, int, float or str
        The run configuration as the world has it; the region's must agree.
    """

    run: str
    round: int
    phase: str
    size: int
    settings: dict[str, Value]


@dataclass(frozen=True)
class Reply:
    """The header of a reply: bytes of its body."""

    size: int


H = TypeVar("H", Request, Reply)


# ----------------------------------------------------------------------------------- frames
def frames(header: Request | Reply, body: Iterable[Buffer], chunk: int = CHUNK) -> Iterator[bytes]:
    """Yield the frames of one message; `body` is its bytes in pieces of any size."""
    yield _HEADER + json.dumps({"version": VERSION, **asdict(header)}).encode()
    digest = hashlib.sha256()
    for piece in body:
        view = memoryview(piece)
        for start in range(0, len(view), chunk):
            part = view[start : start + chunk]
            digest.update(part)
            yield _DATA + part
    yield _END + digest.digest()


def read_header(stream: Iterator[bytes], kind: type[H], limit: int) -> H:
    """Read the first frame.

    Raises
    ------
    ContractError
        If it is no header of this kind, or announces more than `limit` bytes.
    """
    tag, content = _frame(stream)
    if tag != _HEADER:
        raise ContractError(f"bridge: expected a header, got a frame of kind {tag!r}.")
    found = _json(content, "header")
    if found.pop("version", None) != VERSION:
        raise ContractError(f"bridge: this end speaks version {VERSION} alone.")
    try:
        header = kind(**found)
    except TypeError as error:
        raise ContractError(f"bridge: the header is no {kind.__name__} ({error}).") from None
    if type(header.size) is not int or not 0 <= header.size <= limit:
        raise ContractError(
            f"bridge: a message of {header.size!r} bytes is over the limit of {limit}; raise "
            f"'limit-mib' in the region's file if the model is that large."
        )
    if isinstance(header, Request):
        _check_request(header)
    return header


def read_body(stream: Iterator[bytes], size: int) -> bytearray:
    """Read the frames after the header.

    Raises
    ------
    ContractError
        If they are longer or shorter than was announced, damaged, or out of order.
    """
    body = bytearray()
    digest = hashlib.sha256()
    while True:
        tag, content = _frame(stream)
        if tag == _END:
            break
        if tag != _DATA or not content:
            raise ContractError(f"bridge: unexpected frame of kind {tag!r}.")
        if len(body) + len(content) > size:
            raise ContractError(f"bridge: more than the {size} bytes that were announced.")
        digest.update(content)
        body += content
    if len(body) != size:
        raise ContractError(f"bridge: {len(body)} bytes of the {size} that were announced.")
    if bytes(content) != digest.digest():
        raise ContractError("bridge: the body is damaged.")
    return body


def _check_request(header: Request) -> None:
    good = (
        isinstance(header.run, str)
        and type(header.round) is int
        and 0 <= header.round < 2**31
        and header.phase in PHASES
        and isinstance(header.settings, dict)
        and all(type(value) in {bool, int, float, str} for value in header.settings.values())
    )
    if not good:
        raise ContractError("bridge: malformed header of a request.")


def _frame(stream: Iterator[bytes]) -> tuple[bytes, memoryview]:
    message = next(stream, b"")
    if not message:
        raise ContractError("bridge: the stream ended within a message.")
    return message[:1], memoryview(message)[1:]


def _json(content: Buffer, what: str) -> dict[str, Any]:
    try:
        found = json.loads(bytes(content))
    except (ValueError, RecursionError):
        raise ContractError(f"bridge: the {what} is no JSON.") from None
    if not isinstance(found, dict):
        raise ContractError(f"bridge: the {what} is no object.")
    return found


# ---------------------------------------------------------------------------------- records
def pack(records: RecordDict) -> list[Buffer]:
    """Return records as the pieces of a body; the arrays' bytes are shared, not copied.

    Equal records give equal bytes.
    """
    manifest: dict[str, Any] = {}
    blobs: list[Buffer] = []
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            entries: dict[str, Any] = {
                key: [array.dtype, list(array.shape), array.stype, len(array.data)]
                for key, array in record.items()
            }
            blobs += [array.data for array in record.values()]
            manifest[name] = ["array", entries]
        else:
            kind = "config" if isinstance(record, ConfigRecord) else "metric"
            manifest[name] = [kind, dict(record.items())]
    try:
        text = json.dumps(manifest, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ContractError(f"bridge: a record cannot be sent ({error}).") from None
    return [len(text).to_bytes(_LENGTH, "big"), text, *blobs]


def unpack(body: Buffer) -> RecordDict:
    """Read what `pack` wrote.

    Raises
    ------
    ContractError
        If it is anything else.
    """
    view = memoryview(body)
    length = int.from_bytes(view[:_LENGTH], "big")
    if len(view) < _LENGTH or length > min(len(view) - _LENGTH, MANIFEST_LIMIT):
        raise ContractError("bridge: the manifest is longer than the message.")
    manifest = _json(view[_LENGTH : _LENGTH + length], "manifest")
    rest = view[_LENGTH + length :]
    records = RecordDict()
    try:
        for name, (kind, entries) in manifest.items():
            if kind == "array":
                arrays: dict[str, Array] = {}
                for key, (dtype, shape, stype, size) in entries.items():
                    if type(size) is not int or not 0 <= size <= len(rest):
                        raise ContractError(f"bridge: array '{key}' is longer than the message.")
                    arrays[key] = Array(dtype, tuple(shape), stype, bytes(rest[:size]))
                    rest = rest[size:]
                records[name] = ArrayRecord(arrays)
            else:
                records[name] = _KINDS[kind](entries)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ContractError(f"bridge: malformed manifest ({type(error).__name__}).") from None
    if len(rest):
        raise ContractError(f"bridge: {len(rest)} bytes that no array claims.")
    return records


def size_of(body: Iterable[Buffer]) -> int:
    """Return the length of a body in pieces."""
    return sum(len(piece) for piece in body)
