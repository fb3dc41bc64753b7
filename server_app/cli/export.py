"""``regionfed export``: a region's model as a Hugging Face folder that needs no RegionFed."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from client_app.task import Saves
from regionfed.errors import ConfigurationError, RunError
from server_app.cli.command import Command
from server_app.cli.options import add_model_options, chosen_model
from server_app.model_card import card_facts, model_card
from server_app.result import RegionModel, RunResult
from server_app.run_folder import write_json_atomic, write_text_atomic

CARD, FACTS = "README.md", "regionfed.json"


def configure(parser: ArgumentParser) -> None:
    """Add the options."""
    add_model_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--force", action="store_true", help="write into a folder that has files")


def run(options: Namespace) -> int:
    """Write the folder and say where it is."""
    out: Path = options.out.expanduser().absolute()
    refuse_to_overwrite(out, options.force)
    result, model = chosen_model(options)
    write_folder(result, model, out)
    sys.stdout.write(f"{model.name}: {out}\n")
    return 0


def write_folder(result: RunResult, model: RegionModel, out: Path) -> None:
    """Write weights, tokenizer, page and facts; a failure on the way leaves `out` as it was.

    Raises
    ------
    ConfigurationError
        If the run's task cannot save its model.
    """
    task, layout = result.load_task()
    if not isinstance(task, Saves):
        raise ConfigurationError(
            f"task '{result.config.task}' cannot save its model: give it the methods of "
            f"client_app.task.Saves (save, usage)."
        )
    facts = card_facts(result, model)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made:
        folder = Path(made)
        task.save(layout.tensors(model.point), folder)
        write_json_atomic(folder / FACTS, facts)
        usages = {name: task.usage(name) for name in result.tasks}
        write_text_atomic(folder / CARD, model_card(facts, usages))
        out.mkdir(exist_ok=True)
        for file in folder.iterdir():
            file.replace(out / file.name)


def refuse_to_overwrite(out: Path, force: bool) -> None:
    """Refuse a path that is a file, or a folder with files, unless told to write into that.

    Raises
    ------
    RunError
        Saying so.
    """
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file: choose another --out.")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise RunError(f"{out} has files: choose another --out, or write into it with --force.")


COMMAND = Command(
    "Write the model of a region, theta + alpha_r theta_r, or of the world as a Hugging Face\n"
    "folder: transformers loads it without RegionFed. README.md in it says what protects whom,\n"
    "how good it is, and how to load it.\n\n"
    "  regionfed export --run runs/latest --region UK --out models/uk",
    configure,
    run,
)
