"""A user's own file: read whole, or refused with the line; split so that nothing leaks."""

import json
from pathlib import Path

import pytest

from client_app.datasets.dataset import Example
from client_app.datasets.local_file import keep_apart, read_examples
from regionfed.errors import DataError

TASKS = ("intent", "spelling")
GOOD = {"task": "intent", "source": "red robe", "target": "baby"}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_jsonl_and_csv_give_the_same_examples(tmp_path: Path) -> None:
    """Blank lines are passed over, further columns too; a line separator in a text is text."""
    rows = [GOOD, {"task": "spelling", "source": "rde\u2028rboe", "target": "red robe"}]
    jsonl = "\n\n".join(json.dumps({**row, "note": 1}, ensure_ascii=False) for row in rows)
    lines = [
        "source,task,note,target",
        *(f"{r['source']},{r['task']},1,{r['target']}" for r in rows),
    ]
    found = read_examples(write(tmp_path, "my.jsonl", jsonl), TASKS)
    assert found == read_examples(write(tmp_path, "my.CSV", "\n".join(lines) + "\n"), TASKS)
    assert [(e.task, e.source, e.target) for e in found] == [tuple(r.values()) for r in rows]
    assert len({e.group for e in found}) == 1  # what was mistyped is the same query


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3: not JSON"),
        ("[1]", "line 3: expected an object"),
        ('{"task": "intent", "source": "robe"}', "line 3: 'target' must be a text"),
        ('{"task": "intent", "source": "", "target": "x"}', "line 3: 'source' must be a text"),
        ('{"task": "intent", "source": 3, "target": "x"}', "found 3"),
        ('{"task": "intnt", "source": "a", "target": "x"}', "did you mean 'intent'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    """With what was expected there."""
    path = write(tmp_path, "my.jsonl", f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(DataError, match=said):
        read_examples(path, TASKS)


def test_a_bad_csv_is_named(tmp_path: Path) -> None:
    """A column that lacks, and a quote that never ends."""
    with pytest.raises(DataError, match="line 2: 'task' must be"):
        read_examples(write(tmp_path, "a.csv", "kind,source,target\nintent,a,b\n"), TASKS)
    with pytest.raises(DataError, match="not CSV"):
        read_examples(write(tmp_path, "b.csv", 'task,source,target\nintent,"a,b\n'), TASKS)


def test_no_file_and_no_line_are_errors(tmp_path: Path) -> None:
    """Missing, empty, or not text."""
    with pytest.raises(DataError, match="cannot read"):
        read_examples(tmp_path / "none.jsonl", TASKS)
    with pytest.raises(DataError, match="no example"):
        read_examples(write(tmp_path, "empty.jsonl", "\n"), TASKS)
    (tmp_path / "latin.jsonl").write_bytes(b'{"task": "caf\xe9"}')
    with pytest.raises(DataError, match="not UTF-8"):
        read_examples(tmp_path / "latin.jsonl", TASKS)


def examples_of(queries: int) -> list[Example]:
    return [
        Example(task, f"query {i}", "target", f"query {i}")
        for i in range(queries)
        for task in TASKS
    ]


@pytest.mark.parametrize("queries", [3, 10, 100])
def test_a_query_is_on_one_side_and_nothing_is_lost(queries: int) -> None:
    """However few there are, both sides have some; the same file is always split alike."""
    examples = examples_of(queries)
    data = keep_apart(examples, 0.2)
    assert sorted((*data.train, *data.test), key=repr) == sorted(examples, key=repr)
    assert not {e.group for e in data.train} & {e.group for e in data.test}
    assert len(data.train) >= 2 and data.test
    assert keep_apart(examples, 0.2) == data
    if queries == 100:
        assert 20 <= len(data.test) <= 60


@pytest.mark.parametrize("queries", [0, 1])
def test_too_few_queries_are_refused(queries: int) -> None:
    """Nothing would be left to learn from, or to judge by."""
    with pytest.raises(DataError, match="too few"):
        keep_apart(examples_of(queries), 0.2)
