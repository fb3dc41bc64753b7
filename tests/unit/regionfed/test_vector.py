"""The codec: a model's trainable storages as one vector, exactly, once each, and back."""

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy
from torch import nn

from regionfed.errors import ContractError
from regionfed.vector import (
    Layout,
    from_arrays,
    integers_from_arrays,
    integers_to_arrays,
    to_arrays,
)
from tests.conftest import Mixed, tiny_t5

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def record(name: str, vector: torch.Tensor, chunk: int = 4) -> ArrayRecord:
    return ArrayRecord(to_arrays(name, vector, chunk))


@given(values=st.lists(FLOATS, max_size=20), chunk=st.integers(1, 21))
def test_any_finite_vector_comes_back_bit_for_bit_whatever_the_chunks(
    values: list[float], chunk: int
) -> None:
    """Encoding is exact, -0.0 and subnormals too, and a chunk is never larger than allowed."""
    vector = torch.tensor(values, dtype=torch.float32)
    arrays = to_arrays("v", vector, chunk)
    back = from_arrays("v", ArrayRecord(arrays), len(values))
    assert back.numpy().tobytes() == vector.numpy().tobytes()
    assert max(array.shape[0] for array in arrays.values()) <= chunk


def test_a_tied_matrix_is_in_the_vector_once() -> None:
    """M1: the vector of a T5 is as long as its unique weights, not as its state_dict."""
    model = tiny_t5()
    layout = Layout.of(model)
    unique = sum(p.numel() for p in model.parameters())
    aliased = sum(t.numel() for t in model.state_dict().values())
    assert layout.size == unique < aliased
    assert [n for n in layout.names if "embed" in n or "shared" in n or "lm_head" in n] == [
        "shared.weight"
    ]


def test_the_model_takes_the_vector_and_gives_the_same_back() -> None:
    """Round trip through a T5: every alias of a tie follows, and what is read is what was set."""
    model = tiny_t5()
    layout = Layout.of(model)
    vector = torch.arange(layout.size, dtype=torch.float32) / layout.size
    layout.write(vector, model)
    assert torch.equal(layout.read(model), vector)
    state = model.state_dict()
    for alias in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(state[alias], state["shared.weight"])


def test_scalars_half_precision_and_ties_are_restored_as_they_were() -> None:
    """0-d shapes and bf16 keep shape and dtype; a tie stays one storage."""
    model = Mixed()
    layout = Layout.of(model)
    assert layout.shapes[layout.names.index("scale")] == ()
    before = {n: (p.shape, p.dtype) for n, p in model.named_parameters()}
    vector = layout.read(model)
    assert vector.dtype == torch.float32
    layout.write(vector + 1.0, model)
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == before
    assert model.scale.item() == 3.0
    assert model.head.weight is model.embed.weight
    tensors = layout.tensors(vector)
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {
        n: before[n] for n in layout.names
    }


def test_bf16_weights_survive_the_wire_bit_for_bit() -> None:
    """bf16 crosses as float32, which holds every bf16 value, and is bf16 again at the end."""
    half = nn.Linear(4, 4).to(torch.bfloat16)
    layout = Layout.of(half)
    back = from_arrays("v", record("v", layout.read(half)), layout.size)
    tensors = layout.tensors(back)
    for name, parameter in half.named_parameters():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], parameter)


def test_frozen_weights_and_buffers_never_enter_the_vector_and_are_never_written() -> None:
    """Only what is trained crosses; BatchNorm's integer counter least of all."""
    model = Mixed()
    model.norm(torch.randn(4, 2))
    layout = Layout.of(model)
    assert not any("frozen" in n or "running" in n or "tracked" in n for n in layout.names)
    kept = {n: copy.deepcopy(t) for n, t in model.state_dict().items() if n not in layout.names}
    layout.write(torch.zeros(layout.size), model)
    state = model.state_dict()
    for name, tensor in kept.items():
        if name != "head.weight":  # the other name of a trained storage
            assert torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype
    assert state["norm.num_batches_tracked"].item() == 1


