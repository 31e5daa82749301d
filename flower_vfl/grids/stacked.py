"""A grid in this process whose passive parties of one shape compute as one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from flwr.app import Message

from flower_vfl.parties.base import Party
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.parties.stacked import StackedParty, stack_parties
from flower_vfl.protocol.messages import GRADIENT, Content, TensorArray, Verb, to_tensor
from flower_vfl.protocol.replay import Session, sessions

from .in_process import InProcessGrid

TOGETHER = (Verb.FORWARD, Verb.BACKWARD, Verb.EMBED)


class NodeGroup(NamedTuple):
    """Parties that one node answers for, with one array for all of them."""

    name: str
    node: int
    members: tuple[str, ...]


def join_requests(
    groups: Sequence[NodeGroup], contents: Mapping[str, Content]
) -> dict[str, Content]:
    """Return one request for each group whose parties can be asked together."""
    found = dict(contents)
    for group in groups:
        joined = _joined([contents.get(name) for name in group.members])
        if joined is not None:
            for name in group.members:
                del found[name]
            found[group.name] = joined
    return found


def _joined(contents: Sequence[Content | None]) -> Content | None:
    """Return one request for all parties; None if they are to be asked one by one."""
    # One of them is left out, its gradient was withheld or differs in shape (the party
    # itself reports that), or parties measure something.
    first, gradients = contents[0], []
    for each in contents:
        if first is None or each is None or each.labels is not None:
            return None
        if "probe" in each.config or each.config != first.config:
            return None
        if each.gradient_step:
            if GRADIENT not in each.arrays:
                return None
            gradients.append(to_tensor(each.arrays[GRADIENT]))
    if first is None or len({(g.shape, g.dtype) for g in gradients}) > 1:
        return None
    arrays = {GRADIENT: TensorArray(torch.stack(gradients))} if gradients else {}
    return replace(first, arrays=arrays)


def split_replies(
    groups: Sequence[NodeGroup], replies: Mapping[str, Content]
) -> dict[str, Content]:
    """Return one reply for each party."""
    found = dict(replies)
    for group in groups:
        if group.name not in found:
            continue
        reply = found.pop(group.name)
        if group.name not in reply.arrays:
            found |= {name: Content() for name in group.members}
            continue
        parts = to_tensor(reply.arrays[group.name]).unbind()
        for name, part in zip(group.members, parts, strict=True):
            found[name] = Content(arrays={name: TensorArray(part)})
    return found


class StackedGrid(InProcessGrid):
    """Runs passive parties of one shape as one stacked module (``torch.func``).

    Every party has a node of its own, as in :class:`InProcessGrid`. Once the parties
    are configured, :meth:`group_nodes` adds a node for each group of parties whose
    models, optimizers, features and devices have one shape. It answers one request for
    the whole group with one array. Parties that cannot be stacked, such as those with
    dropout, are asked one by one.

    Parameters
    ----------
    client_app, nodes, run_config
        As for :class:`InProcessGrid`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
    >>> from flower_vfl import VerticalStrategy
    >>> label = LabelParty(torch.arange(40) % 2, CrossEntropy(nn.Linear(8, 1)))
    >>> passive = [PassiveParty(torch.randn(40, 3), nn.Linear(3, 4)) for _ in range(2)]
    >>> with in_process([label, *passive], stacked=True) as grid:
    ...     result = VerticalStrategy(progress=False).start(grid, num_rounds=1)
    ...     [group.members for group in grid.groups]
    [('passive-1', 'passive-2')]
    """

    groups: Sequence[NodeGroup] = ()
    _members: Mapping[int, StackedParty] = MappingProxyType({})  # by node of a party

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes of all parties."""
        return [node for node in self._contexts if node not in self._group_ids()]

    def parties(self) -> dict[str, Party]:
        """Return the vertical parties that live behind this grid, by name."""
        groups = {group.name for group in self.groups}
        return {k: v for k, v in super().parties().items() if k not in groups}

    def group_nodes(self) -> Sequence[NodeGroup]:
        """Form groups of the parties as they are configured now, and return them."""
        self._drop_groups()
        run, found = self._run.run_id, []
        members: dict[int, StackedParty] = {}
        living = {n: sessions[run, n] for n in self._contexts if (run, n) in sessions}
        nodes = {session.party.name: node for node, session in living.items()}
        parties = [session.party for session in living.values()]
        stacked, _ = stack_parties(p for p in parties if isinstance(p, PassiveParty))
        for node, party in enumerate(stacked, start=max(self._contexts) + 1):
            names = tuple(member.name for member in party.members)
            first = living[nodes[names[0]]]
            sessions[run, node] = Session(party, first.greeting, first.threads)
            self._add_node(node, {}, {})
            members |= {nodes[name]: party for name in names}
            found.append(NodeGroup(party.name, node, names))
        self.groups, self._members = found, members
        return found

    def _group_ids(self) -> set[int]:
        return {group.node for group in self.groups}

    def _drop_groups(self) -> None:
        """Give every party its own state back."""
        for party in self._members.values():
            party.release()
        for node in self._group_ids():
            del self._contexts[node]
            sessions.pop((self._run.run_id, node), None)
        self.groups, self._members = (), {}

    def _handle(self, message: Message) -> Message:
        group = self._members.get(message.metadata.dst_node_id)
        if group is not None:  # a party is asked alone
            group.release()
        return super()._handle(message)

    def close(self) -> None:
        """Give every party its own state back, and forget the parties."""
        self._drop_groups()
        super().close()
