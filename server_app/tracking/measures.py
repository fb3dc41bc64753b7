"""The numbers of a round that are tracked: those of its record, which have left the regions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from regionfed.records import RegionRecord, RoundRecord, mean_of


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a round, of the run or of one region."""

    name: str
    value: float
    region: str | None = None

    @property
    def tag(self) -> str:
        """Return a name that says whose it is: ``run/loss``, ``alpha/UK``."""
        return f"{self.name}/{self.region}" if self.region else f"run/{self.name}"


OF_RUN: Mapping[str, str] = {
    "loss": "mean training loss of the regions that answered",
    "epsilon": "epsilon spent on training data since the start of the run, the largest region's",
    "seconds": "duration of the round",
    "answered": "regions whose updates were used",
    "failures": "answers that did not count",
    "global_mean": "score of the global model, mean over regions, 0 to 1",
    "global_rrs": "score of the global model, worst region, 0 to 1",
    "personalised_mean": "score of the personalised models, mean over regions, 0 to 1",
    "personalised_rrs": "score of the personalised models, worst region, 0 to 1",
    "user_mean": "score of users' own models, mean over regions, 0 to 1",
    "user_rrs": "score of users' own models, worst region, 0 to 1",
}
OF_REGION: Mapping[str, str] = {
    "epsilon": "epsilon spent on the region's training data, by its own ledger",
    "answered": "whether the region's update was used, 0 or 1",
    "failures": "answers of the region that did not count",
    "alpha": "weight of the region's own part",
    "rho": "step of the region's own part",
    "conflict": "distance of the region's update to the mean one",
    "global": "score of the global model in the region, 0 to 1",
    "personalised": "score of the region's own model, 0 to 1",
    "user": "score of the region's users' own models, 0 to 1",
}
"""What each name means, in a line."""


def measures_of(record: RoundRecord) -> list[Measure]:
    """Return the numbers of a round; what is not known, or not new in it, is left out."""
    found = [Measure(name, value) for name, value in _of_run(record).items()]
    for region, own in record.regions.items():
        found += [
            Measure(name, value, region) for name, value in _of_region(record, region, own).items()
        ]
    return found


def _of_run(record: RoundRecord) -> dict[str, float]:
    numbers: dict[str, float | None] = {
        "loss": record.loss,
        "epsilon": record.epsilon,
        "seconds": record.seconds,
        "answered": len(record.answered),
        "failures": len(record.failures),
    }
    models = {"global": record.global_, "personalised": record.personalised, "user": record.user}
    for model, score in models.items():
        if score is not None:
            numbers |= {f"{model}_mean": score.mean, f"{model}_rrs": score.rrs}
    return _numbers(numbers)


def _of_region(record: RoundRecord, region: str, own: RegionRecord) -> dict[str, float]:
    answered = region in record.answered
    numbers: dict[str, float | None] = {
        "epsilon": own.epsilon,
        "answered": answered,
        "failures": sum(failure.region == region for failure in record.failures),
    }
    # A region's record keeps what it said last: of a round that it missed, it is nothing new.
    if answered:
        numbers |= {"alpha": own.alpha, "rho": own.rho, "conflict": own.conflict}
    if answered and (record.global_ or record.personalised):
        numbers |= {
            "global": mean_of(own.global_),
            "personalised": mean_of(own.personalised),
            "user": mean_of(own.user),
        }
    return _numbers(numbers)


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)}
