"""The files of a new project; ``my_app`` stands for its name."""

TASK = '''\
"""Which label a text has, by its words alone: a Task, the whole of it."""

import zlib

import torch
from torch import nn
from torch.func import functional_call

from client_app.datasets.load import dataset_of
from client_app.datasets.spaces import spaces_of

BUCKETS = 512


class Words:
    """A linear model on counts of words."""

    def __init__(self, labels):
        self.labels = labels
        self.module = nn.Linear(BUCKETS, len(labels))
        for parameter in self.module.parameters():
            nn.init.zeros_(parameter)  # every device starts alike

    def encode(self, examples):
        """Return a batch: tensors with a row for each example."""
        counts = torch.zeros(len(examples), BUCKETS)
        for row, example in enumerate(examples):
            for word in example.source.lower().split():
                counts[row, zlib.crc32(word.encode()) % BUCKETS] += 1.0
        labels = [self.labels.index(example.target) for example in examples]
        return {"counts": counts, "labels": torch.tensor(labels)}

    def losses(self, weights, batch):
        """Return each example's own loss at these weights, not at the module's."""
        logits = functional_call(self.module, dict(weights), (batch["counts"],))
        return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")

    def scores(self, weights, examples):
        """Return 1 for each right label, else 0."""
        batch = self.encode(examples)
        logits = functional_call(self.module, dict(weights), (batch["counts"],))
        return (logits.argmax(1) == batch["labels"]).float().tolist()


def make_task(config):
    """Return the task; the run configuration names this function."""
    space, *_ = spaces_of(dataset_of(config)).values()
    return Words(space.labels)
'''

CLIENT = '''\
"""The ClientApp: RegionFed's, with a mod; what it learns is the Task that the settings name."""

import logging

from client_app.app import make_app

log = logging.getLogger(__name__)


def told(message, context, call_next):
    """Log what was asked; a mod may look at messages, not add to replies."""
    log.info("%s", message.metadata.message_type)
    return call_next(message, context)


app = make_app([told])
'''

TEST = '''\
"""The Task is sound, alone and in a federation."""

from pathlib import Path

from regionfed.config import Config
from server_app.cli.check import candidate_of
from client_app.conformance import findings
from server_app.run import execute

SETTINGS = {SETTINGS}


def test_the_client_app_keeps_the_contract(tmp_path):
    config = Config.from_run_config(SETTINGS)
    candidate = candidate_of("my_app.client:app", config, None, 0, tmp_path)
    assert not [f for f in findings(candidate) if f.problem]


def test_a_federation_of_it_finishes(tmp_path):
    settings = {**SETTINGS, "rounds": 2, "workers": 1, "run-dir": str(tmp_path)}
    assert execute(Config.from_run_config(settings)).status == "finished"
'''

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "my-app"
version = "0.1.0"
description = "A RegionFed project: a Task of its own."
requires-python = ">=3.11"
dependencies = ["regionfed"]

[tool.hatch.build.targets.wheel]
packages = ["my_app"]

[tool.pytest.ini_options]
testpaths = ["tests"]
pythonpath = ["."]

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "server_app.app:app"
clientapp = "my_app.client:app"

# Every setting, so that `flwr run . --run-config 'rounds=5'` can change it. What each means:
# regionfed/config.py.
[tool.flwr.app.config]
{SETTINGS}
"""

BUNDLE = """\
# The {TIER}'s run in a deployment: `flwr run {TIER} CONNECTION --run-config settings.toml`, with
# one settings file for world and regions. my_app has to be installed where it runs.
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "my-app-{TIER}"
version = "0.1.0"
dependencies = []

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "server_app.{TIER}:app"
clientapp = "{CLIENT}"

[tool.flwr.app.config]
{SETTINGS}
"""

README = """\
# my_app

A RegionFed project. `my_app/task.py` is what you write: model, data, loss, scores.

    pip install -e .                      # into the environment that has regionfed
    regionfed check my_app.client:app --run-config settings.toml
    python -m pytest
    flwr run . --stream

Put your own data into `data/` (the columns: source, target, region, client) and its labels into
`data/labels.json`. `data-path` in `pyproject.toml` and `settings.toml` is an absolute path: Flower
runs an app in a folder of its own. `settings.toml` has the settings that differ from the defaults.

On machines of their own, with my_app installed on each (RegionFed's docs/deployment.md):

    flwr run region CONNECTION --run-config settings.toml    # to each region's SuperLink
    flwr run world CONNECTION --run-config settings.toml     # then to the world's

with a `run-name` in `settings.toml`, and a `data-path` that holds on all of them.
"""
