"""Base classes of Flower grids: closed after a ``with`` block, wrapping another."""

from collections.abc import Iterable
from typing import Self

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run


class ClosableGrid(Grid):
    """A grid that a ``with`` block closes."""

    # Whether each node handles messages in the order in which they were pushed, so that
    # several may be under way to one node. Flower's own grids do not promise that.
    ordered = False

    def receive(self, message_ids: Iterable[str], timeout: float) -> Iterable[Message]:
        """Return the replies that have arrived; wait for one if there is none."""
        return self.pull_messages(message_ids)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message; Flower prefers its ``Message`` constructor."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def close(self) -> None:
        """Free what the grid holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class WrappedGrid(ClosableGrid):
    """Delegates every call to the wrapped grid; subclasses override some of them."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def set_run(self, run: Run) -> None:
        """Set the run of the wrapped grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """Run of the wrapped grid."""
        return self._grid.run

    def close(self) -> None:
        """Close the wrapped grid, if it can be closed."""
        getattr(self._grid, "close", lambda: None)()

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids of the wrapped grid."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the nodes of the wrapped grid."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies."""
        return self._grid.send_and_receive(messages, timeout=timeout)
