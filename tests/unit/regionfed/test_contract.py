"""The contract: each message survives the trip, and nothing else gets through."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from regionfed.contract import (
    EXCHANGES,
    AdaptReply,
    AdaptRequest,
    DeltaRequest,
    GradientReply,
    GradientRequest,
    LossReply,
    LossRequest,
    ProfileReply,
    ProfileRequest,
    RegionName,
    RegionPersonalise,
    RegionQuery,
    RegionScores,
    RegionTrain,
    RegionUpdate,
    ScoreReply,
    ScoreRequest,
    decode,
    encode,
    encode_each,
    message_type,
)
from regionfed.errors import ContractError
from tests.conftest import part

P, K = 5, 3
LENGTHS = {"p": P, "k": K, "columns*tasks": 6, "steps": 4, "labels": 2}
MODEL = torch.linspace(-1.0, 1.0, P)
SKETCH = torch.linspace(-2.0, 2.0, K)

MESSAGES: list[Any] = [
    RegionQuery(),
    RegionName("North"),
    RegionTrain(3, "layout", MODEL),
    RegionUpdate("North", MODEL, SKETCH, 1.5, 99.5, 0.25, 0.5, -1.0, [3.5, -1.0]),
    RegionPersonalise(3, "layout", 0.5, 0.25, 0.125, MODEL, MODEL + 1.0, SKETCH, 7.5, [3.0, 4.5]),
    RegionScores("North", "residual", "why", True, 1.0, 0.75, 2.0, 3.0, [1.0] * 6, 8, 20),
    GradientRequest(3, "layout", 0.5, 1.0, 8.0, 2**62, K, MODEL, 2, 0.5),
    DeltaRequest(3, "layout", 1.0, 8.0, 2**62, K, 4, 0.001, "adamw", MODEL, 2),
    GradientReply(MODEL, SKETCH, 2.5),
    AdaptRequest(3, "layout", 8, 0.001, 0.5, 0.5, 1.0, 0.25, MODEL, MODEL + 1.0),
    AdaptReply(),
    LossRequest(3, "layout", 0.5, 1.0, [0.5, 1.0, 1.5, 2.0], MODEL, MODEL - 1.0),
    LossReply([0.5, -0.5, 0.0, 1.0]),
    ScoreRequest(3, "layout", True, MODEL, MODEL + 0.5),
    ScoreReply([1.0, 0.5, 0.25, 2.0, 0.0, 1.0]),
    ProfileRequest("layout", 2),
    ProfileReply(600, [5.0, 7.0]),
]
IDS = [type(message).__name__ for message in MESSAGES]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def test_the_sample_messages_are_all_messages() -> None:
    """Whoever adds a message has to add it here."""
    assert {type(m) for m in MESSAGES} == {kind for _, *pair in EXCHANGES for kind in pair}


def test_message_types_are_distinct_in_each_direction() -> None:
    """No two requests of one direction can be mistaken for one another."""
    for direction in {d for d, *_ in EXCHANGES}:
        names = [vars(request)["NAME"] for d, request, _ in EXCHANGES if d == direction]
        assert len(set(names)) == len(names)
    assert message_type(MESSAGES[IDS.index("RegionTrain")]) == "train"


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_every_message_comes_back_equal(message: Any) -> None:
    """Types and values of every field survive, through Flower's records."""
    back = decode(type(message), encode(message), LENGTHS)
    for field in fields(message):
        assert same(getattr(back, field.name), getattr(message, field.name)), field.name


def test_a_vector_that_many_receivers_get_is_made_into_bytes_once() -> None:
    """Records of their own, equal to those of one message; a field has its own name."""
    messages = [
        RegionPersonalise(3, "layout", 0.5, 0.25, floor, MODEL, MODEL, SKETCH, 7.5, [3.0, 4.5])
        for floor in (0.125, 0.25)
    ]
    first, second = list(encode_each(messages))
    for records, message in zip((first, second), messages, strict=True):
        assert decode(RegionPersonalise, records, LENGTHS).noise_floor == message.noise_floor
        assert dict(part(records, "arrays")) == dict(part(encode(message), "arrays"))
    assert {"theta/0", "global_update/0"} <= set(part(first, "arrays"))
    for name, array in part(first, "arrays").items():
        assert part(second, "arrays")[name] is array


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_only_declared_fields_cross(message: Any) -> None:
    """The records hold the fields, the version, and nothing else."""
    records = encode(message)
    keys = [key.rpartition("/")[0] for key in records.get("arrays", ArrayRecord())]
    keys += [*records.get("metrics", MetricRecord()), *part(records, "config")]
    assert sorted(keys) == sorted(["contract.version", *(f.name for f in fields(message))])


def records_of(message: Any) -> dict[str, dict[str, Any]]:
    return {name: dict(record) for name, record in encode(message).items()}


