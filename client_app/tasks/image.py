"""An image in, one label out, by the convolutional network of LEAF's FEMNIST.

Two convolutions of 5 x 5 with 32 and 64 channels, each with a rectifier and a pooling of 2 x 2,
then 2048 hidden units (Caldas et al. 2018, arXiv:1812.01097, `models/femnist/cnn.py`). A GroupNorm
after each convolution is ours: a BatchNorm would mix the examples of a batch, so that no example
would have a gradient of its own, and its buffers would have to cross as well.
"""

import base64
import binascii
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from client_app.datasets.dataset import Example
from client_app.datasets.load import dataset_of
from client_app.datasets.spaces import Space, checked, spaces_of
from client_app.models import prepared
from client_app.task import Batch, Tensors
from regionfed.config import Config
from regionfed.errors import ConfigurationError, DataError
from regionfed.randomness import derive_seed
from regionfed.registry import nearest

SIDE = 28
SIZES = {"leaf": (32, 64, 2048), "small": (8, 16, 64)}
"""Channels of the convolutions, and hidden units; ``small`` is for tests and slow machines."""
_SCORING_BATCH = 256
_GROUPS = 4


def network(channels: tuple[int, int], hidden: int, labels: int) -> nn.Module:
    """Return the network for images (B, 1, 28, 28); logits (B, labels)."""
    first, second = channels
    return nn.Sequential(
        nn.Conv2d(1, first, 5, padding=2),
        nn.GroupNorm(_GROUPS, first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2),
        nn.GroupNorm(_GROUPS, second),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (SIDE // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, labels),
    )


class Image:
    """A network with one label for an image.

    Parameters
    ----------
    module : nn.Module
        Images (B, 1, 28, 28) to logits (B, labels); without batch statistics.
    name : str
        The task.
    space : Space
        Its labels.
    """

    def __init__(self, module: nn.Module, name: str, space: Space) -> None:
        self._module = module.eval()
        self._name = name
        self._space = space
        self._index = {label: i for i, label in enumerate(space.labels)}

    @property
    def module(self) -> nn.Module:
        """The network."""
        return self._module

    def encode(self, examples: Sequence[Example]) -> Batch:
        """Return ``pixels`` (B, 1, 28, 28), from 0 (paper) to 1 (ink), and ``labels`` (B,).

        Raises
        ------
        DataError
            If a source is no image of that size, or a target no label.
        """
        device = next(self._module.parameters()).device
        pixels = torch.from_numpy(np.stack([_pixels(e.source) for e in examples]))
        labels = [self._index[checked(self._space, e).target] for e in examples]
        return {
            "pixels": pixels.to(device, torch.float32)[:, None] / 255.0,
            "labels": torch.tensor(labels, device=device),
        }

    def losses(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        """Return each image's cross-entropy, (B,)."""
        logits = self._logits(weights, batch["pixels"])
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")

    def _logits(self, weights: Tensors, pixels: torch.Tensor) -> torch.Tensor:
        dtype = next(self._module.parameters()).dtype
        logits: torch.Tensor = functional_call(self._module, dict(weights), (pixels.to(dtype),))
        return logits.float() if dtype == torch.bfloat16 else logits

    def answers(self, weights: Tensors, examples: Sequence[Example]) -> list[str]:
        """Return the likeliest label of each image; the examples' targets are not looked at."""
        device = next(self._module.parameters()).device
        out: list[str] = []
        for start in range(0, len(examples), _SCORING_BATCH):
            images = [_pixels(e.source) for e in examples[start : start + _SCORING_BATCH]]
            pixels = torch.from_numpy(np.stack(images)).to(device, torch.float32)[:, None] / 255.0
            with torch.no_grad():
                best = self._logits(weights, pixels).argmax(1).tolist()
            out += [self._space.labels[i] for i in best]
        return out

    def scores(self, weights: Tensors, examples: Sequence[Example]) -> list[float]:
        """Return 1 for each image whose label is right, else 0."""
        answers = self.answers(weights, examples)
        return [float(a == e.target) for a, e in zip(answers, examples, strict=True)]


def as_source(image: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]") -> str:
    """Return an image of bytes, 0 paper and 255 ink, as the source of an example."""
    return base64.b64encode(np.ascontiguousarray(image, np.uint8).tobytes()).decode("ascii")


def _pixels(source: str) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    try:
        data = base64.b64decode(source, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"an image's source is no base64 text ({error}).") from error
    if len(data) != SIDE * SIDE:
        raise DataError(f"an image has {len(data)} pixels; expected {SIDE} x {SIDE}.")
    return np.frombuffer(data, np.uint8).reshape(SIDE, SIDE)


def make_task(config: Config) -> Image:
    """Make the network of the size that a configuration names, for the dataset's labels.

    Raises
    ------
    ConfigurationError
        If there is no such size, or the dataset has not just one task of one label.
    """
    family, _, size = config.model.partition(":")
    if family != "cnn" or size not in SIZES:
        raise ConfigurationError(
            f"model='{config.model}'{nearest(size, list(SIZES))} The task 'image' has "
            f"{', '.join(f'cnn:{name}' for name in SIZES)}."
        )
    spaces = spaces_of(dataset_of(config))
    if len(spaces) != 1 or next(iter(spaces.values())).kind != "class":
        raise ConfigurationError(
            f"task='image' gives an image one label; dataset '{config.dataset}' has the tasks "
            f"{', '.join(spaces)}."
        )
    (name, space), *_ = spaces.items()
    first, second, hidden = SIZES[size]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "model"))
        module = network((first, second), hidden, len(space.labels))
    return Image(prepared(module, config), name, space)
