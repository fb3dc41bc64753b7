"""The errors that RegionFed raises on purpose; each message names the remedy."""


class RegionFedError(Exception):
    """Base of all errors that a user or another tier may meet."""


class ConfigurationError(RegionFedError):
    """A key, value or combination in the configuration cannot be used."""


class ContractError(RegionFedError):
    """A message does not hold what the contract says; it must not touch a sum."""


class PrivacyError(RegionFedError):
    """A release would exceed the privacy that the run promised, or was never planned."""


class DataError(RegionFedError):
    """A dataset is missing, malformed, or cannot be split as asked."""


class RunError(RegionFedError):
    """The run cannot go on: too few regions, nobody answered, no checkpoint."""


class RunStoppedError(RegionFedError):
    """Somebody asked the run to stop; what it has is saved."""
