"""A plain Flower grid whose nodes are real processes, started for each message.

What a SuperLink and SuperNodes do in 30 seconds, without them: a message to a node
starts a process that runs the ClientApp, and its reply is what the process sends back.
The processes are forked from a server that has imported the app once and done nothing
else. `flower_vfl_command` runs a command in such a process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict, UserConfigValue
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
)
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

RUN_ID = 4711
FORKS = multiprocessing.get_context("forkserver")
# An optimizer imports torch._dynamo at its first step, which takes seconds.
FORKS.set_forkserver_preload(["flower_vfl.simulations.app", "torch._dynamo"])
Config = Mapping[str, UserConfigValue]


class ProcessGrid(Grid):
    """Starts a process for each message; `stop` ends all of them.

    Parameters
    ----------
    nodes : Sequence[Config]
        A node config each.
    run_config : Config
        The run config of all.
    """

    def __init__(self, nodes: Sequence[Config], run_config: Config) -> None:
        self._contexts = {
            number: Context(
                RUN_ID, number, dict(config), RecordDict(), dict(run_config)
            )
            for number, config in enumerate(nodes, start=SUPERLINK_NODE_ID + 1)
        }
        self._replies: dict[str, Message] = {}
        self._processes: dict[int, ForkServerProcess] = {}  # newest of each node
        self._started: list[ForkServerProcess] = []
        self._offline: set[int] = set()
        self._back_soon: set[int] = set()
        self._run = Run.create_empty(RUN_ID)

    # --- what a test does to the nodes -------------------------------------------

    def node(self, name: str) -> int:
        """Return the id of a party's node."""
        return next(
            node
            for node, context in self._contexts.items()
            if context.node_config["name"] == name
        )

    def kill(self, name: str, until_found_offline: bool = False) -> None:
        """Kill a party's process; its node is offline, for good or for one message."""
        self.take_offline(name)
        if until_found_offline:
            self._back_soon.add(self.node(name))
        self._processes[self.node(name)].kill()

    def take_offline(self, name: str) -> None:
        """Have the SuperLink say that a node is offline."""
        self._offline.add(self.node(name))

    def stop(self) -> None:
        """End every process."""
        for process in self._started:
            process.kill()
            process.join()

    # --- Flower's grid ------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node for node in self._contexts if node not in self._offline]

    def get_nodes(self) -> list[NodeInfo]:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            ids.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            if node in self._offline:
                self._replies[ids[-1]] = offline_reply(message)
                if node in self._back_soon:
                    self._offline.discard(node)
                continue
            ours, theirs = FORKS.Pipe()
            parts = [
                context_to_proto(self._contexts[node]).SerializeToString(),
                message_to_proto(message).SerializeToString(),
            ]
            process = FORKS.Process(target=answer, args=(theirs, *parts), daemon=True)
            process.start()
            theirs.close()
            self._processes[node] = process
            self._started.append(process)
            threading.Thread(
                target=self._listen, args=(ours, message), daemon=True
            ).start()
        return ids

    def _listen(self, ours: Connection, message: Message) -> None:
        try:
            reply = message_from_proto(MessageProto.FromString(ours.recv_bytes()))
        except (EOFError, OSError):
            error = Error(ErrorCode.CLIENT_APP_CRASHED, "the process ended")
            reply = Message(error, reply_to=message)
        self._replies[message.metadata.message_id] = reply

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(i) for i in set(message_ids) if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))  # of offline nodes


def offline_reply(message: Message) -> Message:
    """Return what the SuperLink answers in place of a node that is offline."""
    error = Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable")
    reply = Message(error, reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
    return reply


def claim_identity(node: int) -> None:
    """Say who this process is, as Flower's own processes do before they run an app."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, node, 1


def answer(there: Connection, context: bytes, message: bytes) -> None:
    """Answer the one message that this process was started for."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    from flower_vfl.simulations.app import client_app

    told = context_from_proto(ContextProto.FromString(context))
    claim_identity(told.node_id)
    reply = client_app(message_from_proto(MessageProto.FromString(message)), told)
    there.send_bytes(message_to_proto(reply).SerializeToString())


def flower_vfl_command(words: Sequence[str], errors: Path) -> ForkServerProcess:
    """Start `flower-vfl` with these words; what it says of errors is in a file."""
    process = FORKS.Process(target=_run_command, args=(list(words), errors))
    process.start()
    return process


def _run_command(words: list[str], errors: Path) -> None:
    """Run the command as a program does."""
    places = {1: Path(os.devnull), 2: errors}
    for output, path in places.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), output)
    from flower_vfl.simulations.cli.main import main

    sys.argv = ["flower-vfl", *words]
    main()
