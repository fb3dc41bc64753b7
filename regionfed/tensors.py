"""Tensors and facts in one file, saved whole; nothing is pickled."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from regionfed.durable import write_atomic
from regionfed.errors import RunError


def save_state(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Save tensors and JSON facts as one safetensors file, atomically; nothing is pickled."""
    # Cloned: safetensors refuses tensors that share memory.
    whole = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    write_atomic(path, save(whole, metadata={"facts": json.dumps(facts)}))


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
