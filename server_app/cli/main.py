"""The door to ``regionfed``: finds the subcommand, and tells errors in a line."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regionfed import __version__
from regionfed.errors import RegionFedError
from regionfed.registry import Registry, nearest
from server_app.cli.command import Command

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class Entry:
    """A subcommand in the list: where it is, and what it does in a line.

    The line stands here and not with the command, so that ``--help`` imports none of them.
    """

    target: str
    help: str


CATALOGUE: Mapping[str, Entry] = {
    "status": Entry(
        "server_app.cli.status:COMMAND", "how a run stands: regions, epsilon, failures"
    ),
    "export": Entry(
        "server_app.cli.export:COMMAND", "write a region's model as a Hugging Face folder"
    ),
    "predict": Entry("server_app.cli.predict:COMMAND", "answer queries with a region's model"),
    "adapt": Entry("server_app.cli.adapt:COMMAND", "make a user's own model from a local file"),
    "check": Entry("server_app.cli.check:COMMAND", "does your ClientApp keep the contract?"),
    "new": Entry("server_app.cli.new:COMMAND", "make a project with a Task of your own"),
    "privacy audit": Entry(
        "server_app.cli.privacy_audit:COMMAND", "what a run has released, and what it adds up to"
    ),
    "privacy plan": Entry(
        "server_app.cli.privacy_plan:COMMAND", "epsilon, noise, rounds: give two, get the third"
    ),
}
"""By name. A name of several words (``"privacy plan"``) is a command in a group."""

COMMANDS: Registry[Command] = Registry(
    "command", {name: entry.target for name, entry in CATALOGUE.items()}
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return the exit status: 0 done, 1 failed, 2 misused, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = build_parser(given).parse_args(given)
    except SystemExit as ended:  # argparse has said what it is about
        return ended.code if isinstance(ended.code, int) else MISUSED
    command: Command = options.command
    try:
        return command.run(options)
    except RegionFedError as error:
        sys.stderr.write(f"regionfed: {error}\n")
        return FAILED
    except BrokenPipeError:
        # Whoever read has read enough; Python must not fail once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser(
    given: Sequence[str], catalogue: Mapping[str, Entry] = CATALOGUE
) -> argparse.ArgumentParser:
    """Return the parser of all subcommands; only the one that is asked for is imported."""
    parser = argparse.ArgumentParser(
        prog="regionfed",
        description="Use the result of a RegionFed run, plan one, or plug your own model in.",
        epilog="`regionfed COMMAND --help` tells more.",
    )
    parser.add_argument("--version", action="version", version=f"regionfed {__version__}")
    top = parser.add_subparsers(metavar="COMMAND", required=True)
    groups: dict[tuple[str, ...], argparse._SubParsersAction[argparse.ArgumentParser]] = {(): top}
    asked = _asked(given, catalogue)
    for name, entry in catalogue.items():
        *path, word = name.split()
        for depth in range(len(path)):
            prefix = tuple(path[: depth + 1])
            if prefix not in groups:
                about = f"commands: {', '.join(n for n in catalogue if n.split()[0] == path[0])}"
                group = groups[prefix[:-1]].add_parser(prefix[-1], help=about, description=about)
                groups[prefix] = group.add_subparsers(metavar="COMMAND", required=True)
        subparser = groups[tuple(path)].add_parser(
            word, help=entry.help, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == asked:
            command = COMMANDS.load(entry.target)
            subparser.description = command.description
            command.configure(subparser)
            subparser.set_defaults(command=command)
    if given and not given[0].startswith("-"):
        _check_first_word(parser, given[0], catalogue)
    return parser


def _asked(given: Sequence[str], catalogue: Mapping[str, Entry]) -> str:
    """Return the name that the arguments begin with, or ""."""
    for name in catalogue:
        words = name.split()
        if list(given[: len(words)]) == words:
            return name
    return ""


def _check_first_word(
    parser: argparse.ArgumentParser, word: str, catalogue: Mapping[str, Entry]
) -> None:
    words = list(dict.fromkeys(name.split()[0] for name in catalogue))
    if word not in words:
        parser.error(f"no command '{word}'{nearest(word, words)} There are: {', '.join(words)}.")


if __name__ == "__main__":
    sys.exit(main())
