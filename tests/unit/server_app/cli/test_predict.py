"""How queries are read and answers written."""

import io
import json
from pathlib import Path

import pytest

from regionfed.errors import DataError
from server_app.cli.predict import read_queries, written
from server_app.wording import width


class Terminal(io.StringIO):
    """A standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


def test_typed_queries_and_a_file_add_up(tmp_path: Path) -> None:
    """Blank lines are none; the pipe is left alone."""
    file = tmp_path / "queries.txt"
    file.write_text("\ufeffrobe\n\n  gown \n", encoding="utf-8")
    assert read_queries(["kilt"], file, io.StringIO("unread")) == ["kilt", "robe", "gown"]
    assert read_queries([], None, io.StringIO("scarf\n\n")) == ["scarf"]


@pytest.mark.parametrize("stream", [Terminal("ignored"), io.StringIO(" \n")])
def test_no_query_is_an_error_with_an_example(stream: io.StringIO) -> None:
    """And nobody is left waiting at a terminal."""
    with pytest.raises(DataError, match="no query: type one"):
        read_queries([], None, stream)


ROWS = [
    {"query": "red robe", "intent": "baby", "entities": "color product"},
    {"query": "赤いローブ xl", "intent": "sports", "entities": "other size"},
    {"query": "of", "intent": "toys", "entities": "other"},
    {"query": "two words", "intent": "toys", "entities": "color"},
]


def test_a_table_shows_what_each_word_is() -> None:
    """Types stand beside their words; an answer that does not fit is shown as it is."""
    head, *lines = written(ROWS, as_json=False)
    assert head.split() == ["query", "intent", "entities"]
    assert lines[0].split() == ["red", "robe", "baby", "red=color", "robe=product"]
    assert lines[1].endswith("xl=size") and lines[2].endswith("none")
    assert lines[3].endswith("  color")
    column = {width(line[: line.index(r["intent"])]) for line, r in zip(lines, ROWS, strict=True)}
    assert len(column) == 1


def test_json_has_the_answers_as_they_are() -> None:
    """An object a line."""
    assert [json.loads(line) for line in written(ROWS, as_json=True)] == ROWS
