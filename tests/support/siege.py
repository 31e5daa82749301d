"""An intruder, and a training that goes on while it is attacked."""

from __future__ import annotations

import queue
import threading
import time

import grpc
from resident_cases import RUN_ID, PlainGrid, to_all, weights

from flower_vfl.grids.resident import ResidentGrid
from flower_vfl.grids.resident.admission import Handshake
from flower_vfl.grids.resident.settings import METHOD, OPEN_RECORD, SERVICE, Offer
from flower_vfl.grids.resident.wire import chunks

AUTHENTICATE = 0.6


class Intruder:
    """A gRPC client that says whatever it likes."""

    def __init__(self, address: str, method: str = METHOD) -> None:
        self.said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        call = self._channel.stream_stream(f"/{SERVICE}/{method}")
        self.call = call(iter(self.said.get, None))

    def say(self, frame: bytes) -> None:
        for chunk in chunks([frame]):
            self.said.put(chunk)

    def hear(self) -> bytes:
        heard: bytes = next(self.call)
        return heard[1:]

    def refused(self, within: float = 5.0) -> grpc.StatusCode:
        """Wait for the end of the stream."""
        answer: queue.SimpleQueue[grpc.StatusCode] = queue.SimpleQueue()

        def listen() -> None:
            try:
                for _ in self.call:
                    pass
                answer.put(grpc.StatusCode.OK)
            except grpc.RpcError as ex:
                answer.put(ex.code())

        threading.Thread(target=listen, daemon=True).start()
        return answer.get(timeout=within)

    def introduce(self, token: bytes, node_id: int, run_id: int = RUN_ID) -> Handshake:
        handshake = Handshake(run_id, node_id)
        self.say(handshake.hello())
        handshake.server_nonce = self.hear()
        self.say(handshake.node_proof(token))
        return handshake

    def leave(self) -> None:
        self.said.put(None)
        self.call.cancel()
        self._channel.close()


class Siege:
    """A training that goes on while it is attacked."""

    def __init__(self, grid: ResidentGrid) -> None:
        self.grid = grid
        self.nodes = grid.open()
        plain = grid._grid
        assert isinstance(plain, PlainGrid)
        self.offers = {
            message.metadata.dst_node_id: Offer.from_record(
                message.content.config_records[OPEN_RECORD]
            )
            for message in plain.sent
        }
        self.address = self.offers[self.nodes[0]].address
        self.rounds = 0
        self._over = threading.Event()
        self._failures: list[object] = []
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        while not self._over.is_set():
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

    def withstood(self) -> None:
        """Check that every round before, during and after the attack was right."""
        seen = self.rounds
        end = time.monotonic() + 5
        while self.rounds < seen + 5 and time.monotonic() < end:
            time.sleep(0.01)
        self._over.set()
        self._thread.join()
        assert self._failures == []
        assert self.rounds >= seen + 5
