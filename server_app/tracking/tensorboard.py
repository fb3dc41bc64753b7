"""Tracks a run for TensorBoard: ``tensorboard --logdir runs``."""

from collections.abc import Sequence
from pathlib import Path

from regionfed.config import Config
from regionfed.records import RoundRecord, Summary
from server_app.tracking.measures import measures_of
from server_app.tracking.tracker import EPSILON, extra, facts_of

with extra("tensorboard"):
    from torch.utils.tensorboard import SummaryWriter

NAME = "tensorboard"


class TensorBoard:
    """Writes events below ``tensorboard`` in the run's folder; a step is a round."""

    def __init__(self, folder: Path, config: Config, earlier: Sequence[RoundRecord]) -> None:
        # What was tracked of rounds that are done again is passed over by who reads it.
        anew = earlier[-1].round + 1 if earlier else None
        self._writer = SummaryWriter(str(folder / NAME), purge_step=anew)
        if not earlier:
            self._writer.add_text(EPSILON, str(facts_of(config)[EPSILON]))

    def round(self, record: RoundRecord) -> None:
        """Write a round's numbers; they are there to read when this returns."""
        for measure in measures_of(record):
            self._writer.add_scalar(measure.tag, measure.value, record.round)
        self._writer.flush()

    def close(self, summary: Summary) -> None:
        """Close the file."""
        del summary
        self._writer.close()
