"""What a run is made of, before it starts: model, regions, plan, personaliser."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from client_app.datasets.dataset import FederatedDataset, labels_of
from client_app.datasets.load import dataset_of
from client_app.task import task_of
from regionfed.config import Config
from regionfed.errors import ConfigurationError
from regionfed.personaliser import PERSONALISERS
from regionfed.privacy.plan import PrivacyPlan, plan_privacy
from regionfed.vector import Layout


@dataclass(frozen=True)
class Federation:
    """The public facts of a run; nothing here depends on anybody's examples.

    Attributes
    ----------
    regions : Mapping[int, str]
        Node id to region name.
    devices : Mapping[str, int]
        Region name to number of devices.
    layout : Layout
    theta : torch.Tensor
        Where the run starts, (p,).
    """

    regions: Mapping[int, str]
    devices: Mapping[str, int]
    tasks: tuple[str, ...]
    layout: Layout
    theta: torch.Tensor
    plan: PrivacyPlan


def prepare(config: Config) -> Federation:
    """Load the public model, name the regions, and plan the privacy of the whole run."""
    dataset, plan = plan_of(config)
    names = dataset.regions
    if len(names) < config.min_regions:
        raise ConfigurationError(
            f"the dataset has {len(names)} regions, min-regions asks for {config.min_regions}."
        )
    module = task_of(config).module
    layout = Layout.of(module)
    return Federation(
        regions={i + 1: name for i, name in enumerate(names)},
        devices={name: dataset.clients(name) for name in names},
        tasks=dataset.tasks,
        layout=layout,
        theta=layout.read(module),
        plan=plan,
    )


def plan_of(config: Config) -> tuple[FederatedDataset, PrivacyPlan]:
    """Return the dataset, for its public facts, and the noise that the whole run needs.

    World and regions find the same plan by themselves: it follows from settings that they share.
    """
    personaliser = PERSONALISERS.load(config.personaliser)(config)
    dataset = dataset_of(config)
    plan = plan_privacy(
        config,
        sketch=personaliser.measures_conflict and config.conflict == "sketch",
        votes=personaliser.searches_rho,
        anew=not personaliser.accumulates,
        queries=personaliser.queries,
        labels=len(labels_of(dataset)) if personaliser.compares_labels else 0,
    )
    return dataset, plan
