"""What the Grids of this machine have in common: they need no SuperLink."""

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from regionfed.flower import ensure_identity


class LocalGrid(Grid):
    """A Grid of one run, outside of Flower's processes."""

    def __init__(self, run_id: int) -> None:
        ensure_identity(run_id)
        self._run = Run.create_empty(run_id)

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)
