"""A plain Flower grid whose nodes are real processes, started for each message.

What a SuperLink and SuperNodes do in 30 seconds, without them: a message to a node
starts a process that runs the ClientApp, and its reply is what the process prints. This
file is that process too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
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
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # newest of each node
        self._started: list[subprocess.Popen[bytes]] = []
        self._offline: set[int] = set()
        self._run = Run.create_empty(RUN_ID)

    # --- what a test does to the nodes -------------------------------------------

    def node(self, name: str) -> int:
        """Return the id of a party's node."""
        return next(
            node
            for node, context in self._contexts.items()
            if context.node_config["name"] == name
        )

    def kill(self, name: str) -> None:
        """Kill a party's process; its node is offline until `revive`."""
        self.take_offline(name)
        os.kill(self._processes[self.node(name)].pid, signal.SIGKILL)

    def take_offline(self, name: str) -> None:
        """Have the SuperLink say that a node is offline, until `revive`."""
        self._offline.add(self.node(name))

    def revive(self, name: str) -> None:
        """Bring a node back, without what its process had in memory."""
        self._offline.discard(self.node(name))

    def stop(self) -> None:
        """End every process."""
        for process in self._started:
            process.kill()
            process.wait()

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
                continue
            self._processes[node] = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._started.append(self._processes[node])
            arguments = (self._processes[node], message)
            threading.Thread(target=self._talk, args=arguments, daemon=True).start()
        return ids

    def _talk(self, process: subprocess.Popen[bytes], message: Message) -> None:
        context = self._contexts[message.metadata.dst_node_id]
        parts = [
            context_to_proto(context).SerializeToString(),
            message_to_proto(message).SerializeToString(),
        ]
        said, _ = process.communicate(b"".join(_framed(part) for part in parts))
        if process.returncode:
            error = Error(ErrorCode.CLIENT_APP_CRASHED, "the process ended")
            reply = Message(error, reply_to=message)
        else:
            reply = message_from_proto(MessageProto.FromString(said))
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


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "big") + part


def _part() -> bytes:
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    return sys.stdin.buffer.read(size)


def main() -> None:
    """Answer the one message that this process was started for."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the app prints is not the reply
    context = context_from_proto(ContextProto.FromString(_part()))
    message = message_from_proto(MessageProto.FromString(_part()))
    claim_identity(context.node_id)
    from flower_vfl.simulations.app import client_app

    with out:
        reply = client_app(message, context)
        out.write(message_to_proto(reply).SerializeToString())


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    main()
