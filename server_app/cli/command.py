"""What a subcommand is."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One subcommand of ``regionfed``.

    Attributes
    ----------
    description : str
        What it does, above its options.
    configure : callable
        Adds its options to a parser.
    run : callable
        Does it and returns the exit status; what it raises on purpose is told in a line.
    """

    description: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
