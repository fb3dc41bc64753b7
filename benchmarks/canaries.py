"""Canaries: examples that are planted to be found again. Plug-ins, as a user would write them.

Two kinds, on one and the same training:

* *gradient* canaries: the gradient of each is one coordinate of its own (the Dirac canaries of
  Nasr et al., "Tight Auditing of Differentially Private Machine Learning", 2023). The strongest
  that an example can be: its whole clip norm, every time it is sampled, where little else is.
* *text* canaries: words drawn at random with a label drawn at random, an example like all others.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from client_app.datasets.dataset import ClientData, DataConfig, Example, FederatedDataset
from client_app.datasets.retail import load as load_retail
from client_app.datasets.retail import public_examples
from client_app.datasets.retail.lexicon import INTENTS
from client_app.gradients import batches, example_gradients
from client_app.task import Batch, Task, Tensors
from client_app.tasks.text_to_text import make_task as make_text_to_text
from regionfed.config import Config
from regionfed.durable import write_atomic
from regionfed.randomness import secure_randomness
from regionfed.vector import Layout

FILE = "canaries.json"
_GRADIENT = "gradient canary"
# The slope of a gradient canary's loss: longer than any clip norm here, so that it is clipped.
_SLOPE = 100.0


@dataclass(frozen=True)
class Canaries:
    """All canaries of a training, the auditor's secret coins among them.

    Attributes
    ----------
    coordinates : list of int
        Of the flat vector; each region plants one gradient canary at each.
    texts : dict of str to list of (source, target)
        Text canaries by region.
    gradient_in, text_in : dict of str to list of bool
        By region: which are in.
    """

    coordinates: list[int]
    texts: dict[str, list[tuple[str, str]]]
    gradient_in: dict[str, list[bool]]
    text_in: dict[str, list[bool]]

    def examples(self, region: str) -> list[Example]:
        """Return the canaries of a region that are in."""
        planted = [
            Example("intent", str(coordinate), "", _GRADIENT)
            for coordinate, is_in in zip(self.coordinates, self.gradient_in[region], strict=True)
            if is_in
        ]
        return planted + [
            text_canary(text)
            for text, is_in in zip(self.texts[region], self.text_in[region], strict=True)
            if is_in
        ]


def text_canary(text: tuple[str, str]) -> Example:
    """Return a text canary as an example."""
    return Example("intent", *text, "text canary")


def draw(
    config: Config, task: Task, regions: Sequence[str], *, gradients: int, texts: int
) -> Canaries:
    """Draw canaries and, from the system's secure randomness, their coins.

    Parameters
    ----------
    gradients, texts : int
        Of each kind, in each region.
    """
    return Canaries(
        coordinates=quiet_coordinates(config, task, gradients),
        texts={region: _random_texts(config.seed, region, texts) for region in regions},
        gradient_in={region: _coins(gradients, "gradients", region) for region in regions},
        text_in={region: _coins(texts, "texts", region) for region in regions},
    )


def _coins(count: int, *purpose: str) -> list[bool]:
    return [bool(coin) for coin in secure_randomness("coins", *purpose).bernoulli(0.5, count)]


def quiet_coordinates(config: Config, task: Task, count: int, public: int = 512) -> list[int]:
    """Return the coordinates on which the gradients of public examples have the least energy.

    Public knowledge: the shipped model, and so many generated queries of no region.
    """
    layout = Layout.of(task.module)
    weights = layout.tensors(layout.read(task.module))
    energy = torch.zeros(layout.size)
    for batch in batches(public_examples(config.seed, public), config.microbatch):
        gradients, _ = example_gradients(task, weights, task.encode(batch))
        energy += layout.flatten({name: g.square().sum(0) for name, g in gradients.items()})
    return sorted(int(i) for i in energy.argsort()[:count])


def _random_texts(seed: int, region: str, count: int) -> list[tuple[str, str]]:
    """Return random queries of five words of the public corpus, each with a random department."""
    words = sorted({word for e in public_examples(seed, 2000) for word in e.source.split()})
    coins = secure_randomness("texts", region)
    return [
        (
            " ".join(words[int(u * len(words)) % len(words)] for u in coins.uniform(5)),
            INTENTS[int(coins.uniform(1)[0] * len(INTENTS)) % len(INTENTS)],
        )
        for _ in range(count)
    ]


def save(canaries: Canaries, folder: Path) -> None:
    """Write the canaries where the devices of the simulation find theirs."""
    write_atomic(folder / FILE, json.dumps(asdict(canaries)).encode())


@dataclass(frozen=True)
class PlantedDataset:
    """A dataset whose devices hold some canaries besides their own training examples."""

    own: FederatedDataset
    canaries: Canaries

    @property
    def regions(self) -> tuple[str, ...]:
        """Those of the dataset."""
        return self.own.regions

    @property
    def tasks(self) -> tuple[str, ...]:
        """Those of the dataset."""
        return self.own.tasks

    def clients(self, region: str) -> int:
        """Return the number of devices of a region."""
        return self.own.clients(region)

    def client(self, region: str, index: int) -> ClientData:
        """Return a device's examples, and every n-th of its region's canaries."""
        data = self.own.client(region, index)
        planted = self.canaries.examples(region)[index :: self.clients(region)]
        return ClientData((*data.train, *planted), data.test)


def load(config: DataConfig) -> PlantedDataset:
    """Load the embedded dataset with the canaries of the folder `data-path`."""
    if config.path is None:
        raise ValueError("data-path names no folder: draw canaries and save them first")
    return PlantedDataset(
        load_retail(config), Canaries(**json.loads((config.path / FILE).read_text()))
    )


class PlantedTask:
    """A task on which the loss of a gradient canary is one weight, times a slope."""

    def __init__(self, own: Task) -> None:
        self._own = own
        self._names = Layout.of(own.module).names

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._own.module

    def encode(self, examples: Sequence[Example]) -> Batch:
        """Return the batch, with the coordinate of each gradient canary, -1 for all others."""
        marks = [int(e.source) if e.group == _GRADIENT else -1 for e in examples]
        return {**self._own.encode(examples), "canary": torch.tensor(marks)}

    def losses(self, weights: Tensors, batch: Batch) -> torch.Tensor:
        """Return each example's loss, (B,)."""
        mark = batch["canary"]
        own = self._own.losses(weights, {k: v for k, v in batch.items() if k != "canary"})
        flat = torch.cat([weights[name].flatten() for name in self._names])
        return torch.where(mark >= 0, _SLOPE * flat[mark.clamp(min=0)], own)

    def scores(self, weights: Tensors, examples: Sequence[Example]) -> list[float]:
        """Return the task's own scores: no canary is held out."""
        return self._own.scores(weights, examples)


def make_task(config: Config) -> PlantedTask:
    """Load the configured model with room for gradient canaries."""
    return PlantedTask(make_text_to_text(config))
