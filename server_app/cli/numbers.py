"""Numbers that are typed on the command line, checked before anything is loaded."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable


def within(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """Return a reader of numbers from `low` to `high`, for argparse; nan and inf are neither."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ArgumentTypeError(f"'{text}': expected a number from {low:g} to {high:g}")
        return value

    return read
