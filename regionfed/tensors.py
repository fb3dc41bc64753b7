"""Tensors and facts in one file, saved whole; nothing is pickled."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from regionfed.durable import replacing
from regionfed.errors import RunError


def save_state(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Save tensors and JSON facts as one safetensors file, atomically; nothing is pickled.

    Written from where they are: a state may be half of what its process holds.
    """
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as new:
        save_file(_apart(whole), new, metadata={"facts": json.dumps(facts)})


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a memory of their own each: safetensors refuses what shares any."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        is_whole = memory.nbytes() == tensor.nbytes and memory.data_ptr() not in seen
        seen.add(memory.data_ptr())
        apart[name] = tensor if is_whole else tensor.clone()
    return apart


def load_state(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what `save_state` wrote.

    Raises
    ------
    RunError
        If the file is missing or damaged, naming it.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, _facts(file)  # noqa: SIM118


def load_facts(path: Path) -> dict[str, Any]:
    """Read the facts that `save_state` wrote, and none of the tensors.

    Raises
    ------
    RunError
        If the file is missing or damaged, naming it.
    """
    with _opened(path) as file:
        return _facts(file)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"cannot read the saved state {path}: {error}.") from error


def _facts(file: Any) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((file.metadata() or {})["facts"])
    return facts
