"""Requests to parties and their replies: numbered, repeated if lost, checked."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from logging import INFO, WARNING

from flwr.app import Array, ArrayRecord, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.protocol.arrays import size_of
from flower_vfl.protocol.messages import Content, Verb, raise_error, read, request

# What Flower says about a message that the ClientApp did not get or did not finish.
_LOST = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)


class Messenger:
    """Sends requests over a grid and hands back checked replies by party name."""

    def __init__(self, grid: Grid, timeout: float, retries: int) -> None:
        self.grid = grid
        self.timeout = timeout
        self.retries = retries
        self.turn = 0
        self.traffic = 0  # bytes of the arrays that went out and came back
        self.nodes: dict[str, int] = {}

    def wait_for_nodes(self, expected: int | None) -> None:
        """Wait until the nodes of the run are there, and give them working names."""
        deadline = time.monotonic() + self.timeout
        told = False
        while True:
            nodes = sorted(self.grid.get_node_ids())
            if len(nodes) >= (expected or 2):
                break
            if not told:
                log(
                    INFO,
                    "%d of %d parties are there: waiting for SuperNodes (in a "
                    "simulation: --federation-config num-supernodes=%d)",
                    len(nodes),
                    expected or 2,
                    expected or 2,
                )
                told = True
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{len(nodes)} of {expected or 2} parties are there after "
                    f"{self.timeout:g} s; start the missing SuperNodes, or more "
                    "simulated ones with --federation-config num-supernodes=..."
                )
            time.sleep(0.1)
        if expected is not None and len(nodes) > expected:
            raise ConfigError(
                f"{len(nodes)} nodes are there, {expected} parties were expected; stop "
                "the others or set the number of parties to what is there"
            )
        self.nodes = {f"node-{node}": node for node in nodes}

    def messages(self, verb: Verb, contents: Mapping[str, Content]) -> list[Message]:
        """Return the requests of one turn."""
        self.turn += 1
        return [
            request(verb, self.nodes[name], self.turn, content)
            for name, content in contents.items()
        ]

    def ask(
        self, verb: Verb, contents: Mapping[str, Content], step: int | None = None
    ) -> dict[str, Content]:
        """Send one request to each named party and return the replies."""
        return self.collect(self.deliver(self.messages(verb, contents), step), step)

    def deliver(self, messages: list[Message], step: int | None) -> list[Message]:
        """Return one reply per message; send those again that got none."""
        names = {node: name for name, node in self.nodes.items()}
        replies: dict[int, Message] = {}
        for attempt in range(self.retries + 1):
            waiting = [m for m in messages if m.metadata.dst_node_id not in replies]
            if attempt:
                late = [names[m.metadata.dst_node_id] for m in waiting]
                log(WARNING, "no reply from %s: asking again", ", ".join(late))
                waiting = [_repeat(message) for message in waiting]
            for answer in self.grid.send_and_receive(waiting, timeout=self.timeout):
                reply = _from_node(answer, waiting)
                lost = reply.has_error() and reply.error.code in _LOST
                if not lost or attempt == self.retries:
                    replies[reply.metadata.src_node_id] = reply
            if len(replies) == len(messages):
                self.traffic += sum(map(_array_bytes, (*messages, *replies.values())))
                return [replies[m.metadata.dst_node_id] for m in messages]
        missing = [
            names[m.metadata.dst_node_id]
            for m in messages
            if m.metadata.dst_node_id not in replies
        ]
        raise PartyError(
            missing[0],
            f"did not answer {self.retries + 1} requests within {self.timeout:g} s each"
            + (f"; nor did {', '.join(missing[1:])}" if missing[1:] else ""),
            "Look at that node's log, bring it back and resume from a checkpoint",
            step,
        )

    def collect(
        self, replies: Iterable[Message], step: int | None
    ) -> dict[str, Content]:
        """Return the content of each reply by party name; raise what a party reports."""
        names = {node: name for name, node in self.nodes.items()}
        contents = {}
        for reply in replies:
            name = names[reply.metadata.src_node_id]
            if reply.has_error():
                raise PartyError(
                    name,
                    f"its ClientApp failed: {reply.error.reason}",
                    "Look at that node's log",
                    step,
                )
            try:
                content = read(reply)
            except ConfigError as error:
                remedy = "Every node must run a vertical_client_app"
                raise PartyError(name, str(error), remedy, step) from error
            raise_error(content, step)
            contents[name] = content
        return contents


def embeddings(contents: Mapping[str, Content], step: int) -> dict[str, Array]:
    """Return the embedding that each passive party replied with."""
    for name, content in contents.items():
        if name not in content.arrays:
            remedy = "Run one version of flower-vfl at every party"
            raise PartyError(name, "its reply has no embedding", remedy, step)
    return {name: content.arrays[name] for name, content in contents.items()}


def noted(contents: Mapping[str, Content]) -> dict[str, float]:
    """Return what passive parties measured, as ``metric/party``."""
    return {
        f"{metric}/{name}": value
        for name, content in contents.items()
        for metric, value in content.metrics.items()
    }


def _from_node(reply: Message, messages: list[Message]) -> Message:
    """Return an error under its node's id: the SuperLink answers for lost nodes."""
    asked = {message.metadata.dst_node_id for message in messages}
    if not reply.has_error() or reply.metadata.src_node_id in asked:
        return reply
    for message in messages:
        if message.metadata.message_id == reply.metadata.reply_to_message_id:
            return Message(reply.error, reply_to=message)
    return reply


def _array_bytes(message: Message) -> int:
    """Return the bytes of a message's arrays: embeddings, gradients, labels."""
    if message.has_error():
        return 0
    # Flower's views by kind are rebuilt at every use.
    records = [r for r in message.content.values() if isinstance(r, ArrayRecord)]
    return sum(size_of(array) for record in records for array in record.values())


def _repeat(message: Message) -> Message:
    """Return the same request as a new Flower message."""
    metadata = message.metadata
    return Message(
        message.content,
        dst_node_id=metadata.dst_node_id,
        message_type=metadata.message_type,
        group_id=metadata.group_id,
    )