def rebuilt(parts: dict[str, dict[str, Any]]) -> RecordDict:
    kinds: dict[str, Any] = {
        "arrays": ArrayRecord,
        "metrics": MetricRecord,
        "config": ConfigRecord,
    }
    return RecordDict({name: kinds.get(name, ConfigRecord)(r) for name, r in parts.items()})


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_a_missing_key_is_refused_by_name(message: Any) -> None:
    """A5: each key is necessary; the error names the message and the key."""
    for name, record in records_of(message).items():
        for key in record:
            parts = records_of(message)
            del parts[name][key]
            said = "version" if key == "contract.version" else key.rpartition("/")[0] or key
            with pytest.raises(ContractError, match=said) as refused:
                decode(type(message), rebuilt(parts), LENGTHS)
            assert type(message).__name__ in str(refused.value)


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_an_unknown_key_is_refused_by_name(message: Any) -> None:
    """A5: nothing rides along, in any record."""
    extra: dict[str, Any] = {
        "arrays": Array(np.zeros(1, dtype=np.float32)),
        "metrics": 1.0,
        "config": "stowaway",
    }
    for name in records_of(message):
        parts = records_of(message)
        parts[name]["stowaway/0" if name == "arrays" else "stowaway"] = extra[name]
        with pytest.raises(ContractError, match="stowaway"):
            decode(type(message), rebuilt(parts), LENGTHS)


@pytest.mark.parametrize("message", MESSAGES, ids=IDS)
def test_an_unknown_or_missing_record_is_refused(message: Any) -> None:
    """Whole records count too."""
    with pytest.raises(ContractError, match="unknown records"):
        decode(type(message), rebuilt({**records_of(message), "more": {}}), LENGTHS)
    for name in records_of(message):
        parts = records_of(message)
        del parts[name]
        with pytest.raises(ContractError, match=name):
            decode(type(message), rebuilt(parts), LENGTHS)
    swapped = rebuilt({n: r for n, r in records_of(message).items() if n != "config"})
    swapped["config"] = MetricRecord()
    with pytest.raises(ContractError, match="not a ConfigRecord"):
        decode(type(message), swapped, LENGTHS)


def test_another_version_is_refused() -> None:
    """Two ends of different contracts say so before they read anything."""
    parts = records_of(MESSAGES[IDS.index("RegionTrain")])
    parts["config"]["contract.version"] = 999
    with pytest.raises(ContractError, match="version 999"):
        decode(RegionTrain, rebuilt(parts), LENGTHS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused_on_both_ends(value: float) -> None:
    """A4: nan and inf pass neither encode nor decode, in scalars, lists and vectors."""
    with pytest.raises(ContractError, match="loss"):
        encode(GradientReply(MODEL, SKETCH, value))
    with pytest.raises(ContractError, match="differences"):
        encode(LossReply([0.0, value, 0.0, 0.0]))
    with pytest.raises(ContractError, match="total"):
        encode(GradientReply(MODEL * value, SKETCH, 0.0))
    parts = records_of(GradientReply(MODEL, SKETCH, 1.0))
    parts["metrics"]["loss"] = value
    with pytest.raises(ContractError, match="not finite"):
        decode(GradientReply, rebuilt(parts), LENGTHS)
    parts = records_of(LossReply([0.0] * 4))
    parts["metrics"]["differences"] = [0.0, value, 0.0, 0.0]
    with pytest.raises(ContractError, match="not finite"):
        decode(LossReply, rebuilt(parts), LENGTHS)
    parts = records_of(GradientReply(MODEL, SKETCH, 1.0))
    parts["arrays"]["total/0"] = Array(np.array([0, 0, 0, 0, value], dtype=np.float32))
    with pytest.raises(ContractError, match="nan or inf"):
        decode(GradientReply, rebuilt(parts), LENGTHS)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((1, P), dtype=np.float32), "one axis"),
        (np.zeros((P, 1), dtype=np.float32), "one axis"),
        (np.zeros((), dtype=np.float32), "one axis"),
        (np.zeros(P, dtype=np.float64), "float64"),
        (np.zeros(P, dtype=np.int64), "int64"),
        (np.zeros(P, dtype=np.float16), "float16"),
        (np.zeros(P - 1, dtype=np.float32), "expected 5 elements, got 4"),
        (np.zeros(1, dtype=np.float32), "expected 5 elements, got 1"),
        (np.zeros(0, dtype=np.float32), "expected 5 elements, got 0"),
    ],
)
def test_a_vector_of_wrong_shape_length_or_dtype_is_refused(
    array: np.ndarray[Any, Any], said: str
) -> None:
    """A5: even where it would broadcast; the error names message, vector, expected and got."""
    parts = records_of(GradientReply(MODEL, SKETCH, 1.0))
    parts["arrays"]["total/0"] = Array(array)
    with pytest.raises(ContractError, match=said) as refused:
        decode(GradientReply, rebuilt(parts), LENGTHS)
    assert "GradientReply" in str(refused.value) and "'total'" in str(refused.value)


