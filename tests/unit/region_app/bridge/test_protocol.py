"""Frames and records: what is sent comes out again, and nothing else is taken."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from region_app.bridge.protocol import (
    FRAME_LIMIT,
    Reply,
    Request,
    frames,
    pack,
    read_body,
    read_header,
    size_of,
    unpack,
)
from regionfed.contract import RegionTrain, decode, encode
from regionfed.errors import ContractError
from regionfed.vector import to_arrays

LIMIT = 1 << 20
REQUEST = Request("trial", 3, "train", 11, {"seed": 0, "server-lr": 0.5, "resume": "", "x": True})


def body_of(records: RecordDict) -> bytes:
    return b"".join(pack(records))


def test_records_come_out_as_they_went_in() -> None:
    """Arrays by their bytes, numbers by their type and every bit."""
    records = RecordDict(
        {
            "arrays": ArrayRecord(to_arrays("theta", torch.randn(1000), chunk=300)),
            "config": ConfigRecord({"round": 3, "a": 0.1, "b": True, "c": "ü", "d": [1.0, 2e-300]}),
            "metrics": MetricRecord({"loss": 1.0, "count": 7, "many": [0.5, 0.25]}),
        }
    )
    again = unpack(body_of(records))
    assert again == records
    assert [type(v) for v in again["metrics"].values()] == [float, int, list]  # type: ignore[union-attr]
    assert body_of(again) == body_of(records)


def test_a_message_of_the_contract_crosses() -> None:
    asked = RegionTrain(round=2, layout="x", theta=torch.randn(50))
    again = decode(RegionTrain, unpack(body_of(encode(asked))), {"p": 50})
    assert torch.equal(again.theta, asked.theta) and again.round == 2


@pytest.mark.parametrize("chunk", [1, 7, 1000, 1 << 20])
def test_f4_a_payload_larger_than_any_message_is_cut_into_chunks(chunk: int) -> None:
    """F4.

    A message larger than a limit. -> our own link streams in chunks: no frame is longer than a
    chunk and its kind, whatever the payload.
    """
    body = bytes(range(256)) * 4
    sent = list(frames(Reply(len(body)), [body[:100], body[100:]], chunk))
    assert all(len(frame) <= chunk + 1 for frame in sent[1:-1])
    stream = iter(sent)
    assert read_header(stream, Reply, LIMIT).size == len(body)
    assert read_body(stream, len(body)) == body


def test_a_header_keeps_the_types_of_settings() -> None:
    stream = frames(REQUEST, [b"hello ", b"world"])
    assert read_header(stream, Request, LIMIT) == REQUEST


def header(**changes: Any) -> Iterator[bytes]:
    good = {"version": 1, "run": "r", "round": 1, "phase": "train", "size": 0, "settings": {}}
    return iter([b"H" + json.dumps({**good, **changes}).encode()])


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"size": -1},
        {"size": LIMIT + 1},
        {"size": "1"},
        {"size": True},
        {"round": -1},
        {"round": 2**31},
        {"round": 1.0},
        {"run": 1},
        {"phase": "shutdown"},
        {"settings": []},
        {"settings": {"a": None}},
        {"settings": {"a": [1]}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_malformed_header_is_refused(changes: dict[str, Any]) -> None:
    """Before anything is kept of what follows it."""
    with pytest.raises(ContractError, match="bridge"):
        read_header(header(**changes), Request, LIMIT)


def test_a_size_over_the_limit_names_the_setting() -> None:
    with pytest.raises(ContractError, match="limit-mib"):
        read_header(header(size=LIMIT + 1), Request, LIMIT)


@pytest.mark.parametrize(
    "first", [[], [b""], [b"D1"], [b"H"], [b"H{"], [b"H[]"], [b"H\xff"], [b"H" + b"[" * 100_000]]
)
def test_no_header_is_refused(first: list[bytes]) -> None:
    with pytest.raises(ContractError, match="bridge"):
        read_header(iter(first), Request, LIMIT)


GOOD = list(frames(Reply(4), [b"abcd"], 2))[1:]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: f[:-1], "ended within"),
        (lambda f: [f[0], f[2]], "2 bytes of the 4"),
        (lambda f: [f[0], f[1], f[1], f[2]], "more than the 4"),
        (lambda f: [f[1], f[0], f[2]], "damaged"),
        (lambda f: [f[0], b"Dxx", f[2]], "damaged"),
        (lambda f: [f[0], f[1], b"E"], "damaged"),
        (lambda f: [f[0], b"D", f[1], f[2]], "unexpected"),
        (lambda f: [f[0], b"Z12", f[2]], "unexpected"),
    ],
)
def test_a_damaged_body_is_refused(spoil: Callable[[Any], list[bytes]], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        read_body(iter(spoil(GOOD)), 4)


def manifest(content: Any, rest: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "big") + text + rest


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 8,
        manifest([]),
        manifest({"a": 1}),
        manifest({"a": ["pickle", {}]}),
        manifest({"a": ["config", {"k": None}]}),
        manifest({"a": ["config", {"k": {"x": 1}}]}),
        manifest({"a": ["metric", {"k": "text"}]}),
        manifest({"a": ["array", {"k": ["float32", [1], "numpy.ndarray", 4]}]}),
        manifest({"a": ["array", {"k": ["float32", [1], "numpy.ndarray", -4]}]}, b"1234"),
        manifest({"a": ["array", {"k": ["float32", [1], "numpy.ndarray", True]}]}, b"1"),
        manifest({"a": ["array", {"k": ["float32", 1, "numpy.ndarray", 4]}]}, b"1234"),
        manifest({"a": ["array", {"k": [1, [1], "numpy.ndarray"]}]}, b"1234"),
        manifest({"a": ["config", {}]}, b"left over"),
    ],
)
def test_a_malformed_body_is_refused(body: bytes) -> None:
    with pytest.raises(ContractError, match="bridge"):
        unpack(body)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(body: bytes) -> None:
    """A fault of the sender's is a refusal, never a crash."""
    with pytest.raises(ContractError):
        unpack(b"\0\0\0\0\0\0\0\x0e" + b'{"a": ["array"' + body)


def test_what_cannot_be_said_in_json_is_not_sent() -> None:
    with pytest.raises(ContractError, match="cannot be sent"):
        pack(RecordDict({"config": ConfigRecord({"secret": b"bytes"})}))
    with pytest.raises(ContractError, match="cannot be sent"):
        pack(RecordDict({"metrics": MetricRecord({"loss": float("nan")})}))


def test_a_frame_fits_into_the_limit_that_both_ends_set() -> None:
    sent = list(frames(Reply(3 << 20), [bytes(3 << 20)]))
    assert max(map(len, sent)) < FRAME_LIMIT


def test_sizes_add_up() -> None:
    pieces = pack(RecordDict({"arrays": ArrayRecord(to_arrays("v", torch.zeros(10)))}))
    assert size_of(pieces) == len(b"".join(pieces))
