"""Requests to parties and their replies: numbered, repeated if lost, checked."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from typing import cast

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.grids.stacked import TOGETHER, NodeGroup, join_requests, split_replies
from flower_vfl.grids.wrapped import ClosableGrid
from flower_vfl.protocol.messages import Content, Verb, raise_error, read, request

# What Flower says about a message that the ClientApp did not get or did not finish.
_LOST = {ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE}
_LOST |= {ErrorCode.NODE_UNAVAILABLE, ErrorCode.CLIENT_APP_CRASHED}


class NoReplyError(PartyError):
    """A party did not answer in time."""


@dataclass
class _Request:
    """A message that was posted to one node and has no reply yet."""

    message: Message
    attempts: int = 1
    deadline: float = 0.0


@dataclass
class _Posted:
    """What was posted to some parties under one turn, and the replies so far."""

    contents: Mapping[str, Content]
    step: int | None
    replies: dict[int, Message] = field(default_factory=dict)


class Messenger:
    """Sends requests over a grid and returns checked replies by party name.

    :meth:`ask` waits for the replies. What :meth:`post` sends may be under way while
    more is posted. Every party handles requests in order: a grid that does not promise
    that gets one per party at a time.
    """

    def __init__(self, grid: Grid, timeout: float, retries: int) -> None:
        self.grid, self.timeout, self.retries = grid, timeout, retries
        self.turn = self.traffic = 0
        self.nodes: dict[str, int] = {}
        self.groups: Sequence[NodeGroup] = ()  # parties that are asked together
        ordered = isinstance(grid, ClosableGrid) and grid.ordered
        self._ordered = cast(ClosableGrid, grid) if ordered else None
        self._posted: dict[int, _Posted] = {}  # by turn
        self._open: dict[tuple[int, int], _Request] = {}  # by turn and node, in order

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
                waited = f"{here} after {self.timeout:g} s"
                raise ConfigError(f"{waited}; start more SuperNodes, or {remedy}")
            time.sleep(0.1)
        if len(nodes) > (expected or len(nodes)):
            given = f"found {len(nodes)} nodes, expected {expected} parties"
            raise ConfigError(f"{given}; stop the others or change the number")
        self.nodes = {f"node-{node}": node for node in nodes}

    def ask(
        self, verb: Verb, contents: Mapping[str, Content], step: int | None = None
    ) -> dict[str, Content]:
        """Send one request to each named party and return the replies."""
        if self.groups:
            contents = self._together(verb, contents, step)
        self.turn += 1
        waiting = {}
        for name, content in contents.items():
            node = self.nodes[name]
            self.traffic += content.size()
            waiting[node] = request(verb, node, self.turn, content)
        replies: dict[int, Message] = {}
        for attempt in range(self.retries + 1):
            if attempt:
                names = ", ".join(self._names(waiting))
                log(WARNING, "no reply from %s: asking again", names)
                waiting = {node: _repeat(each) for node, each in waiting.items()}
            sent = waiting.values()
            for reply in self.grid.send_and_receive(sent, timeout=self.timeout):
                if reply.has_error():
                    reply = _from_node(reply, sent)
                    if attempt < self.retries and reply.error.code in _LOST:
                        continue
                replies[reply.metadata.src_node_id] = reply
            waiting = {n: m for n, m in waiting.items() if n not in replies}
            if not waiting:
                found = self._read(contents, replies, step)
                return split_replies(self.groups, found) if self.groups else found
        first, *others = self._names(waiting)
        raise self._no_reply(first, others, step)

    def _no_reply(self, first: str, others: list[str], step: int | None) -> PartyError:
        asked = f"{self.retries + 1} requests within {self.timeout:g} s each"
        nor = f"; nor did {', '.join(others)}" if others else ""
        remedy = "Check that node's log, restart it and start the run again"
        return NoReplyError(first, f"did not answer {asked}{nor}", remedy, step)

    def set_groups(self, groups: Sequence[NodeGroup]) -> None:
        """Ask the parties of each group together from now on."""
        for group in self.groups:
            self.nodes.pop(group.name, None)
        self.groups = groups
        self.nodes |= {group.name: group.node for group in groups}

    def _together(
        self, verb: Verb, contents: Mapping[str, Content], step: int | None
    ) -> Mapping[str, Content]:
        """Return one request for each group, or one for each party that has trained."""
        if verb in TOGETHER:
            return join_requests(self.groups, contents)
        due = {name: each for name, each in contents.items() if each.gradient_step}
        if not due:
            return contents
        self.ask(Verb.BACKWARD, due, step)
        trained = {n: replace(c, arrays={}, gradient_step=0) for n, c in due.items()}
        return {**contents, **trained}

    def post(self, verb: Verb, contents: Mapping[str, Content], step: int) -> int:
        """Send one request to each named party, and return their turn at once."""
        self.turn += 1
        self._posted[self.turn] = _Posted(contents, step)
        requests = {}
        for name, content in contents.items():
            node = self.nodes[name]
            self.traffic += content.size()
            message = request(verb, node, self.turn, content)
            requests[self.turn, node] = _Request(message)
        self._open |= requests
        if self._ordered is not None:
            self._push(requests.values())
        return self.turn

    def _push(self, requests: Iterable[_Request]) -> None:
        for each in requests:
            each.deadline = time.monotonic() + self.timeout
        self.grid.push_messages([each.message for each in requests])

    def replies(self, turn: int) -> dict[str, Content] | None:
        """Return the replies to what was posted; None while some are missing."""
        posted = self._posted[turn]
        if len(posted.replies) < len(posted.contents):
            return None
        del self._posted[turn]
        return self._read(posted.contents, posted.replies, posted.step)

    def receive(self) -> None:
        """Wait for replies to what was posted; post again what was lost."""
        lost: set[tuple[int, int]] = set()
        if self._ordered is not None:
            ids = {r.message.metadata.message_id: at for at, r in self._open.items()}
            due = min(each.deadline for each in self._open.values())
            left = max(due - time.monotonic(), 0.0)
            replies = self._ordered.receive(ids, left)
            found = [(ids[r.metadata.reply_to_message_id], r) for r in replies]
            if not found:
                lost = {at for at, each in self._open.items() if each.deadline <= due}
        else:
            first: dict[int, tuple[int, int]] = {}
            for at in self._open:
                first.setdefault(at[1], at)
            sent = [self._open[at].message for at in first.values()]
            answers = list(self.grid.send_and_receive(sent, timeout=self.timeout))
            named = [_from_node(r, sent) if r.has_error() else r for r in answers]
            named = [r for r in named if r.metadata.src_node_id in first]
            found = [(first[r.metadata.src_node_id], r) for r in named]
            lost = {*first.values()} - {at for at, _ in found}
        for at, reply in found:
            again = self._open[at].attempts <= self.retries
            if reply.has_error() and reply.error.code in _LOST and again:
                lost.add(at)
            else:
                del self._open[at]
                self._posted[at[0]].replies[at[1]] = reply
        if lost:
            self._post_again(lost)

    def _post_again(self, lost: set[tuple[int, int]]) -> None:
        """Repeat requests in their order, unless they were repeated too often."""
        names = self._names({node for _, node in lost})
        for at in self._open:
            if at in lost and self._open[at].attempts > self.retries:
                first = self._names([at[1]])
                others = [name for name in names if name not in first]
                raise self._no_reply(first[0], others, self._posted[at[0]].step)
        log(WARNING, "no reply from %s: asking again", ", ".join(names))
        repeated = [self._open[at] for at in self._open if at in lost]
        for each in repeated:
            each.message, each.attempts = _repeat(each.message), each.attempts + 1
        if self._ordered is not None:
            self._push(repeated)

    def drop(self) -> None:
        """Forget what was posted; wait until no party works on it any more."""
        if self._ordered is not None:
            waiting = {each.message.metadata.message_id for each in self._open.values()}
            deadline = time.monotonic() + self.timeout
            while waiting and (left := deadline - time.monotonic()) > 0:
                found = self._ordered.receive(waiting, left)
                waiting -= {r.metadata.reply_to_message_id for r in found}
        self._open.clear()
        self._posted.clear()

    def tell(self, verb: Verb, contents: Mapping[str, Content], timeout: float) -> None:
        """Send one request to each named party, whether it answers or not."""
        self.turn += 1
        nodes = {self.nodes[name]: content for name, content in contents.items()}
        messages = [request(verb, node, self.turn, c) for node, c in nodes.items()]
        list(self.grid.send_and_receive(messages, timeout=timeout))

    def _read(
        self, contents: Iterable[str], replies: Mapping[int, Message], step: int | None
    ) -> dict[str, Content]:
        """Return each reply's content by party name; raise what a party reports."""
        found = {}
        for name in contents:
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
            self.traffic += answer.size()
        return found

    def _names(self, nodes: Iterable[int]) -> list[str]:
        return [name for name, node in self.nodes.items() if node in nodes]


def _from_node(reply: Message, messages: Iterable[Message]) -> Message:
    """Return an error under its node's id: the SuperLink answers for lost nodes."""
    if any(m.metadata.dst_node_id == reply.metadata.src_node_id for m in messages):
        return reply
    for message in messages:
        if message.metadata.message_id == reply.metadata.reply_to_message_id:
            return Message(reply.error, reply_to=message)
    return reply


def _repeat(message: Message) -> Message:
    old = message.metadata
    to = old.dst_node_id, old.message_type
    return Message(message.content, *to, group_id=old.group_id)
