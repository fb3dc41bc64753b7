"""``regionfed new``: a project with a Task of one's own that runs, with tests."""

import json
import keyword
import re
import sys
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path

from regionfed.config import Config, Value
from regionfed.errors import ConfigurationError
from server_app.cli import template
from server_app.cli.command import Command
from server_app.cli.export import refuse_to_overwrite

NAME = "my_app"
# Flower and pip take names of other letters for something else, or not at all.
_NAME = re.compile(r"[a-z][a-z0-9_]*")
# A word, what it is, and where it is something else: a reason to personalise.
_GOODS = {
    "clothing": ("coat", "shirt", "scarf", "socks", "hat", "jeans"),
    "grocery": ("tea", "rice", "milk", "bread", "jam", "salt"),
    "baby": ("pram", "bib", "rattle", "crib", "bottle", "blanket"),
}
_LOCAL = {"UK": {"jumper": "clothing", "biscuit": "grocery"}, "US": {"jumper": "baby"}}
# So many that a region is larger than the noise on its size, and something of each is held out.
_ADJECTIVES = (
    *("red", "small", "cheap", "new", "blue", "large", "good", "old"),
    *("green", "soft", "best", "used", "black", "light", "plain", "local"),
)
_CLIENTS = 3


def configure(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("name", help="a name as Python has them: my_app")
    parser.add_argument("--out", type=Path, help="the folder to write (default: the name)")
    parser.add_argument("--force", action="store_true", help="write into a folder that has files")


def run(options: Namespace) -> int:
    """Write the project and say what to type."""
    folder: Path = (options.out or Path(options.name)).expanduser().absolute()
    write_project(options.name, folder, force=options.force)
    sys.stdout.write(
        f"{folder}\n\n"
        f"  cd {folder}\n"
        f"  pip install -e .\n"
        f"  regionfed check {options.name}.client:app --run-config settings.toml\n"
        f"  python -m pytest\n"
        f"  flwr run . --stream\n"
    )
    return 0


def write_project(name: str, folder: Path, *, force: bool = False) -> None:
    """Write a project into a folder.

    Raises
    ------
    ConfigurationError
        If the name is none that a Python package can have, or another package has it.
    RunError
        If the folder has files, unless told to write into it.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigurationError(
            f"'{name}' cannot be a package's name: use small letters of English, digits and "
            f"underscores, a letter first."
        )
    if taken := _elsewhere(name, folder):
        raise ConfigurationError(
            f"'{name}' is the name of a package that is there already ({taken}): one would hide "
            f"the other. Choose another name."
        )
    refuse_to_overwrite(folder, force)
    for path, text in files(name, folder).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def _elsewhere(name: str, folder: Path) -> str:
    """Return where a module of that name lies, if not in this very project."""
    found = find_spec(name)
    places = [*(found.submodule_search_locations or ()), found.origin] if found else []
    return next((p for p in places if p and not Path(p).is_relative_to(folder)), "")


def files(name: str, folder: Path) -> dict[str, str]:
    """Return the files of a project that is to lie in `folder`, by path."""
    changed = settings_of(name, folder)
    every = Config.from_run_config(changed).to_run_config()
    in_python = json.dumps(changed, indent=4, ensure_ascii=False)
    bundles = {"world": "region_app.app:app", "region": f"{name}.client:app"}
    return {
        f"{tier}/pyproject.toml": _named(template.BUNDLE, name)
        .replace("{TIER}", tier)
        .replace("{CLIENT}", client)
        .replace("{SETTINGS}", _toml(every))
        for tier, client in bundles.items()
    } | {
        "README.md": _named(template.README, name),
        "pyproject.toml": _named(template.PYPROJECT, name).replace("{SETTINGS}", _toml(every)),
        "settings.toml": _toml(changed) + "\n",
        f"{name}/__init__.py": '"""A project of RegionFed."""\n',
        f"{name}/task.py": _named(template.TASK, name),
        f"{name}/client.py": _named(template.CLIENT, name),
        "tests/test_task.py": _named(template.TEST, name).replace("{SETTINGS}", in_python),
        ".gitignore": "runs/\n__pycache__/\n",
        "data/queries.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows()),
        "data/labels.json": json.dumps({"department": list(_GOODS)}) + "\n",
    }


def _named(text: str, name: str) -> str:
    return text.replace(NAME, name).replace(NAME.replace("_", "-"), name.replace("_", "-"))


def settings_of(name: str, folder: Path) -> dict[str, Value]:
    """Return the settings of a new project that are not the defaults."""
    return {
        "dataset": "files",
        "data-path": str(folder / "data"),
        "task": f"{name}.task:make_task",
        "client-app": f"{name}.client:app",
        "model": "words",
        "trainable": "",
        "run-dir": str(folder / "runs"),
        "rounds": 10,
        "server-lr": 2.0,
        "residual-step": 0.5,
        "target-epsilon": 8.0,
        "sampling-rate": 0.5,
        "evaluation-privacy": "panel",
        "noise-limit": 10.0,
        "user-steps": 4,
    }


def rows() -> list[dict[str, str]]:
    """Return queries of two regions that disagree about a word."""
    out = []
    for region, local in _LOCAL.items():
        words = {word: label for label, goods in _GOODS.items() for word in goods} | local
        texts = [(f"{adj} {word}", label) for word, label in words.items() for adj in _ADJECTIVES]
        for number, (text, label) in enumerate(texts):
            out.append(
                {
                    "task": "department",
                    "region": region,
                    "client": f"{region}-{number % _CLIENTS}",
                    "source": text,
                    "target": label,
                }
            )
    return out


def _toml(settings: dict[str, Value]) -> str:
    # JSON's texts, numbers and truth values are TOML's too.
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


COMMAND = Command(
    "Make a project: a Task of your own in about forty lines, a ClientApp, data of two regions,\n"
    "tests. It trains as it is; put your model and your data in the place of its own.\n\n"
    "  regionfed new my_app\n"
    "  regionfed new --out somewhere/else my_app",
    configure,
    run,
)
