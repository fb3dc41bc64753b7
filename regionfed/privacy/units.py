"""The units that privacy can protect: one class each, and nothing else knows them apart.

A unit says where the clip stands and who is drawn; sensitivity, denominators, amplification and
the ledger's events follow from that (`regionfed.privacy.mechanism`), so that moving the clip
moves the ledger.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from regionfed.privacy.unit import NEIGHBOURING, Part, Sampling, Unit

ZERO_OUT = "zero-out"
"""A region's data or none of it; that it takes part is known, for its updates bear its name."""

# Stands for a clip norm where devices shall not clip; a message carries no infinity.
UNCLIPPED = 1e30

_MEANS = {"update", "gradient"}


@dataclass(frozen=True)
class PerExample:
    """One example of one device, added or removed.

    Each device draws its examples by Poisson sampling and clips each one's gradient to C; the
    coordinator adds noise to the sum. Protects one record, not all that a person has.
    """

    protects: str = "example"
    whom: str = "each training example"
    neighbouring: str = NEIGHBOURING
    as_one: bool = False
    declared: bool = False
    holds_both: bool = False
    sketches: bool = True
    weighs_users: bool = True
    promises_region_too: bool = False
    hides_sums: bool = True

    def sampling(self, rate: float) -> Sampling:
        """Have devices draw their examples."""
        return Sampling(devices=1.0, examples=rate, accounted=rate)

    def sampling_words(self, rate: float) -> str:
        """Say so."""
        return _of_examples(rate)

    def part(self, name: str, clip: float, noise: float) -> Part:
        """Clip each contribution by itself."""
        return Part(name, clip, noise)

    def device_clip(self, clip: float) -> float:
        """Have devices clip."""
        return clip

    def size_bound(self, examples_per_device: int) -> float:
        """Count an example once."""
        return 1.0

    def population(self, examples: float, devices: int) -> float:
        """Count examples."""
        return examples

    def also(self, rate: float) -> Mapping[str, tuple[float, float]]:
        """Name nobody else."""
        return {}


@dataclass(frozen=True)
class PerExampleOnSchedule(PerExample):
    """One example, as above, on a public schedule: nothing rests on who was drawn.

    Each example takes part once in every 1/rate rounds (the whole number next to it), which earns
    no amplification. Instead the noise on updates is correlated over as many rounds, so that what
    the model adds up is less noisy than its parts (`regionfed.privacy.banded`).
    """

    hides_sums: bool = False

    def sampling(self, rate: float) -> Sampling:
        """Have devices keep to the schedule."""
        period = round(1.0 / rate)
        return Sampling(devices=1.0, examples=1.0 / period, accounted=1.0, period=period)

    def sampling_words(self, rate: float) -> str:
        """Say so."""
        return f"on a public schedule, each example in one of every {round(1.0 / rate)} rounds"


@dataclass(frozen=True)
class ExampleInMean(PerExample):
    """One example, within a regional mean that is clipped: the published mechanism.

    Devices clip nothing, the coordinator clips the region's mean to C. One example may turn that
    mean round, so that the sensitivity of updates and gradients is 2 C, whatever was published.
    What that says of a region as a whole is `plan.region_epsilon`: of updates and gradients alone.
    """

    sketches: bool = False
    weighs_users: bool = False
    promises_region_too: bool = True
    hides_sums: bool = False

    def part(self, name: str, clip: float, noise: float) -> Part:
        """Clip means of gradients; losses, votes and counts are bounded each."""
        if name in _MEANS:
            return Part(name, clip, noise, turn=2.0, of_mean=True)
        return super().part(name, clip, noise)

    def device_clip(self, clip: float) -> float:
        """Have devices clip nothing."""
        return UNCLIPPED


