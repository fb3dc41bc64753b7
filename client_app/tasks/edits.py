"""A text as an edit of another: one label for each character, from a closed set of labels.

That makes correcting a query a labelling task: the source's characters are read, and each is kept,
deleted, replaced by another, or followed by one more. What is to stand before the first character
is said at a start position. With one label for each character not every target can be written
(two letters that lack side by side cannot): `edits` then returns None.
"""

import string
from collections.abc import Sequence
from functools import lru_cache

ALPHABET = string.ascii_lowercase + string.digits + " '-./&"
KEEP, DELETE = "keep", "delete"
LABELS = (KEEP, DELETE, *(f"={c}" for c in ALPHABET), *(f"+{c}" for c in ALPHABET))
"""``=c``: replaced by c; ``+c``: kept, and followed by c."""

_FAR = 10**6


@lru_cache(maxsize=65_536)
def edits(source: str, target: str) -> tuple[str, ...] | None:
    """Return the labels that make `target` of `source`, as few edits as there can be.

    Returns
    -------
    tuple of str or None
        One for the start and one for each character of the source; None if none will do.

    Examples
    --------
    >>> edits("rde", "red")
    ('keep', 'keep', '=e', '=d')
    """
    n, m = len(source), len(target)
    if m > 2 * n + 1:
        return None
    # cost[i][j]: fewest edits by which the first i characters, with the start, have become the
    # first j of the target; came[i][j]: the label that did it, and where it came from.
    cost = [[_FAR] * (m + 1) for _ in range(n + 1)]
    came: list[dict[int, tuple[str, int]]] = [{} for _ in range(n + 1)]

    def reach(i: int, j: int, value: int, label: str, before: int) -> None:
        if j <= m and value < cost[i][j]:
            cost[i][j] = value
            came[i][j] = (label, before)

    reach(0, 0, 0, KEEP, 0)
    if m and target[0] in ALPHABET:
        reach(0, 1, 1, f"+{target[0]}", 0)
    for i, char in enumerate(source, 1):
        for j in range(m + 1):
            value = cost[i - 1][j]
            if value >= _FAR:
                continue
            reach(i, j, value + 1, DELETE, j)
            if j == m:
                continue
            if target[j] == char:
                reach(i, j + 1, value, KEEP, j)
                if j + 1 < m and target[j + 1] in ALPHABET:
                    reach(i, j + 2, value + 1, f"+{target[j + 1]}", j)
            elif target[j] in ALPHABET:
                reach(i, j + 1, value + 1, f"={target[j]}", j)
    if cost[n][m] >= _FAR:
        return None
    labels, j = [], m
    for i in range(n, -1, -1):
        label, j = came[i][j]
        labels.append(label)
    return tuple(reversed(labels))


def edited(source: str, labels: Sequence[str]) -> str:
    """Return what the labels, one for the start and one for each character, make of a text.

    Characters without a label are kept.
    """
    out = []
    padded = [*labels, *[KEEP] * (len(source) + 1 - len(labels))]
    for char, label in zip(["", *source], padded, strict=False):
        kind, letter = label[0], label[1:]
        if kind == "=":
            out.append(letter if char else "")
        elif label != DELETE:
            out.append(char + (letter if kind == "+" else ""))
    return "".join(out)
