"""What is logged: of which run, region and round, for people or for machines, and discreetly."""

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from regionfed.errors import ConfigurationError, DataError, RunError
from regionfed.logs import (
    FILE,
    FORM,
    JSON,
    TEXT,
    JsonFormatter,
    TextFormatter,
    configure,
    log_context,
)

log = logging.getLogger("region_app.somewhere")


def record_of(error: Exception | None = None) -> logging.LogRecord:
    caught = (type(error), error, error.__traceback__) if error else None
    return log.makeRecord(log.name, logging.WARNING, __file__, 1, "%d devices", (3,), caught)


def as_json(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_json_tells_when_who_and_of_what() -> None:
    with log_context(run="trial-1", region="UK", round=3):
        said = as_json(record_of())
    assert datetime.fromisoformat(said.pop("time")).tzinfo is not None
    assert said == {
        "level": "WARNING",
        "logger": "region_app.somewhere",
        "message": "3 devices",
        "run": "trial-1",
        "region": "UK",
        "round": 3,
    }


def test_a_context_within_another_adds_to_it_and_ends() -> None:
    """Empty texts say nothing, and round 0 is a round."""
    with log_context(run="trial-1", region=""):
        with log_context(region="UK", round=0):
            assert as_json(record_of()).items() >= {"run": "trial-1", "round": 0}.items()
        assert not {"region", "round"} & set(as_json(record_of()))
    assert "run" not in as_json(record_of())


def test_text_says_the_same_to_people() -> None:
    with log_context(region="UK", round=3):
        line = TextFormatter().format(record_of(raised(ValueError("red shoes"))))
    first, *rest = line.splitlines()
    assert first.endswith("WARNING region_app.somewhere [region=UK round=3]: 3 devices")
    assert rest[-1] == "ValueError: red shoes"  # this log stays where it is


@pytest.mark.parametrize("error", [ValueError("red shoes"), DataError("line 3: 'red shoes'")])
def test_json_tells_no_text_that_may_quote_data(error: Exception) -> None:
    """JSON is made to be carried elsewhere: type and place have to do."""
    line = JsonFormatter().format(record_of(raised(error)))
    told = json.loads(line)["error"]
    assert "red shoes" not in line and told["type"] == type(error).__name__ and "text" not in told
    assert told["at"][-1].endswith(" raised") and "test_logs.py" in told["at"][-1]


def test_json_tells_the_text_of_an_error_that_is_written_for_others() -> None:
    told = as_json(record_of(raised(RunError("2 of 3 joined"))))["error"]
    assert told["text"] == "2 of 3 joined"


def test_unless_it_is_asked_for_nothing_changes() -> None:
    before = logging.getLogger().handlers[:]
    assert configure(environment={}) == ""
    assert logging.getLogger().handlers == before
    assert logging.getLogger("region_app").level == logging.NOTSET


def test_lines_go_to_standard_error_and_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours and Flower's from INFO on, others' from WARNING on; once, however often configured."""
    path = tmp_path / "log.jsonl"
    for _ in range(2):
        assert configure(environment={FORM: JSON, FILE: str(path)}) == JSON
    log.info("told")
    log.debug("not told")
    logging.getLogger("flwr").info("")
    logging.getLogger("flwr").info("Flower's")
    logging.getLogger("somebody").info("not told")
    logging.getLogger("somebody").warning("another's")
    lines = path.read_text().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["told", "Flower's", "another's"]
    assert capsys.readouterr().err.splitlines()[-1] == lines[-1]


def test_the_environment_goes_before_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    """In text Flower speaks for itself: it would say it twice."""
    assert configure(TEXT, environment={}) == TEXT
    log.info("told")
    logging.getLogger("flwr").warning("Flower's")
    said = [line for line in capsys.readouterr().err.splitlines() if "region_app" in line]
    assert len(said) == 1 and said[0].endswith("INFO    region_app.somewhere: told")
    assert configure(TEXT, environment={FORM: JSON}) == JSON


def test_a_form_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"REGIONFED_LOG='jsn'; did you mean 'json'\?"):
        configure(environment={FORM: "jsn"})
