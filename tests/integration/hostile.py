"""RegionFed's ClientApp on a device that was taken over: it answers each round with other nonsense.

Device 1 of UK misbehaves, the others do not; a process of its own each, as any ClientApp has.
"""

from collections.abc import Callable, Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from client_app.app import make_app
from regionfed.vector import to_arrays

CULPRIT = ("UK", 1)
HUGE = 8_000_000  # numbers in the place of seventeen


def not_a_number(records: RecordDict) -> RecordDict:
    """Keep everything but the gradient's values."""
    return _with_total(records, torch.full((17,), float("nan")))


def wrong_shape(records: RecordDict) -> RecordDict:
    """Send three numbers."""
    return _with_total(records, torch.ones(3))


def huge(records: RecordDict) -> RecordDict:
    """Send more than the model has."""
    return _with_total(records, torch.ones(HUGE))


def another_run(records: RecordDict) -> RecordDict:
    """Send what a device says when it was asked something else."""
    del records
    return RecordDict({"config": ConfigRecord({"contract.version": 1, "run": "another"})})


NONSENSE: Mapping[int, Callable[[RecordDict], RecordDict]] = {
    1: not_a_number,
    2: wrong_shape,
    3: huge,
    4: another_run,
}


def _with_total(records: RecordDict, total: torch.Tensor) -> RecordDict:
    arrays = dict(records["arrays"])  # type: ignore[arg-type]
    return RecordDict(
        {
            "arrays": ArrayRecord(arrays | to_arrays("total", total)),
            "metrics": MetricRecord(dict(records["metrics"])),  # type: ignore[arg-type]
            "config": ConfigRecord(dict(records["config"])),  # type: ignore[arg-type]
        }
    )


def taken_over(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer as asked, and change the gradient on its way out."""
    config = context.node_config
    reply = call_next(message, context)
    asked = message.metadata.message_type.endswith("gradient")
    if (config["region"], config["partition-id"]) != CULPRIT or not asked:
        return reply
    round_ = int(message.content["config"]["round"])  # type: ignore[index, arg-type]
    return Message(NONSENSE[round_](reply.content), reply_to=message)


app = make_app([taken_over])
