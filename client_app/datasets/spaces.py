"""The answers that a task may have: public knowledge, the same on every device.

A model with a head has an output for each label, so that all devices must know all labels, those
that none of their own examples has included. They are never read from anybody's examples: a
dataset states them, as its documentation does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from client_app.datasets.dataset import Example, FederatedDataset
from regionfed.errors import DataError
from regionfed.registry import nearest

Kind = Literal["class", "tags", "text"]


@dataclass(frozen=True)
class Space:
    """The answers of one task.

    Attributes
    ----------
    kind : str
        ``"class"``: the target is one of the labels; ``"tags"``: one label for each word of the
        source, separated by spaces; ``"text"``: any text.
    labels : tuple of str
        All labels in a fixed order; none for a text.
    """

    kind: Kind
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(Kind)):
            raise DataError(
                f"unknown kind of space '{self.kind}'{nearest(str(self.kind), list(kinds))} There "
                f"are {', '.join(kinds)}."
            )
        if (self.kind == "text") == bool(self.labels) or len(set(self.labels)) < len(self.labels):
            raise DataError(
                f"a space of kind '{self.kind}' cannot have the labels {list(self.labels)}: a text "
                f"has none, the others at least one, each once."
            )

    def check(self, source: str, target: str) -> str:
        """Say what is wrong with a target, or ""."""
        answers = {"class": [target], "tags": target.split(), "text": []}[self.kind]
        if self.kind == "tags" and len(answers) != (words := len(source.split())):
            return f"{len(answers)} tags for {words} words"
        for answer in answers:
            if answer not in self.labels:
                known = ", ".join(self.labels[:20]) + (", ..." if len(self.labels) > 20 else "")
                return f"unknown label '{answer}'{nearest(answer, list(self.labels))} ({known})"
        return ""


@runtime_checkable
class StatesSpaces(Protocol):
    """What a dataset states if models with heads are to learn from it."""

    @property
    def spaces(self) -> Mapping[str, Space]:
        """The answers of each task."""
        ...


def spaces_of(dataset: FederatedDataset) -> dict[str, Space]:
    """Return the answers of each of a dataset's tasks, in the order of the tasks.

    Raises
    ------
    DataError
        If the dataset does not state them.
    """
    stated = dataset.spaces if isinstance(dataset, StatesSpaces) else {}
    if missing := [task for task in dataset.tasks if task not in stated]:
        raise DataError(
            f"a model with a head needs to know every answer of {', '.join(missing)}, and the "
            f"dataset does not state them: give it the property `spaces` (for files of your own: "
            f"labels.json beside them), or use task='text-to-text'."
        )
    return {task: stated[task] for task in dataset.tasks}


def checked(space: Space, example: Example) -> Example:
    """Return an example whose target its space has.

    Raises
    ------
    DataError
        Saying what is wrong with it.
    """
    if wrong := space.check(example.source, example.target):
        raise DataError(f"task '{example.task}': {wrong}.")
    return example
