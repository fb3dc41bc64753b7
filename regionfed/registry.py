"""Names that a configuration may use, and the objects they stand for.

A registry maps a short name to ``"package.module:attribute"``. The target is imported
only when it is asked for, so that no tier imports another tier's code and a run loads
nothing that it does not use. Any ``"package.module:attribute"`` is accepted in place of
a name: that is how a user's own dataset, task or personaliser is plugged in.
"""

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, cast

from regionfed.errors import ConfigurationError

T = TypeVar("T")


def nearest(name: str, known: Iterator[str] | list[str]) -> str:
    """Say which known name is meant, for an error message (empty when none is near)."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""


class Registry(Generic[T]):
    """A closed set of names for one kind of object, open to ``module:attribute`` paths.

    Parameters
    ----------
    kind : str
        What the names stand for, as the user knows it (``"dataset"``).
    targets : Mapping[str, str]
        From name to ``"package.module:attribute"``.
    """

    def __init__(self, kind: str, targets: Mapping[str, str]) -> None:
        self.kind = kind
        self._targets = dict(targets)

    @property
    def names(self) -> tuple[str, ...]:
        """The built-in names, in order of registration."""
        return tuple(self._targets)

    def load(self, name: str) -> T:
        """Import what `name` stands for.

        Raises
        ------
        ConfigurationError
            If `name` is neither a known name nor an importable ``module:attribute``.
        """
        target = self._targets.get(name, name if ":" in name else "")
        if not target:
            raise ConfigurationError(
                f"unknown {self.kind} '{name}'{nearest(name, list(self._targets))} "
                f"Known: {', '.join(self.names)}; or give your own as 'package.module:attribute'."
            )
        module_name, _, attribute = target.partition(":")
        try:
            return cast(T, getattr(importlib.import_module(module_name), attribute))
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                f"cannot load {self.kind} '{name}' from '{target}': {error}. "
                f"Install the package that holds it, or correct the path."
            ) from error
