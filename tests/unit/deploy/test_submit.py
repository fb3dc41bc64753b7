"""Enrolling and submitting by Flower's command, whose exit status says nothing."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deploy import submit

Answer = dict[str, Any]


class Flower:
    """Stands in for the command: answers by what it is asked, in turn."""

    def __init__(self, **answers: list[Answer]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *arguments: str) -> Answer:
        self.asked.append(arguments)
        left = self.answers[arguments[0]]
        return left.pop(0) if len(left) > 1 else left[0]


def run_of(status: str) -> Answer:
    return {"success": True, "runs": [{"status": status, "status-details": ""}]}


OK: Answer = {"success": True, "run-id": "7"}
DOWN: Answer = {"success": False, "error-message": "Connection to the SuperLink is unavailable"}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit.time, "sleep", lambda _: None)


def flower(monkeypatch: pytest.MonkeyPatch, **answers: list[Answer]) -> Flower:
    stand_in = Flower(**answers)
    monkeypatch.setattr(submit, "flwr", stand_in)
    return stand_in


def test_a_failed_run_is_submitted_again_and_a_stopped_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A coordinator's run comes back by itself."""
    ends = [run_of("running"), run_of("finished:failed"), run_of("finished:stopped")]
    found = flower(monkeypatch, run=[OK], ls=ends)
    submit.keep("deploy/region", "settings.toml")
    assert [asked[0] for asked in found.asked] == ["run", "ls", "ls", "run", "ls"]
    assert found.asked[0] == ("run", "deploy/region", "it", "--run-config", "settings.toml")


def test_a_superlink_that_starts_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = flower(monkeypatch, run=[DOWN, DOWN, OK])
    assert submit.submit("deploy/world", "s.toml") == "7" and len(found.asked) == 3


def test_a_run_that_is_not_accepted_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = {"success": False, "error-message": "no such key: ronuds"}
    flower(monkeypatch, run=[refusal])
    with pytest.raises(SystemExit, match="no such key: ronuds"):
        submit.submit("deploy/world", "s.toml")


def test_enrolling_twice_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container that is started again enrols again."""
    known = {"success": False, "error-message": "Public key already in use"}
    flower(monkeypatch, supernode=[OK, known])
    submit.enrol(["/keys/UK.pub", "/keys/US.pub"])
    assert capsys.readouterr().out == "UK: enrolled\nUS: known\n"
    flower(monkeypatch, supernode=[{"success": False, "error-message": "not an EC key"}])
    with pytest.raises(SystemExit):
        submit.enrol(["/keys/UK.pub"])


@pytest.mark.parametrize("said", ["", "Traceback (most recent call last)", "{"])
def test_words_that_are_no_json_are_a_failure(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "flwr"
    fake.write_text(f"#!/bin/sh\necho '{said}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert submit.flwr("ls")["success"] is False


def test_json_after_other_words_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "flwr"
    fake.write_text(f"#!/bin/sh\necho 'Note: hello'\necho '{json.dumps(OK)}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert submit.flwr("run") == OK


def test_the_connection_is_what_flower_reads(tmp_path: Path, monkeypatch: Any) -> None:
    from flwr.cli.flower_config import read_superlink_connection

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    submit.write_connection(tmp_path, "superlink-us:8000", "/keys/ca.crt")
    found = read_superlink_connection()
    assert (found.name, found.address) == ("it", "superlink-us:8000")
    assert found.root_certificates == "/keys/ca.crt"


def test_a_run_s_end_is_seen_when_its_log_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at the run costs less than a second's work, so that looks are few."""
    found = flower(monkeypatch, run=[OK], ls=[run_of("running"), run_of("finished:completed")])

    class Log:
        waited: ClassVar[list[float]] = []

        def __init__(self, command: list[str]) -> None:
            assert command == ["flwr", "log", "7", "it", "--stream"]

        def __enter__(self) -> "Log":
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def poll(self) -> int | None:
            return 0 if self.waited else None

        def wait(self, seconds: float) -> int:
            self.waited.append(seconds)
            return 0

        def terminate(self) -> None:
            return None

    monkeypatch.setattr(submit.subprocess, "Popen", Log)
    assert submit.run_once("deploy/world", "s.toml") == 0
    assert Log.waited == [submit.POLL] and [a[0] for a in found.asked] == ["run", "ls", "ls"]
