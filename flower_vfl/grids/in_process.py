"""A Flower grid that calls the ClientApp in this process."""

import secrets
import traceback
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from logging import ERROR
from typing import Any

from flwr.app import Context, Error, Message, RecordDict, UserConfigValue
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.supercore import log
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flower_vfl.alignment import AlignmentSettings
from flower_vfl.errors import ConfigError
from flower_vfl.parties.base import Party
from flower_vfl.parties.policies import NodePolicy
from flower_vfl.protocol.client_app import vertical_client_app
from flower_vfl.protocol.replay import forget, sessions
from flower_vfl.protocol.residence import RESIDENT

from .wrapped import ClosableGrid

NodeConfig = Mapping[str, UserConfigValue]
UserConfig = dict[str, UserConfigValue]
_TRUSTING = AlignmentSettings(trust_server=True)


class InProcessGrid(ClosableGrid):
    """Runs every node in the calling process, one after the other.

    Messages are handled before ``push_messages`` returns; a party stays in memory
    between them.

    Parameters
    ----------
    client_app : ClientApp
        The app of every node.
    nodes : int | Sequence[NodeConfig]
        How many nodes, with ``partition-id`` and ``num-partitions`` as in a Flower
        simulation, or one node config each.
    run_config : Mapping[str, UserConfigValue] | None (default: None)
        What the app finds in ``context.run_config``.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from flower_vfl import InProcessGrid
    >>> with InProcessGrid(ClientApp(), nodes=3) as grid:
    ...     list(grid.get_node_ids())
    [1, 2, 3]
    """

    ordered = True

    def __init__(
        self,
        client_app: ClientApp,
        nodes: int | Sequence[NodeConfig],
        run_config: Mapping[str, UserConfigValue] | None = None,
    ) -> None:
        if isinstance(nodes, int):
            nodes = [{"partition-id": i, "num-partitions": nodes} for i in range(nodes)]
        self._app = client_app
        self._run = Run.create_empty(secrets.randbits(62) + 1)
        self._contexts: dict[int, Context] = {}
        for node, config in enumerate(nodes, start=1):
            self._add_node(node, dict(config), dict(run_config or {}))
        self._replies: dict[str, Message] = {}
        self._sent = 0
        try:  # Flower makes messages only where one of its runtimes has set these
            _ = TaskIdentity.run_id
        except RuntimeError:
            TaskIdentity.run_id = self._run.run_id
            TaskIdentity.task_id = TaskIdentity.node_id = 1
        self._release = weakref.finalize(self, forget, self._run.run_id)

    def _add_node(self, node: int, config: UserConfig, run_config: UserConfig) -> None:
        context = Context(self._run.run_id, node, config, RecordDict(), run_config)
        context.__dict__[RESIDENT] = True
        self._contexts[node] = context

    def parties(self) -> dict[str, Party]:
        """Return the vertical parties that live behind this grid, by name."""
        keys = [(self._run.run_id, node) for node in self._contexts]
        parties = [sessions[key].party for key in keys if key in sessions]
        return {party.name: party for party in parties}

    def set_run(self, run: Run) -> None:
        """Refuse: the run of this grid is its own."""
        raise ConfigError("an InProcessGrid makes its own run; make a new grid instead")

    @property
    def run(self) -> Run:
        """The run that this grid made for itself."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have every message handled and keep the replies for ``pull_messages``."""
        pushed: dict[str, Message] = {}
        for message in messages:
            reply = self._handle(message)
            pushed[message.metadata.message_id] = reply
        self._replies |= pushed
        return list(pushed)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return and forget the replies to messages that were pushed."""
        known = [key for key in message_ids if key in self._replies]
        return [self._replies.pop(key) for key in known]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies to messages."""
        return [self._handle(message) for message in messages]

    def _handle(self, message: Message) -> Message:
        self._sent += 1
        message.metadata.__dict__["_message_id"] = f"{self._run.run_id}-{self._sent}"
        node = message.metadata.dst_node_id
        if node not in self._contexts:
            raise ConfigError(f"there is no node {node}; nodes: {list(self._contexts)}")
        try:
            return self._app(message, self._contexts[node])
        except Exception as error:  # as Flower's own runtimes do
            log(ERROR, traceback.format_exc())
            reason = f"{type(error).__name__}: {error}"
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            return Message(Error(code=code, reason=reason), reply_to=message)

    def close(self) -> None:
        """Forget the parties of this grid and free their memory."""
        self._release()


def in_process(
    parties: Sequence[Party],
    alignment: Mapping[str, AlignmentSettings] | AlignmentSettings = _TRUSTING,
    *,
    stacked: bool = False,
) -> InProcessGrid:
    """Return a grid for parties that were made by hand, for example in a notebook.

    Parameters
    ----------
    parties : Sequence[Party]
        One label party and at least one passive party, in any order.
    alignment : Mapping[str, AlignmentSettings] | AlignmentSettings (default: trusting)
        What each party brings to an alignment of ids, by name or for all. The default
        trusts the server, which is this process.
    stacked : bool (default: False)
        Whether passive parties of one shape compute as one: a :class:`StackedGrid`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
    >>> label = LabelParty(torch.tensor([0, 1, 1]), CrossEntropy(nn.Linear(4, 1)))
    >>> passive = PassiveParty(torch.randn(3, 6), nn.Linear(6, 4))
    >>> with in_process([label, passive]) as grid:
    ...     len(list(grid.get_node_ids()))
    2
    """
    if len(parties) < 2:
        remedy = "give a label party and at least one passive party"
        raise ConfigError(f"{len(parties)} party cannot train alone; {remedy}")
    numbers = count(1)
    configs: list[NodeConfig] = []
    for index, party in enumerate(parties):
        usual = f"passive-{next(numbers)}" if party.role == "passive" else party.role
        name = party.name or usual
        configs.append({"role": party.role, "name": name, "index": index})

    def given(context: Context) -> Any:  # of the role that its config names
        return parties[int(context.node_config["index"])]

    def settings(context: Context) -> AlignmentSettings:
        if isinstance(alignment, AlignmentSettings):
            return alignment
        return alignment.get(str(context.node_config["name"]), AlignmentSettings())

    app = vertical_client_app(
        given, given, alignment=settings, policy=lambda _: NodePolicy()
    )
    if stacked:
        from .stacked import StackedGrid  # which is an InProcessGrid

        return StackedGrid(app, configs)
    return InProcessGrid(app, configs)