def test_a_parameter_without_gradient_keeps_its_position() -> None:
    """What is missing counts as zero; its neighbours do not move."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layout = Layout.of(model)
    gradients = {n: torch.full(p.shape, 5.0) for n, p in model.named_parameters()}
    gradients.pop("0.bias")
    flat = layout.views(layout.flatten(gradients))
    assert torch.equal(flat["0.bias"], torch.zeros(2))
    assert all(torch.equal(flat[n], g) for n, g in gradients.items())


def test_views_share_memory_and_keep_leading_axes() -> None:
    """A sum into a view is a sum into the vector: no copy is made."""
    layout = Layout.of(nn.Linear(3, 2))
    vector = torch.zeros(layout.size)
    layout.views(vector)["bias"].add_(1.0)
    assert vector.sum() == 2.0
    assert layout.views(torch.zeros(5, layout.size))["weight"].shape == (5, 2, 3)


def test_a_model_that_trains_nothing_is_refused() -> None:
    """The error says what to do."""
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ContractError, match="unfreeze at least one"):
        Layout.of(model)


@pytest.mark.parametrize("shape", [(5,), (1, 6), (7,), ()])
def test_a_vector_of_another_shape_is_not_written(shape: tuple[int, ...]) -> None:
    """Shapes that would broadcast are refused like any other."""
    model = nn.Linear(2, 2)
    layout = Layout.of(model)
    before = layout.read(model)
    with pytest.raises(ContractError):
        layout.write(torch.ones(shape), model)
    assert torch.equal(layout.read(model), before)


def test_the_fingerprint_tells_layouts_apart() -> None:
    """Names, shapes and dtypes all count; values do not."""
    one, same = nn.Linear(2, 3), nn.Linear(2, 3)
    others = [nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3).to(torch.bfloat16)]
    renamed = nn.Module()
    renamed.weight = one.weight
    renamed.other = one.bias
    assert Layout.of(one).fingerprint == Layout.of(same).fingerprint
    prints = {Layout.of(m).fingerprint for m in (one, *others, renamed)}
    assert len(prints) == 5


# ------------------------------------------------------------------- what a sender may get wrong
def damaged(**changes: Any) -> ArrayRecord:
    good = Array(np.zeros(4, dtype=np.float32))
    fields = {"dtype": good.dtype, "shape": good.shape, "stype": good.stype, "data": good.data}
    return ArrayRecord({"v/0": Array(**{**fields, **changes})})


def npy_bytes(shape: tuple[int, ...], descr: str = "<f4", body: bytes = bytes(16)) -> bytes:
    """Return the bytes of a .npy file whose header says what it likes."""
    buffer = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + body


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": (2, 2)}, r"one axis.*\(2, 2\)"),
        ({"shape": (1, 4)}, r"one axis.*\(1, 4\)"),
        ({"shape": ()}, "one axis"),
        ({"dtype": "float64"}, "float64"),
        ({"dtype": "int64"}, "int64"),
        ({"shape": (3,)}, r"declared float32 \(3,\), is float32 \(4,\)"),
        ({"data": b""}, "unreadable"),
        ({"data": b"not an array at all"}, "unreadable"),
        ({"data": npy_bytes((4,))[:-1]}, "in 15 bytes"),
        ({"data": npy_bytes((3,))}, r"declared float32 \(4,\), is float32 \(3,\)"),
        ({"data": npy_bytes((2, 2))}, r"is float32 \(2, 2\)"),
        ({"data": npy_bytes((4,), "<i4")}, "is int32"),
        ({"data": npy_bytes((4,), "<f8", bytes(32))}, "is float64"),
        ({"data": npy_bytes((1,), "|O")}, "is object"),
        ({"data": npy_bytes((4,), body=bytes(1 << 20))}, "in 1048576 bytes"),
        ({"stype": "pickle"}, "as pickle"),
    ],
)
def test_a_vector_that_is_not_what_it_says_is_refused(changes: dict[str, Any], said: str) -> None:
    """Declaration, header and bytes must agree, and the error says where they do not."""
    with pytest.raises(ContractError, match=said):
        from_arrays("v", damaged(**changes), 4)


@pytest.mark.parametrize("elements", [10**9, 10**12, 10**15])
def test_a_header_that_claims_terabytes_is_refused_and_not_believed(elements: int) -> None:
    """A lying header must end as a refused reply, not as a failed allocation."""
    with pytest.raises(ContractError):
        from_arrays("v", damaged(data=npy_bytes((elements,))), 4)


@pytest.mark.parametrize("elements", [-4, 10**15])
def test_a_declared_length_that_cannot_be_is_refused_even_where_any_length_is_welcome(
    elements: int,
) -> None:
    """With no expected size the declaration must still fit the bytes that came."""
    with pytest.raises(ContractError):
        from_arrays("v", damaged(shape=(elements,)), None)


@pytest.mark.parametrize("keys", [[], ["v/1"], ["v/0", "v/2"], ["v/0", "v/00"], ["v/0", "v/x"]])
def test_missing_or_unknown_chunks_are_refused(keys: list[str]) -> None:
    """Chunks must be 0..n-1."""
    chunks = ArrayRecord({key: Array(np.zeros(2, dtype=np.float32)) for key in keys})
    with pytest.raises(ContractError, match="chunks"):
        from_arrays("v", chunks, None)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    """One nan would take a whole sum with it."""
    array = Array(np.array([0.0, value], dtype=np.float32))
    with pytest.raises(ContractError, match="nan or inf"):
        from_arrays("v", ArrayRecord({"v/0": array}), 2)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_integers_of_a_ring_come_back_in_their_own_dtype(dtype: type[Any]) -> None:
    """Whole range, whatever the chunks; which of the two rings it is, the receiver sees."""
    vector = np.array([0, 1, np.iinfo(dtype).max, 7, 8], dtype)
    back = integers_from_arrays("v", ArrayRecord(integers_to_arrays("v", vector, 2)), 5)
    assert back.dtype == dtype and np.array_equal(back, vector)


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ((np.zeros(2, np.uint32), np.zeros(2, np.uint64)), "different dtypes"),
        ((np.zeros(4, np.float32),), "expected uint32 or uint64"),
        ((np.zeros(4, np.int32),), "expected uint32 or uint64"),
        ((np.zeros(3, np.uint32),), "expected 4 elements"),
    ],
    ids=["two rings", "floats", "signed", "short"],
)
def test_what_is_no_vector_of_one_ring_is_refused(chunks: tuple[Any, ...], said: str) -> None:
    record_ = ArrayRecord({f"v/{i}": Array(chunk) for i, chunk in enumerate(chunks)})
    with pytest.raises(ContractError, match=said):
        integers_from_arrays("v", record_, 4)
