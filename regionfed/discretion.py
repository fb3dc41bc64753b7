"""What an error may say outside of where it happened."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from regionfed.errors import DataError, RegionFedError, RunError

log = logging.getLogger(__name__)


@contextmanager
def discreet(who: str) -> Iterator[None]:
    """Let others learn of an unforeseen error its type and no more; also a decorator.

    Our own errors are written to be read by others, except those about data, which quote it. The
    text of any other may quote data as well. The whole of it goes to the log of this process.

    Raises
    ------
    RunError
        In place of such an error.
    """
    try:
        yield
    except Exception as error:
        if is_for_others(error):
            raise
        _tell(who, error)


def is_for_others(error: BaseException) -> bool:
    """Say whether an error's text is written for others: ours is, except what quotes data."""
    return isinstance(error, RegionFedError) and not isinstance(error, DataError)


def _tell(who: str, error: Exception) -> None:
    log.error("%s failed", who, exc_info=error)
    raise RunError(f"{who} failed ({type(error).__name__}); its own log says why") from None
