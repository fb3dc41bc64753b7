"""How the replies of a region's devices become one noised sum that the ledger knows of.

A `Summation` asks, sums, charges and noises; the coordinator gets the released sum and never has
to know whether it could have seen more.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from flwr.serverapp import Grid

from region_app.exchange import Quarantine, exchange
from regionfed.config import Config
from regionfed.contract import lengths_of, numbers
from regionfed.errors import RunError
from regionfed.privacy.ledger import Ledger
from regionfed.privacy.mechanism import GaussianSum, Part
from regionfed.randomness import randomness_source

Sums = dict[str, torch.Tensor]


def _as_it_is(sums: Sums) -> Sums:
    return sums


@dataclass(frozen=True)
class Question:
    """What devices are asked, and how the sum of their replies is released.

    Attributes
    ----------
    request : object
        A message of the contract.
    reply : type
        What answers it.
    dimensions : Mapping of str to int
        The length of each dimension of the reply.
    mechanism : GaussianSum
        Noises and charges the sum.
    parts : Mapping of str to str
        Field of the reply to the part of the mechanism that its sum is; others are not released.
    round : int
        The round in which it is asked.
    charged_to : int
        The round that the ledger says.
    number : int
        Which of a round's questions of this mechanism it is; 0 where there is one only.
    must_answer : bool
        Whether the sum of no replies is an error.
    before_noise : callable
        What is done to a sum before it is noised; only who holds sums can.
    """

    request: object
    reply: type
    dimensions: Mapping[str, int]
    mechanism: GaussianSum
    parts: Mapping[str, str]
    round: int
    charged_to: int
    number: int = 0
    must_answer: bool = False
    before_noise: Callable[[Sums], Sums] = _as_it_is

    @property
    def lengths(self) -> dict[str, int]:
        """Length of each field that is released, in the order of `parts`."""
        known = lengths_of(self.reply, self.dimensions)
        return {field: known[field] for field in self.parts}


@dataclass(frozen=True)
class Devices:
    """A region's devices as whoever sums sees them.

    Attributes
    ----------
    region : str
    grid : Grid
    declared : int
        How many there are said to be.
    ledger : Ledger
    quarantine : callable
        Told why a reply was left out.
    """

    region: str
    grid: Grid
    declared: int
    ledger: Ledger
    quarantine: Quarantine


class Summation(Protocol):
    """Turns replies into released sums."""

    def released(self, nodes: list[int], question: Question) -> Sums:
        """Ask the nodes and return the noised sum by part, charged before it was made.

        Raises
        ------
        RunError
            If too few answered.
        PrivacyError
            If the release would exceed the budget.
        """
        ...

    def noise_std(self, part: Part, length: int) -> float:
        """Return the most noise (std) that is on each coordinate of a part of some length."""
        ...


class CentralSum:
    """The coordinator holds the exact sum and adds the noise: it is trusted with both."""

    def __init__(self, devices: Devices, config: Config) -> None:
        self._devices = devices
        self._config = config
        self._randomness = randomness_source(config.noise_seed)

    def released(self, nodes: list[int], question: Question) -> Sums:
        """Ask, sum, charge, noise."""
        devices, mechanism = self._devices, question.mechanism
        sums = {
            question.parts[field]: torch.zeros(length) for field, length in question.lengths.items()
        }
        answered = 0
        replies: Iterator[object] = exchange(
            devices.grid,
            nodes,
            question.request,
            question.reply,
            question.dimensions,
            timeout=self._config.round_timeout,
            quarantine=devices.quarantine,
        )
        for reply in replies:
            values = numbers(reply)
            for field, part in question.parts.items():
                sums[part] += values[field]
            answered += 1
        if question.must_answer and not answered:
            raise RunError(f"region {devices.region}: none of its devices answered.")
        sums = question.before_noise(sums)
        devices.ledger.charge(mechanism.event(devices.region, question.charged_to))
        which = (question.number,) if question.number else ()
        purpose = (mechanism.release, self._config.seed, question.charged_to, devices.region)
        return mechanism.noised(sums, self._randomness(*purpose, *which))

    def noise_std(self, part: Part, length: int) -> float:
        """Return what the mechanism says."""
        del length
        return part.noise_std
