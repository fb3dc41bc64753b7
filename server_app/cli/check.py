"""``regionfed check``: whether a ClientApp, or a Task, keeps the contract."""

import importlib
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr.clientapp import ClientApp
from flwr.common.config import parse_config_args

from client_app.conformance import Candidate, Finding, findings
from client_app.datasets.dataset import labels_of
from client_app.datasets.load import dataset_of
from client_app.task import task_of
from regionfed.config import Config
from regionfed.errors import ConfigurationError
from regionfed.vector import Layout
from server_app.cli.command import Command
from server_app.simulation import load_client_app

OURS = "client_app.app:app"


def configure(parser: ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("target", help="package.module:app, or package.module:make_task")
    parser.add_argument(
        "--run-config",
        action="append",
        default=[],
        metavar="'KEY=VALUE ...'",
        help="settings, as `flwr run` takes them: the dataset, the task, the model",
    )
    parser.add_argument("--region", help="the region of the device (default: the first)")
    parser.add_argument("--device", type=int, default=0, help="its number (default %(default)s)")


def run(options: Namespace) -> int:
    """Run the checks; the exit status is 1 if any failed."""
    # As `python -m` does: a package that is being written is mostly not installed.
    sys.path.insert(0, str(Path.cwd()))
    config = Config.from_run_config(parse_config_args(options.run_config))
    reference, config = _subject(options.target, config)
    with TemporaryDirectory(prefix="regionfed-check-") as folder:
        found = list(
            findings(candidate_of(reference, config, options.region, options.device, Path(folder)))
        )
    sys.stdout.write("".join(f"{line}\n" for line in told(options.target, found)))
    return int(any(finding.problem for finding in found))


def _subject(target: str, config: Config) -> tuple[str, Config]:
    """Return the ClientApp to check: the one named, or ours with the Task named."""
    module, colon, attribute = target.partition(":")
    if not colon:
        raise ConfigurationError(f"'{target}': write package.module:attribute.")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"'{target}' cannot be loaded: {error}. Run this where the package is, or install it."
        ) from error
    if isinstance(found, ClientApp):
        return target, config
    if not callable(found):
        raise ConfigurationError(
            f"'{target}' is a {type(found).__name__}: give a ClientApp, or a function that takes "
            f"the configuration and returns a Task."
        )
    return OURS, replace(config, task=target)


def candidate_of(
    reference: str, config: Config, region: str | None, device: int, folder: Path
) -> Candidate:
    """Return an app at one device, as a coordinator knows it."""
    # Private coins cannot be thrown twice alike; a check has nothing to hide, behind masks neither.
    config = replace(
        config, noise_seed=max(config.noise_seed, 0), device="cpu", secure_aggregation="off"
    )
    dataset = dataset_of(config)
    module = task_of(config).module
    layout = Layout.of(module)
    return Candidate(
        app=load_client_app(reference),
        config=config,
        layout=layout,
        point=layout.read(module),
        tasks=dataset.tasks,
        region=region or dataset.regions[0],
        index=device,
        folder=folder / "user",
        labels=len(labels_of(dataset)),
    )


def told(target: str, found: list[Finding]) -> list[str]:
    """Return the findings in lines for a person."""
    lines = []
    for finding in found:
        lines.append(f"{'FAILED' if finding.problem else 'ok':<7}{finding.name}")
        if finding.problem:
            lines += [f"       found: {finding.problem}", f"       mend:  {finding.remedy}"]
    failed = sum(bool(finding.problem) for finding in found)
    verdict = f"{failed} of {len(found)} checks failed" if failed else "keeps the contract"
    return [*lines, f"{target}: {verdict}"]


COMMAND = Command(
    "Check a ClientApp, or a Task for ours, against the contract: it is asked what a coordinator\n"
    "asks, its gradient is compared with its loss, its clipping and sampling are tried out, and\n"
    "devices with one example and none are tried. Each failure says how to mend it.\n\n"
    "  regionfed check --region UK my_app.client:app\n"
    "  regionfed check my_app.task:make_task --run-config 'dataset=\"retail\"'",
    configure,
    run,
)
