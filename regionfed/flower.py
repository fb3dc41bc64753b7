"""The few places where Flower has to be told something that its public API does not offer."""

import re
import uuid
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from regionfed.errors import ContractError


def ensure_identity(run_id: int) -> None:
    """Let this process build Messages: Flower sets a process's identity only in its own.

    Does nothing where Flower has set it (a ServerApp or ClientApp process).
    """
    try:
        _ = TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 0, run_id, 0


def own_copy(records: RecordDict) -> RecordDict:
    """Return records for one receiver.

    Arrays are immutable bytes and can be shared; the records that hold them cannot, or one
    receiver's change would reach another.
    """
    copies: dict[str, Any] = {}
    for key, record in records.items():
        kind: Any = type(record)
        if kind not in (ArrayRecord, ConfigRecord, MetricRecord):
            raise ContractError(f"record '{key}' is a {kind.__name__}.")
        copies[key] = kind(
            {name: list(v) if isinstance(v, list) else v for name, v in record.items()}
        )
    return RecordDict(copies)


def delivered(message: Message) -> Message:
    """Return a message as its receiver gets it: with an id, and records of its own."""
    old = message.metadata
    metadata = Metadata(
        run_id=old.run_id,
        message_id=uuid.uuid4().hex,
        src_node_id=old.src_node_id,
        dst_node_id=old.dst_node_id,
        reply_to_message_id="",
        group_id=old.group_id,
        created_at=old.created_at,
        ttl=old.ttl,
        message_type=old.message_type,
    )
    build: Any = Message  # the constructor that takes metadata is not in its typed signature
    made: Message = build(content=own_copy(message.content), metadata=metadata)
    return made


def reason_of(message: Message) -> str:
    """Return why a message is an error: an exception's own words, without Flower's wrapping."""
    reason = message.error.reason or "error without a reason"
    wrapped = re.fullmatch(r"<class '[\w.]+'>:<'(.*)'>", reason, re.DOTALL)
    return wrapped[1] if wrapped else reason
