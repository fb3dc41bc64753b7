"""A model as one flat vector of its unique trainable storages, and back.

What crosses a wire is this vector: no buffers, no frozen weights, and each tied matrix once
(a T5 `state_dict` carries its embedding four times). Ties are found by storage identity, not
by what a configuration says.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import nn

from regionfed.errors import ContractError

# Elements in one Array: 16 MiB of float32, so that encoding a large model never needs a second
# copy of all of it at once. Flower cuts each Array into network chunks of its own.
CHUNK = 4 * 1024 * 1024


def _storage_key(tensor: torch.Tensor) -> tuple[object, ...]:
    """Identify the memory a tensor looks at (a meta tensor has none: its identity stands in)."""
    if tensor.is_meta:
        return (id(tensor),)
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )


def trainable_storages(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each trainable storage once, under the first name it has in the module."""
    seen = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = _storage_key(parameter)
        if parameter.requires_grad and key not in seen:
            seen.add(key)
            yield name, parameter


@dataclass(frozen=True)
class Layout:
    """Where each trainable tensor lies in the flat vector.

    Attributes
    ----------
    names : tuple of str
        One canonical name per storage, in the module's order.
    shapes : tuple of tuple of int
        () for a scalar.
    dtypes : tuple of torch.dtype
        What each tensor is in the module; the vector itself is float32.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "Layout":
        """Read the layout of a module's trainable storages.

        Raises
        ------
        ContractError
            If nothing is trainable.
        """
        storages = list(trainable_storages(module))
        if not storages:
            raise ContractError("the model has no trainable parameter; unfreeze at least one.")
        return cls(
            names=tuple(name for name, _ in storages),
            shapes=tuple(tuple(p.shape) for _, p in storages),
            dtypes=tuple(p.dtype for _, p in storages),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each tensor."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def size(self) -> int:
        """Number of elements p of the vector."""
        return sum(self.sizes)

    @property
    def fingerprint(self) -> str:
        """Hash of names, shapes and dtypes: two ends agree on the layout when it is equal."""
        text = repr((self.names, self.shapes, [str(d) for d in self.dtypes]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def flatten(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the vector (p,) float32 of named tensors; a missing one counts as zero.

        Frozen or unused parameters have no gradient; their positions must stay.
        """
        out = torch.zeros(self.size)
        for name, view in self.views(out).items():
            if (tensor := tensors.get(name)) is not None:
                view.copy_(tensor.detach())
        return out

    def read(self, module: nn.Module) -> torch.Tensor:
        """Return the module's trainable values as a vector (p,) float32."""
        return self.flatten(dict(trainable_storages(module)))

    def views(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the named tensors as views of `vector` (..., p); leading axes are kept."""
        lead = vector.shape[:-1]
        parts = torch.split(vector, list(self.sizes), dim=-1)
        return {
            name: part.view((*lead, *shape))
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def tensors(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the named tensors in the module's own dtypes (no copy where it is float32)."""
        views = self.views(vector)
        return {
            name: views[name].to(dtype) for name, dtype in zip(self.names, self.dtypes, strict=True)
        }

    def write(self, vector: torch.Tensor, module: nn.Module) -> None:
        """Copy a vector (p,) into the module; ties, frozen weights and buffers are kept."""
        if vector.shape != (self.size,):
            raise ContractError(f"vector {tuple(vector.shape)} does not fit layout ({self.size},).")
        views = self.views(vector)
        with torch.no_grad():
            for name, parameter in trainable_storages(module):
                parameter.copy_(views[name])


def to_arrays(name: str, vector: torch.Tensor, chunk: int = CHUNK) -> dict[str, Array]:
    """Cut a float32 vector (n,) into Arrays ``name/0``, ``name/1``, ... of at most `chunk`."""
    flat = vector.detach().to(torch.float32).contiguous()
    pieces = torch.split(flat, chunk) if flat.numel() else (flat,)
    return {f"{name}/{i}": Array(piece.numpy()) for i, piece in enumerate(pieces)}


def from_arrays(name: str, record: ArrayRecord, size: int | None) -> torch.Tensor:
    """Join the Arrays of `name` into a finite float32 vector (size,).

    Nothing is allocated before the bytes that came add up to `size`, so that a lying sender
    cannot make the receiver allocate more than it expects.

    Raises
    ------
    ContractError
        Naming the vector, what was expected and what came.
    """
    pieces = _pieces(name, record, size, _FLOATS)
    out = torch.empty(sum(piece.size for piece in pieces))
    _join(pieces, out.numpy())
    if not bool(torch.isfinite(out).all()):
        raise ContractError(f"vector '{name}': holds nan or inf.")
    return out


def integers_to_arrays(
    name: str, vector: NDArray[np.unsignedinteger[Any]], chunk: int = CHUNK
) -> dict[str, Array]:
    """Cut unsigned integers (n,) of 32 or 64 bits into Arrays, as `to_arrays` does."""
    starts = range(0, max(len(vector), 1), chunk)
    return {f"{name}/{i}": Array(vector[s : s + chunk]) for i, s in enumerate(starts)}


def integers_from_arrays(
    name: str, record: ArrayRecord, size: int | None
) -> NDArray[np.unsignedinteger[Any]]:
    """Join what `integers_to_arrays` cut; see `from_arrays` for what is refused."""
    pieces = _pieces(name, record, size, _INTEGERS)
    if len({piece.dtype for piece in pieces}) != 1:
        raise ContractError(f"vector '{name}': its chunks have different dtypes.")
    out = np.empty(sum(piece.size for piece in pieces), pieces[0].dtype)
    _join(pieces, out)
    return out


def _join(pieces: list[NDArray[Any]], out: NDArray[Any]) -> None:
    start = 0
    for piece in pieces:
        out[start : start + piece.size] = piece
        start += piece.size


def _pieces(
    name: str, record: ArrayRecord, size: int | None, dtypes: tuple[str, ...]
) -> list[NDArray[Any]]:
    """Look at the Arrays of a vector, in order, once they bear out the length that is expected."""
    keys = [key for key in record if key.rpartition("/")[0] == name]
    if set(keys) != {f"{name}/{i}" for i in range(len(keys))} or not keys:
        raise ContractError(f"vector '{name}': chunks {sorted(keys)} are not 0..n-1.")
    pieces = [_piece(name, record[f"{name}/{i}"], dtypes) for i in range(len(keys))]
    declared = sum(piece.size for piece in pieces)
    if size is not None and declared != size:
        raise ContractError(f"vector '{name}': expected {size} elements, got {declared}.")
    return pieces


def _piece(name: str, array: Array, dtypes: tuple[str, ...]) -> NDArray[Any]:
    """Look at an Array's bytes as numbers of one of these dtypes (n,), without a copy.

    Its dtype and shape are said twice, beside the bytes and in their header; both are the
    sender's word, and the bytes themselves have to bear them out.
    """
    file = BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(file)
        read_header = _HEADERS[version]
        shape, _, dtype = read_header(file)
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise ContractError(f"vector '{name}': unreadable array ({error}).") from error
    held = len(array.data) - file.tell()
    one_axis = array.stype == "numpy.ndarray" and len(array.shape) == 1
    if array.dtype not in dtypes or not one_axis:
        raise ContractError(
            f"vector '{name}': expected {' or '.join(dtypes)} of one axis as numpy.ndarray, "
            f"got {array.dtype} {array.shape} as {array.stype}."
        )
    expected = np.dtype(array.dtype).newbyteorder("<")
    fits = shape == tuple(array.shape) and held == expected.itemsize * shape[0]
    if dtype != expected or not fits:
        raise ContractError(
            f"vector '{name}': declared {array.dtype} {array.shape}, is {dtype} {shape} in "
            f"{held} bytes."
        )
    return np.frombuffer(array.data, dtype=expected, offset=file.tell())


_FLOATS = ("float32",)
_INTEGERS = ("uint32", "uint64")
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
