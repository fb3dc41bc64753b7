"""How the replies of a region's devices become one noised sum that the ledger knows of.

A `Summation` asks, sums, charges and noises; the coordinator gets the released sum and never has
to know whether more could be seen.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from flwr.serverapp import Grid

from region_app.correlated_noise import CorrelatedNoise
from region_app.exchange import Quarantine, exchange
from regionfed.config import Config
from regionfed.contract import lengths_of, numbers
from regionfed.errors import RunError
from regionfed.privacy.ledger import Ledger
from regionfed.privacy.mechanism import GaussianSum
from regionfed.privacy.unit import Part
from regionfed.randomness import randomness_source

Sums = dict[str, torch.Tensor]


def _undivided(sums: Sums) -> float:
    del sums
    return 1.0


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
    number : int or None
        Which of a round's questions of this type it is; None where there is no other.
    batch : callable
        Says what makes a mean of the exact sums, where their mean is clipped. Only who holds
        such sums can ask.
    must_answer : bool
        Whether the sum of no replies is an error, if everybody was asked.
    """

    request: object
    reply: type
    dimensions: Mapping[str, int]
    mechanism: GaussianSum
    parts: Mapping[str, str]
    round: int
    charged_to: int
    number: int | None = None
    batch: Callable[[Sums], float] = _undivided
    must_answer: bool = False

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
    folder : Path
        The region's own disk.
    """

    region: str
    grid: Grid
    declared: int
    ledger: Ledger
    quarantine: Quarantine
    folder: Path


class Summation(Protocol):
    """Turns replies into released sums."""

    def released(self, nodes: list[int], question: Question) -> Sums:
        """Ask the nodes, or who is drawn of them; return the noised sum by part, charged first.

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
        """Draw, ask, sum, charge, noise.

        Both coins and noise have a stream of their own for each question.
        """
        mechanism, region = question.mechanism, self._devices.region
        purpose = (mechanism.release, self._config.seed, question.charged_to, region)
        number = () if question.number is None else (question.number,)
        cohort = mechanism.cohort(nodes, self._randomness("cohort", *purpose, *number))
        sums = self._summed(cohort, question)
        if not mechanism.is_charged(question.charged_to, self._devices.ledger.events):
            self._devices.ledger.charge(mechanism.event(region, question.charged_to))
        # The first question of a round draws its noise like the only one: without a number.
        stream = self._randomness(*purpose, *filter(None, number))
        gathered = mechanism.gathered(sums, question.batch(sums))
        return mechanism.noised(gathered, stream, self._rows(question))

    def _rows(self, question: Question) -> dict[str, Callable[[int], torch.Tensor]]:
        """Return where a part gets its noise from that is correlated over rounds."""
        mechanism, config = question.mechanism, self._config
        if mechanism.bands == 1:
            return {}
        path = self._devices.folder / "noise.safetensors"
        noise = CorrelatedNoise(path, config.rounds, mechanism.bands)

        def fresh(round_: int, size: int) -> torch.Tensor:
            purpose = ("row", mechanism.release, config.seed, round_, self._devices.region)
            return self._randomness(*purpose).normal(size)

        return {
            mechanism.parts[0].name: lambda size: noise.row(question.charged_to, size, fresh),
        }

    def _summed(self, cohort: list[int], question: Question) -> Sums:
        """Return the exact sums by part."""
        sums = {question.parts[field]: torch.zeros(n) for field, n in question.lengths.items()}
        answered = 0
        replies: Iterator[object] = exchange(
            self._devices.grid,
            cohort,
            question.request,
            question.reply,
            question.dimensions,
            timeout=self._config.device_timeout,
            quarantine=self._devices.quarantine,
        )
        for reply in replies:
            values = numbers(reply)
            added = {part: values[field] for field, part in question.parts.items()}
            for part, value in question.mechanism.enforced(added).items():
                sums[part] += value
            answered += 1
        if question.must_answer and not answered:
            self._allow_silence(cohort, question)
        return sums

    def _allow_silence(self, cohort: list[int], question: Question) -> None:
        """Refuse to go on without any answer; but a drawn cohort may be empty, or silent.

        Whether anybody was drawn, or who of them failed, must not be told: then zero is released,
        noised and charged like any other sum.
        """
        if not question.mechanism.unit.as_one:
            raise RunError(f"region {self._devices.region}: none of its devices answered.")
        self._devices.quarantine(f"none of {len(cohort)} drawn devices answered")

    def noise_std(self, part: Part, length: int) -> float:
        """Return what the mechanism says."""
        del length
        return part.noise_std
