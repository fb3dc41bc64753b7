"""The door of the command: help everywhere, nothing imported in vain, groups of commands."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from server_app.cli.command import Command
from server_app.cli.main import CATALOGUE, COMMANDS, Entry, build_parser, main

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each loads, describes itself, and shows what to type."""
    assert isinstance(COMMANDS.load(name), Command)
    assert main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert f"  regionfed {name} --" in said


def test_the_list_of_commands_needs_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` names all and imports neither PyTorch nor transformers."""
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in CATALOGUE)
    assert all(entry.help in said for name, entry in CATALOGUE.items() if " " not in name)
    code = (
        "import sys; from server_app.cli.main import main; main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_mistyped_command_names_its_nearest_match(capsys: pytest.CaptureFixture[str]) -> None:
    """And all that there are; the exit status is that of misuse."""
    assert main(["exprot"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'export'" in said and "adapt" in said


def test_nothing_typed_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    """It says that a command is needed."""
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_command_may_be_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    """A later `privacy plan` is one file and one line here."""
    catalogue = {
        **CATALOGUE,
        "privacy plan": Entry("server_app.cli.export:COMMAND", "plan the noise"),
        "privacy attack": Entry("server_app.cli.predict:COMMAND", "attack it"),
    }
    given = ["privacy", "plan", "--out", "folder"]
    options = build_parser(given, catalogue).parse_args(given)
    assert options.command is COMMANDS.load("server_app.cli.export:COMMAND")
    assert str(options.out) == "folder"
    with pytest.raises(SystemExit):
        build_parser(["privacy", "--help"], catalogue).parse_args(["privacy", "--help"])
    said = capsys.readouterr().out
    assert "plan the noise" in said and "attack it" in said


def test_it_is_installed_under_its_name() -> None:
    """`regionfed` after installation is this."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"] == {"regionfed": "server_app.cli.main:main"}


def test_an_unreadable_number_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded: the option, what was found and what is allowed."""
    given = ["adapt", "--region", "UK", "--data", "x", "--out", "y"]
    for option, value in (("--steps", "0"), ("--steps", "2.5"), ("--lr", "nan"), ("--keep", "1")):
        assert main([*given, option, value]) == 2
        said = capsys.readouterr().err
        assert f"argument {option}: '{value}': expected a number from" in said
