"""Requests to parties and their replies: numbered, repeated if lost, checked."""

import time
from collections.abc import Iterable, Mapping
from logging import INFO, WARNING

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.protocol.messages import Content, Verb, raise_error, read, request

# What Flower says about a message that the ClientApp did not get or did not finish.
_LOST = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.CLIENT_APP_CRASHED,
)


class NoReplyError(PartyError):
    """A party did not answer in time."""


class Messenger:
    """Sends requests over a grid and returns checked replies by party name."""

    def __init__(self, grid: Grid, timeout: float, retries: int) -> None:
        self.grid = grid
        self.timeout = timeout
        self.retries = retries
        self.turn = 0
        self.traffic = 0
        self.nodes: dict[str, int] = {}

    def wait_for_nodes(self, expected: int | None) -> None:
        """Wait until the nodes of the run are there, and give them working names."""
        deadline, least = time.monotonic() + self.timeout, expected or 2
        told = False
        while len(nodes := sorted(self.grid.get_node_ids())) < least:
            here = f"{len(nodes)} of {least} parties are there"
            remedy = f"--federation-config num-supernodes={least}"
            if not told:
                text = "%s: waiting for SuperNodes (in a simulation: %s)"
                log(INFO, text, here, remedy)
                told = True
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{here} after {self.timeout:g} s; start the missing SuperNodes, "
                    f"or more simulated ones with {remedy}"
                )
            time.sleep(0.1)
        if len(nodes) > (expected or len(nodes)):
            raise ConfigError(
                f"found {len(nodes)} nodes, expected {expected} parties; stop the "
                "others or change the number of parties"
            )
        self.nodes = {f"node-{node}": node for node in nodes}

    def ask(
        self, verb: Verb, contents: Mapping[str, Content], step: int | None = None
    ) -> dict[str, Content]:
        """Send one request to each named party and return the replies."""
        self.turn += 1
        waiting = {
            self.nodes[name]: request(verb, self.nodes[name], self.turn, content)
            for name, content in contents.items()
        }
        replies: dict[int, Message] = {}
        for attempt in range(self.retries + 1):
            if attempt:
                names = ", ".join(self._names(waiting))
                log(WARNING, "no reply from %s: asking again", names)
                waiting = {node: _repeat(each) for node, each in waiting.items()}
            last = attempt == self.retries
            sent = waiting.values()
            for reply in self.grid.send_and_receive(sent, timeout=self.timeout):
                if reply.has_error():
                    reply = _from_node(reply, sent)
                    if not last and reply.error.code in _LOST:
                        continue
                replies[reply.metadata.src_node_id] = reply
            waiting = {n: m for n, m in waiting.items() if n not in replies}
            if not waiting:
                return self._read(contents, replies, step)
        first, *others = self._names(waiting)
        raise NoReplyError(
            first,
            f"did not answer {self.retries + 1} requests within {self.timeout:g} s each"
            + (f"; nor did {', '.join(others)}" if others else ""),
            "Check that node's log, restart it and start the run again",
            step,
        )

    def tell(self, verb: Verb, contents: Mapping[str, Content], timeout: float) -> None:
        """Send one request to each named party, whether it answers or not."""
        self.turn += 1
        messages = [
            request(verb, self.nodes[name], self.turn, content)
            for name, content in contents.items()
        ]
        list(self.grid.send_and_receive(messages, timeout=timeout))

    def _read(
        self,
        contents: Mapping[str, Content],
        replies: Mapping[int, Message],
        step: int | None,
    ) -> dict[str, Content]:
        """Return each reply's content by party name; raise what a party reports."""
        found = {}
        for name, content in contents.items():
            reply = replies[self.nodes[name]]
            if reply.has_error():
                problem = f"its ClientApp failed: {reply.error.reason}"
                raise PartyError(name, problem, "Check that node's log", step)
            try:
                found[name] = answer = read(reply)
                if "error" in answer.config:
                    raise_error(answer, step)
            except ConfigError as error:
                remedy = "Every node must run a vertical_client_app"
                raise PartyError(name, str(error), remedy, step) from error
            self.traffic += content.size() + answer.size()
        return found

    def _names(self, nodes: Iterable[int]) -> list[str]:
        return [name for name, node in self.nodes.items() if node in nodes]


def _from_node(reply: Message, messages: Iterable[Message]) -> Message:
    """Return an error under its node's id: the SuperLink answers for lost nodes."""
    for message in messages:
        if message.metadata.dst_node_id == reply.metadata.src_node_id:
            return reply
    for message in messages:
        if message.metadata.message_id == reply.metadata.reply_to_message_id:
            return Message(reply.error, reply_to=message)
    return reply


def _repeat(message: Message) -> Message:
    metadata = message.metadata
    return Message(
        message.content,
        dst_node_id=metadata.dst_node_id,
        message_type=metadata.message_type,
        group_id=metadata.group_id,
    )
