"""A linear sketch of gradients: few dimensions in which distances survive.

In high dimension the distance between two noised updates is noise. A sketch taken *before* the
noise has few coordinates to noise, so the distance between noised sketches still tells regions
apart. Count-sketch with one hash (Charikar, Chen, Farach-Colton 2002): coordinate i goes to
bucket ``i mod k`` of its tensor with a random sign, so that E ||S g||^2 = ||g||^2.

A sketch may be longer than what it sketches. Its sensitivity is therefore bounded by clipping
each contribution's sketch (`client_app.gradients`), never by assuming that S contracts.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch

from regionfed.vector import Layout


@lru_cache(maxsize=4)
def sketch_signs(layout: Layout, size: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the signs of each tensor, padded with zeros and folded: (rows, size) float32.

    The signs are public and equal on all devices of a run; they hide nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = {}
    for name, n in zip(layout.names, layout.sizes, strict=True):
        rows = -(-n // size)
        padded = torch.zeros(rows * size)
        padded[:n] = torch.randint(0, 2, (n,), generator=generator).float().mul_(2.0).sub_(1.0)
        signs[name] = padded.view(rows, size)
    return signs


def sketch(tensors: Mapping[str, torch.Tensor], signs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sketch a batch of gradients.

    Parameters
    ----------
    tensors : Mapping[str, torch.Tensor]
        Gradients of B examples by name, each (B, ...), all on the device of the signs.
    signs : Mapping[str, torch.Tensor]
        From `sketch_signs`.

    Returns
    -------
    torch.Tensor
        (B, k), on their device. Linear in the gradients.
    """
    size = next(iter(signs.values())).shape[1]
    first = next(iter(tensors.values()))
    batch = first.shape[0]
    out = torch.zeros(batch, size, device=first.device)
    for name, sign in signs.items():
        flat = tensors[name].flatten(1) if tensors[name].ndim > 1 else tensors[name][:, None]
        whole = flat.shape[1] // size * size
        rows = whole // size
        if rows:
            out += (flat[:, :whole].view(batch, rows, size) * sign[:rows]).sum(1)
        if rest := flat.shape[1] - whole:
            out[:, :rest] += flat[:, whole:] * sign[-1, :rest]
    return out
