"""A Grid whose nodes are ClientApps in this process: no server, no Ray, no serialisation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from regionfed.flower import delivered
from server_app.local_grid import LocalGrid

# Flower's code for a ClientApp that raised.
_APP_RAISED = 2


@dataclass(frozen=True)
class Node:
    """One virtual node: an app, and the context that it keeps between messages."""

    app: ClientApp
    context: Context


class InProcessGrid(LocalGrid):
    """Calls each node's ClientApp directly, one after the other, in the order of the messages.

    As on a network, a receiver gets records of its own, and what it raises becomes an error
    reply: it costs that node's answer and nothing else.
    """

    def __init__(self, nodes: Mapping[int, Node], run_id: int) -> None:
        super().__init__(run_id)
        self._nodes = dict(nodes)
        self._replies: dict[str, Message] = {}

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver the messages; each is answered before the next is delivered."""
        ids = []
        for message in messages:
            reply = self.answer(delivered(message))
            ids.append(reply.metadata.reply_to_message_id)
            self._replies[ids[-1]] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return, once, the replies to these messages."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Yield each reply as it is made, so that only one is in memory at a time."""
        del timeout  # nothing is waited for: a call returns or raises
        for message in messages:
            yield self.answer(delivered(message))

    def answer(self, incoming: Message) -> Message:
        """Return the answer to a message that was delivered already."""
        node = self._nodes.get(incoming.metadata.dst_node_id)
        if node is None:
            return Message(Error(_APP_RAISED, "no such node"), reply_to=incoming)
        try:
            return node.app(incoming, node.context)
        except Exception as error:  # whatever an app raises is its answer
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(_APP_RAISED, reason), reply_to=incoming)
