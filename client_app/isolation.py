"""One example that cannot be computed costs itself, not its device's whole answer.

Otherwise it would change a sum by all that its device adds, which no clip norm bounds.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)


def isolated(
    work: Callable[[Sequence[T]], R], batches: Iterable[Sequence[T]]
) -> Iterator[tuple[Sequence[T], R]]:
    """Yield each batch with what `work` makes of it, without the examples on which it raises.

    A batch on which `work` raises is halved until the culprit stands alone; that one is left out.

    Raises
    ------
    Exception
        What `work` raised last, if it did so on every single example: then the work is at fault.
        To answer nothing is to add zero, so that this too is within one example's bound.
    """
    waiting = [batch for batch in batches if len(batch)][::-1]
    failure: Exception | None = None
    done = False
    while waiting:
        batch = waiting.pop()
        try:
            result = work(batch)
        except Exception as error:
            failure = error
            if len(batch) > 1:
                middle = len(batch) // 2
                waiting += [batch[middle:], batch[:middle]]
            else:
                log.warning("an example is left out", exc_info=error)
            continue
        done = True
        yield batch, result
    if failure is not None and not done:
        raise failure