@dataclass(frozen=True)
class PerClient:
    """One device with all its examples, added or removed.

    The coordinator draws devices by Poisson sampling, in secret: it contacts those that were
    drawn and no other. A device takes K steps on its own examples and returns what they changed,
    clipped to C as a whole; its loss, sketch, votes, counts and scores are bounded as a whole
    too. Sums are divided by rate times the devices that are *declared*.
    """

    protects: str = "client"
    whom: str = "each device with all its examples"
    neighbouring: str = NEIGHBOURING
    as_one: bool = True
    declared: bool = True
    holds_both: bool = True
    sketches: bool = True
    weighs_users: bool = False
    promises_region_too: bool = False
    hides_sums: bool = False

    def sampling(self, rate: float) -> Sampling:
        """Have the coordinator draw devices, which answer with all that they have."""
        return Sampling(devices=rate, examples=1.0, accounted=rate)

    def sampling_words(self, rate: float) -> str:
        """Say so."""
        return f"Poisson, rate {rate:g} of the devices in each round, drawn by the coordinator"

    def part(self, name: str, clip: float, noise: float) -> Part:
        """Clip each device's contribution as a whole."""
        return Part(name, clip, noise)

    def device_clip(self, clip: float) -> float:
        """Have devices clip."""
        return clip

    def size_bound(self, examples_per_device: int) -> float:
        """Count all that a device has, up to what is declared."""
        return float(examples_per_device)

    def population(self, examples: float, devices: int) -> float:
        """Count devices."""
        return float(devices)

    def also(self, rate: float) -> Mapping[str, tuple[float, float]]:
        """Name nobody: an example cannot do more than its device."""
        return {}


@dataclass(frozen=True)
class PerRegion:
    """A region's data, or none of it (zero-out).

    The coordinator clips the region's mean to C, and bounds its loss, sketch, votes and scores as
    a whole. Every region is in every round, under its name: nothing is amplified, and that it
    takes part is no secret. Devices draw examples all the same, which spares them work.
    """

    protects: str = "region"
    whom: str = "each region with all its data"
    neighbouring: str = ZERO_OUT
    as_one: bool = False
    declared: bool = True
    holds_both: bool = True
    sketches: bool = True
    weighs_users: bool = False
    promises_region_too: bool = False
    hides_sums: bool = False

    def sampling(self, rate: float) -> Sampling:
        """Have devices draw examples; the region itself is always there."""
        return Sampling(devices=1.0, examples=rate, accounted=1.0)

    def sampling_words(self, rate: float) -> str:
        """Say so."""
        return "none: every region is in every round"

    def part(self, name: str, clip: float, noise: float) -> Part:
        """Clip the region's mean; without its data it is zero, C away at most."""
        return Part(name, clip, noise, of_mean=True)

    def device_clip(self, clip: float) -> float:
        """Have devices clip nothing."""
        return UNCLIPPED

    def size_bound(self, examples_per_device: int) -> float:
        """Give no bound: sizes and labels of a region are never released."""
        return 0.0

    def population(self, examples: float, devices: int) -> float:
        """Count examples, as declared: the mean is over these before it is clipped."""
        return examples

    def also(self, rate: float) -> Mapping[str, tuple[float, float]]:
        """Name its data replaced by any other, and one example: both may turn the mean round."""
        return {"region replaced": (2.0, 1.0), "example": (2.0, rate)}


UNITS: Mapping[str, Unit] = {
    "example": PerExample(),
    "example-on-schedule": PerExampleOnSchedule(),
    "example-in-mean": ExampleInMean(),
    "client": PerClient(),
    "region": PerRegion(),
}
"""By the setting `unit`; closed, for a mechanism is not a plug-in."""


def neighbouring_of(protects: str) -> str:
    """Return how neighbours differ in a unit of the ledger; "unknown" for an unknown one."""
    return next((u.neighbouring for u in UNITS.values() if u.protects == protects), "unknown")


def _of_examples(rate: float) -> str:
    return f"Poisson, rate {rate:g} of the examples in each round"
