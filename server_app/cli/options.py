"""The options by which subcommands choose a model of a run."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from server_app.result import GLOBAL, RegionModel, RunResult


def add_model_options(parser: ArgumentParser, *, region_needed: bool = False) -> None:
    """Add ``--run``, ``--region``, ``--region-state`` and ``--unfinished``."""
    group = parser.add_argument_group("which model")
    group.add_argument(
        "--run", default="latest", help="a run's folder, its id, or 'latest' (the default)"
    )
    group.add_argument(
        "--region",
        default=GLOBAL,
        required=region_needed,
        help="the region whose model it is"
        + ("" if region_needed else "; 'global' (the default) is the model of all"),
    )
    group.add_argument(
        "--region-state",
        type=Path,
        metavar="FOLDER",
        help="the folder of the region's coordinator, where it is not below the run's "
        "(in a deployment a region keeps its own)",
    )
    group.add_argument(
        "--unfinished", action="store_true", help="take a run that has not finished as it is"
    )


def chosen_model(options: Namespace) -> tuple[RunResult, RegionModel]:
    """Open the run and the model that the options name."""
    result = RunResult.open(options.run, unfinished=options.unfinished)
    return result, result.model(options.region, options.region_state)
