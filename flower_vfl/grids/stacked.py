"""A grid in this process whose passive parties of one shape compute as one."""

from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Context, Message, RecordDict, UserConfigValue
from flwr.clientapp import ClientApp

from flower_vfl.parties.base import Party
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.parties.stacked import StackedParty, stack_parties
from flower_vfl.protocol.replay import Session, sessions
from flower_vfl.protocol.residence import RESIDENT

from .groups import NodeGroup
from .in_process import InProcessGrid, NodeConfig


class StackedGrid(InProcessGrid):
    """Runs passive parties of one shape as one stacked module (``torch.func``).

    Every party has a node of its own, as in :class:`InProcessGrid`. Once the parties
    are configured, :meth:`group_nodes` adds a node for each group of parties whose
    models, optimizers, features and devices have one shape. It takes one request for
    the whole group and answers with one array, (parties, rows, width). Parties that
    cannot be stacked, such as those with dropout, are asked one by one.

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

    def __init__(
        self,
        client_app: ClientApp,
        nodes: int | Sequence[NodeConfig],
        run_config: Mapping[str, UserConfigValue] | None = None,
    ) -> None:
        super().__init__(client_app, nodes, run_config)
        self.groups: Sequence[NodeGroup] = ()
        self._members: dict[int, StackedParty] = {}  # by the node of each party

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
        run = self._run.run_id
        nodes = {}
        for node in self._contexts:
            session = sessions.get((run, node))
            if session is not None and isinstance(session.party, PassiveParty):
                nodes[session.party.name] = node
        parties = [sessions[run, node].party for node in nodes.values()]
        stacked, _ = stack_parties(p for p in parties if isinstance(p, PassiveParty))
        found = []
        for node, party in enumerate(stacked, start=max(self._contexts) + 1):
            own = [nodes[member.name] for member in party.members]
            first = sessions[run, own[0]]
            sessions[run, node] = Session(party, first.greeting, first.threads)
            self._members |= dict.fromkeys(own, party)
            self._contexts[node] = Context(run, node, {}, RecordDict(), {})
            self._contexts[node].__dict__[RESIDENT] = True
            names = tuple(member.name for member in party.members)
            found.append(NodeGroup(party.name, node, names))
        self.groups = found
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
