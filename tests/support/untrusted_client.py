"""A gRPC client that breaks the protocol, and a training that goes on meanwhile."""

from __future__ import annotations

import queue
import threading
import time

import grpc
from resident_cases import RUN_ID, PlainGrid, to_all, weights

from flower_vfl.grids.resident import ResidentGrid
from flower_vfl.grids.resident.authentication import Authentication
from flower_vfl.grids.resident.settings import METHOD, OPEN_RECORD, SessionOffer
from flower_vfl.grids.resident.wire import split_frame

AUTHENTICATE = 0.6


class UntrustedClient:
    """A gRPC client that sends arbitrary frames."""

    def __init__(self, address: str, method: str = METHOD) -> None:
        self.sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.call = self._channel.stream_stream(method)(iter(self.sent.get, None))

    def send(self, frame: bytes) -> None:
        for chunk in split_frame([frame]):
            self.sent.put(chunk)

    def receive(self) -> bytes:
        chunk: bytes = next(self.call)
        return chunk[1:]

    def status(self, within: float = 5.0) -> grpc.StatusCode:
        """Wait for the end of the stream and return its status."""
        answer: queue.SimpleQueue[grpc.StatusCode] = queue.SimpleQueue()

        def read() -> None:
            try:
                for _ in self.call:
                    pass
                answer.put(grpc.StatusCode.OK)
            except grpc.RpcError as ex:
                answer.put(ex.code())

        threading.Thread(target=read, daemon=True).start()
        return answer.get(timeout=within)

    def authenticate(self, token: bytes, node_id: int, run_id: int = RUN_ID) -> None:
        node = Authentication(run_id, node_id)
        self.send(node.hello())
        node.server_nonce = self.receive()
        self.send(node.proof(token, b"node"))

    def close(self) -> None:
        self.sent.put(None)
        self.call.cancel()
        self._channel.close()


class BackgroundTraining:
    """A training in the background that checks every reply."""

    def __init__(self, grid: ResidentGrid) -> None:
        self.grid = grid
        self.nodes = grid.open()
        plain = grid._grid
        assert isinstance(plain, PlainGrid)
        self.offers = {
            message.metadata.dst_node_id: SessionOffer.from_record(
                message.content.config_records[OPEN_RECORD]
            )
            for message in plain.sent
        }
        self.address = self.offers[self.nodes[0]].address
        self.rounds = 0
        self._stopped = threading.Event()
        self._failures: list[object] = []
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        while not self._stopped.is_set():
            messages = to_all(self.grid, weights(self.rounds), "train")
            replies = list(self.grid.send_and_receive(messages, timeout=5.0))
            self.rounds += 1
            counts = [
                reply.error
                if reply.has_error()
                else reply.content.config_records["count"]["n"]
                for reply in replies
            ]
            if counts != [self.rounds] * len(self.nodes):
                self._failures.append(counts)
                return
            time.sleep(0.002)

    def check(self) -> None:
        """Check that every round was right, also after an attack."""
        seen = self.rounds
        end = time.monotonic() + 60
        while self.rounds < seen + 5 and time.monotonic() < end:
            time.sleep(0.002)
        assert self._failures == []
        assert self.rounds >= seen + 5

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
