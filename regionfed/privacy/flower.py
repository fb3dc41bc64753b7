"""Flower's `PrivacyAccountant` over our accountant, for Flower's own strategies.

RegionFed's regions account in their ledgers. Who runs a strategy of Flower beside it, such as
`DifferentialPrivacyServerSideFixedClipping`, gets the same PLD bound there, and the same words.
"""

import math
from typing import Any

from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, PrivacySpent, SamplingMethod

from regionfed.errors import PrivacyError
from regionfed.privacy.accountant import Counts, Release, delta_at, epsilon

METHOD = "pld"
_VERSION = 1
_SAMPLING = {SamplingMethod.POISSON: True, SamplingMethod.NO_AMPLIFICATION: False}


class FlowerAccountant:
    """A `flwr.serverapp.PrivacyAccountant` by privacy loss distributions.

    Parameters
    ----------
    config : PrivacyConfig
        Of add-or-remove-one neighbours: Poisson sampling, or everyone without amplification.

    Raises
    ------
    PrivacyError
        If the sampling is without replacement, which is accounted for replace-one neighbours.
    """

    def __init__(self, config: PrivacyConfig) -> None:
        if config.sampling_method not in _SAMPLING:
            raise PrivacyError(
                f"sampling '{config.sampling_method.value}' is not accounted by PLD here: use "
                f"'poisson' or 'no-amplification', or Flower's RdpAccountant."
            )
        self._config = config
        self._releases: list[tuple[Release, int]] = []

    @property
    def config(self) -> PrivacyConfig:
        """The configuration."""
        return self._config

    @property
    def num_releases(self) -> int:
        """Number of releases so far."""
        return sum(count for _, count in self._releases)

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Add `count` releases like `event`."""
        self._releases.append(self._checked(event, count))

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon at `delta`, an upper bound."""
        return epsilon(_counts(self._releases), delta)

    def get_delta(self, epsilon: float) -> float:
        """Return delta at `epsilon`, an upper bound."""
        return delta_at(_counts(self._releases), epsilon)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """Return what is spent at `delta`, or at the configuration's."""
        at = self._config.target_delta if delta is None else delta
        return PrivacySpent(
            epsilon=self.get_epsilon(at),
            delta=at,
            num_releases=self.num_releases,
            accounting_method=METHOD,
        )

    def would_exceed(
        self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1
    ) -> bool:
        """Say whether `count` more releases would bring epsilon over the limit; changes nothing.

        Raises
        ------
        PrivacyError
            If neither the call nor the configuration has a limit.
        """
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None or not 0.0 < limit < math.inf:
            raise PrivacyError("no limit: set max_epsilon in PrivacyConfig, or hand it over.")
        after = [*self._releases, self._checked(event, count)]
        return epsilon(_counts(after), self._config.target_delta) > limit

    def state_dict(self) -> dict[str, object]:
        """Return what JSON can hold of the releases and what they are counted by."""
        return {
            "schema_version": _VERSION,
            "backend": METHOD,
            "config": self._config_state(),
            "releases": [[z, q, count] for (z, q), count in self._releases],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore the releases of `state_dict`.

        Raises
        ------
        PrivacyError
            If the state is of another accountant or configuration, or is damaged; nothing is
            restored then.
        """
        mine = {"schema_version": _VERSION, "backend": METHOD, "config": self._config_state()}
        if wrong := [key for key, value in mine.items() if state.get(key) != value]:
            raise PrivacyError(f"the state has another {', '.join(wrong)}: restore the right one.")
        try:
            rows: Any = state["releases"]
            restored = [((float(z), float(q)), _positive(n)) for z, q, n in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise PrivacyError(f"the state's releases cannot be read ({error}).") from error
        epsilon(_counts(restored), self._config.target_delta)  # refuses numbers that are none
        self._releases = restored

    def _config_state(self) -> dict[str, object]:
        config = self._config
        return {
            "target_delta": config.target_delta,
            "population_size": config.population_size,
            "neighboring_relation": config.neighboring_relation.value,
            "sampling_method": config.sampling_method.value,
            "max_epsilon": config.max_epsilon,
        }

    def _checked(self, event: GaussianPrivacyEvent, count: int) -> tuple[Release, int]:
        if event.population_size != self._config.population_size:
            raise PrivacyError(
                f"the release is of {event.population_size} clients, the accountant of "
                f"{self._config.population_size}: q would be wrong. Use one population."
            )
        sampled = _SAMPLING[self._config.sampling_method]
        rate = event.sample_size / event.population_size if sampled else 1.0
        return (event.noise_multiplier, rate), _positive(count)


def _positive(count: object) -> int:
    if type(count) is not int or count < 1:
        raise PrivacyError(f"a number of releases is 1 or more, not {count!r}.")
    return count


def _counts(releases: list[tuple[Release, int]]) -> Counts:
    whole: dict[Release, int] = {}
    for release, count in releases:
        whole[release] = whole.get(release, 0) + count
    return tuple(sorted(whole.items()))
