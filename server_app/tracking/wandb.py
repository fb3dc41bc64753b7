"""Tracks a run for Weights & Biases: offline, unless ``WANDB_MODE`` says otherwise.

``wandb sync runs/latest/wandb/offline-run-*`` uploads it, if that is what you want.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from regionfed.config import Config
from regionfed.records import RoundRecord, Summary
from server_app.tracking.measures import measures_of
from server_app.tracking.tracker import extra, facts_of

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when it is imported

with extra("wandb"):
    import wandb

_PROJECT = "regionfed"


class Wandb:
    """Keeps a run below ``wandb`` in the run's folder; a step is a round.

    A run that is resumed is a second folder there, of the same id.
    """

    def __init__(self, folder: Path, config: Config, earlier: Sequence[RoundRecord]) -> None:
        self._run = wandb.init(
            project=_PROJECT,
            id=folder.name,
            name=folder.name,
            dir=str(folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow" if earlier else None,
            config=facts_of(config),
            # It shall know of a run what a round's record holds, and nothing of this machine.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
            ),
        )

    def round(self, record: RoundRecord) -> None:
        """Log a round's numbers together."""
        numbers = {measure.tag: measure.value for measure in measures_of(record)}
        self._run.log(numbers, step=record.round)

    def close(self, summary: Summary) -> None:
        """Say whether the run ended well, and write what is not written yet."""
        self._run.finish(exit_code=0 if summary.status == "finished" else 1)