def test_two_axes_that_broadcast_are_refused() -> None:
    """A5: (2, 2) against (1, 2) is the pair that averages silently elsewhere."""
    parts = records_of(GradientReply(torch.zeros(4), SKETCH, 1.0))
    for shape in ((2, 2), (1, 2), (1, 4)):
        parts["arrays"]["total/0"] = Array(np.zeros(shape, dtype=np.float32))
        with pytest.raises(ContractError, match="one axis"):
            decode(GradientReply, rebuilt(parts), {"p": 4})


@pytest.mark.parametrize("shape", [(1, P), (P, 1), ()])
def test_a_tensor_of_another_rank_is_not_sent(shape: tuple[int, ...]) -> None:
    """`encode` refuses what `decode` would."""
    with pytest.raises(ContractError, match="theta"):
        encode(RegionTrain(1, "layout", torch.zeros(shape)))


@pytest.mark.parametrize(("numbers", "got"), [([], 0), ([0.0] * 3, 3), ([0.0] * 5, 5)])
def test_a_list_of_wrong_length_is_refused(numbers: list[float], got: int) -> None:
    """The receiver knows how many numbers it asked for."""
    with pytest.raises(ContractError, match=f"expected 4 numbers, got {got}"):
        decode(LossReply, encode(LossReply(numbers)), LENGTHS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("round", 1.0),
        ("round", True),
        ("round", "1"),
        ("layout", 7),
        ("layout", b"layout"),
        ("sampling_rate", True),
        ("sampling_rate", "0.5"),
        ("sampling_rate", [0.5]),
        ("steps", 0.5),
        ("steps", ["a"] * 4),
        ("steps", [True] * 4),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(key: str, value: Any) -> None:
    """No type is guessed: a bool is no int, a text no number; only an int may be a float."""
    parts = records_of(MESSAGES[IDS.index("LossRequest")])
    parts["config"][key] = value
    with pytest.raises(ContractError, match=f"LossRequest.{key}"):
        decode(LossRequest, rebuilt(parts), LENGTHS)


def test_an_int_may_stand_for_a_float() -> None:
    """Other languages and TOML write 1 for 1.0; it arrives as a float."""
    parts = records_of(GradientReply(MODEL, SKETCH, 1.0))
    parts["metrics"]["loss"] = 2
    loss = decode(GradientReply, rebuilt(parts), LENGTHS).loss
    assert loss == 2.0 and type(loss) is float


NUMPY_AND_TORCH: list[Callable[[float], Any]] = [
    np.float32,
    np.float64,
    torch.tensor,
    lambda v: torch.tensor(v, dtype=torch.bfloat16),
    np.array,
]


@pytest.mark.parametrize("scalar", NUMPY_AND_TORCH)
def test_numpy_and_torch_scalars_are_coerced(scalar: Callable[[float], Any]) -> None:
    """A6: what Flower's records refuse is made plain in one place."""
    sent = GradientReply(MODEL, SKETCH, scalar(1.5))
    assert type(decode(GradientReply, encode(sent), LENGTHS).loss) is float
    listed = LossReply([scalar(0.5)] * 4)
    assert decode(LossReply, encode(listed), LENGTHS).differences == [0.5] * 4


@pytest.mark.parametrize("count", [np.int64(7), np.int32(7), torch.tensor(7)])
def test_numpy_and_torch_counts_are_coerced(count: Any) -> None:
    """A6: integers stay integers."""
    back = decode(ProfileReply, encode(ProfileReply(count)), {})
    assert back == ProfileReply(7) and type(back.examples) is int
    scores = MESSAGES[IDS.index("RegionScores")]
    flag = decode(RegionScores, encode(replace(scores, scored=np.bool_(True))), LENGTHS)
    assert flag.scored is True


@pytest.mark.parametrize("value", [None, "7", 7.0, True, torch.tensor([7, 8]), [7]])
def test_what_cannot_be_made_plain_is_not_sent(value: Any) -> None:
    """A6: None, texts, bools and whole arrays are no count; the error names the field."""
    with pytest.raises(ContractError, match=r"ProfileReply\.examples"):
        encode(ProfileReply(value))


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=8),
    loss=st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_finite_reply_survives_exactly(values: list[float], loss: float) -> None:
    """Numbers in metrics keep double precision, vectors single precision; no bit is lost."""
    total = torch.tensor(values, dtype=torch.float32)
    back = decode(GradientReply, encode(GradientReply(total, SKETCH, loss)), {})
    assert back.total.numpy().tobytes() == total.numpy().tobytes()
    assert back.loss == loss and math.copysign(1.0, back.loss) == math.copysign(1.0, loss)


def test_a_dimension_that_the_receiver_does_not_name_may_have_any_length() -> None:
    """A first message tells the receiver how long a model is."""
    assert decode(RegionTrain, encode(MESSAGES[IDS.index("RegionTrain")]), {}).theta.numel() == P
