from __future__ import annotations

import ipaddress
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flwr.app import Context, RecordDict

from flower_vfl.errors import ConfigError
from flower_vfl.resident import Limits, ResidentGrid, SessionError
from flower_vfl.resident.admission import GuestList, Handshake, Refusal
from flower_vfl.resident.session import Hands, Session
from flower_vfl.resident.settings import (
    CHUNK,
    METHOD,
    OPEN_RECORD,
    SERVICE,
    Offer,
    is_loopback,
)
from flower_vfl.resident.wire import chunks

from .conftest import RUN_ID, GridMaker, PlainGrid, counting_app, weights
from .test_grid import to_all

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


@pytest.fixture
def siege(make_grid: GridMaker) -> Iterator[Siege]:
    limits = Limits(authenticate=AUTHENTICATE, pending=4, max_frame=3 * CHUNK)
    made = Siege(make_grid(2, limits=limits))
    yield made
    made._over.set()
    made._thread.join()


@pytest.fixture
def refusals(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="flwr")

    def read() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return [line for line in lines if line.startswith("Session refused")]

    return read


Refusals = Callable[[], list[str]]
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def check_line(refusals: Refusals, *words: str) -> None:
    end = time.monotonic() + 3
    while not refusals() and time.monotonic() < end:
        time.sleep(0.01)
    [line] = refusals()
    assert "ipv4:127.0.0.1:" in line
    for word in words:
        assert word in line


def test_no_token(siege: Siege, refusals: Refusals) -> None:
    intruder = Intruder(siege.address)
    intruder.introduce(b"", siege.nodes[0])
    assert intruder.refused() == UNAUTHENTICATED
    check_line(refusals, "wrong proof", str(siege.nodes[0]))
    siege.withstood()


def test_a_wrong_token(siege: Siege, refusals: Refusals) -> None:
    intruder = Intruder(siege.address)
    intruder.introduce(bytes(32), siege.nodes[0])
    assert intruder.refused() == UNAUTHENTICATED
    check_line(refusals, "wrong proof")
    siege.withstood()


def test_the_token_of_another_node(siege: Siege, refusals: Refusals) -> None:
    intruder = Intruder(siege.address)
    intruder.introduce(siege.offers[siege.nodes[1]].token, siege.nodes[0])
    assert intruder.refused() == UNAUTHENTICATED
    check_line(refusals, "wrong proof")
    siege.withstood()


@pytest.mark.parametrize("what", ["run", "node"])
def test_a_token_outside_its_run_or_node(
    siege: Siege, refusals: Refusals, what: str
) -> None:
    node = siege.nodes[0]
    intruder = Intruder(siege.address)
    run_id, node_id = (RUN_ID + 1, node) if what == "run" else (RUN_ID, node + 500)
    intruder.introduce(siege.offers[node].token, node_id, run_id)
    assert intruder.refused() == UNAUTHENTICATED
    check_line(refusals, "not invited")
    siege.withstood()


def test_a_replayed_handshake(siege: Siege, refusals: Refusals) -> None:
    # What a listener on the wire would have of the node's own handshake.
    node = siege.nodes[0]
    recorded = Handshake(RUN_ID, node)
    recorded.server_nonce = b"n" * 32
    proof = recorded.node_proof(siege.offers[node].token)
    intruder = Intruder(siege.address)
    intruder.say(recorded.hello())
    assert intruder.hear() != recorded.server_nonce
    intruder.say(proof)
    assert intruder.refused() == UNAUTHENTICATED
    check_line(refusals, "wrong proof")
    siege.withstood()


def test_a_second_connection(siege: Siege, refusals: Refusals) -> None:
    node = siege.nodes[0]
    intruder = Intruder(siege.address)
    intruder.introduce(siege.offers[node].token, node)
    # Not final: the same words from a node whose first connection has died are right.
    assert intruder.refused() == grpc.StatusCode.UNAVAILABLE
    check_line(refusals, "connected already", str(node))
    siege.withstood()


def test_a_node_whose_connection_died_may_come_back_with_its_token(
    siege: Siege, refusals: Refusals
) -> None:
    siege.withstood()
    siege.grid.close()
    guests = GuestList(1)
    token = guests.invite(RUN_ID, 5)
    for _ in range(2):
        handshake = Handshake(RUN_ID, 5)
        handshake.server_nonce = b"x" * 32
        assert guests.check(handshake, handshake.node_proof(token)) == token
    guests.invite(RUN_ID, 5)
    with pytest.raises(Refusal):
        guests.check(handshake, handshake.node_proof(token))


@pytest.mark.parametrize(
    "chunk", [b"", b"\x00", b"\x00" + b"GET / HTTP/1.1" * 4, b"\xff" * 61, b"\x01" * 99]
)
def test_garbage_frames(siege: Siege, refusals: Refusals, chunk: bytes) -> None:
    intruder = Intruder(siege.address)
    intruder.said.put(chunk)
    assert intruder.refused() == UNAUTHENTICATED
    check_line(refusals, "garbage")
    siege.withstood()


def test_garbage_instead_of_a_proof(siege: Siege, refusals: Refusals) -> None:
    intruder = Intruder(siege.address)
    intruder.say(Handshake(RUN_ID, siege.nodes[0]).hello())
    intruder.hear()
    intruder.say(b"garbage")
    assert intruder.refused() == UNAUTHENTICATED
    check_line(refusals, "wrong proof")
    siege.withstood()


def test_an_unknown_method(siege: Siege, refusals: Refusals) -> None:
    assert Intruder(siege.address, "Other").refused() == UNAUTHENTICATED
    check_line(refusals, "not offered")
    siege.withstood()


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40], ids=["http", "noise"]
)
def test_garbage_that_is_not_even_http(
    siege: Siege, refusals: Refusals, words: bytes
) -> None:
    host, port = siege.address.split(":")
    with socket.create_connection((host, int(port))) as intruder:
        intruder.sendall(words)
        intruder.settimeout(4 * AUTHENTICATE)
        with suppress(ConnectionResetError):
            while intruder.recv(4096):
                pass
    check_line(refusals, "never began a session")
    siege.withstood()


@pytest.mark.parametrize("size", [1000, CHUNK, CHUNK + 100_000])
def test_an_oversized_first_frame(siege: Siege, refusals: Refusals, size: int) -> None:
    intruder = Intruder(siege.address)
    intruder.said.put(b"\x00" + bytes(size))
    assert intruder.refused() != grpc.StatusCode.OK
    check_line(refusals)
    siege.withstood()


def test_an_oversized_frame_of_an_admitted_node(
    siege: Siege, refusals: Refusals
) -> None:
    # A node that was invited and never came: someone in its place sends too much.
    hub = siege.grid._hub
    assert hub is not None
    token = hub.invite(RUN_ID, 4242)
    intruder = Intruder(siege.address)
    intruder.introduce(token, 4242)
    intruder.hear()
    intruder.say(b"R" + bytes(4 * CHUNK))
    intruder.refused()
    check_line(refusals, "over the limit", "4242")
    siege.withstood()


def test_a_half_open_stream(siege: Siege, refusals: Refusals) -> None:
    silent, stuck = Intruder(siege.address), Intruder(siege.address)
    stuck.say(Handshake(RUN_ID, siege.nodes[0]).hello())
    start = time.monotonic()
    assert silent.refused() == grpc.StatusCode.UNAVAILABLE
    assert stuck.refused() == grpc.StatusCode.UNAVAILABLE
    assert 0.5 * AUTHENTICATE < time.monotonic() - start < 3 * AUTHENTICATE
    lines = refusals()
    assert len(lines) == 2
    assert all("too long" in line for line in lines)
    siege.withstood()


def test_a_half_open_connection_is_closed(siege: Siege, refusals: Refusals) -> None:
    host, port = siege.address.split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.settimeout(5 * AUTHENTICATE)
        start = time.monotonic()
        while silent.recv(4096):
            pass
        assert time.monotonic() - start < 4 * AUTHENTICATE
    check_line(refusals, "never began a session")
    siege.withstood()


def test_leaving_in_the_middle_of_the_handshake(
    siege: Siege, refusals: Refusals
) -> None:
    intruder = Intruder(siege.address)
    intruder.say(Handshake(RUN_ID, siege.nodes[0]).hello())
    intruder.hear()
    intruder.leave()
    check_line(refusals, "before it was admitted")
    siege.withstood()


def test_a_crowd_is_turned_away_and_others_still_get_in(
    siege: Siege, refusals: Refusals
) -> None:
    crowd = [Intruder(siege.address) for _ in range(12)]
    end = time.monotonic() + 3
    while len(refusals()) < 8 and time.monotonic() < end:
        time.sleep(0.01)
    assert sum("too many" in line for line in refusals()) == 8
    time.sleep(AUTHENTICATE)
    assert len(refusals()) == 12
    for each in crowd:
        each.leave()
    late = Intruder(siege.address)
    late.introduce(bytes(32), siege.nodes[0])
    assert late.refused() == UNAUTHENTICATED  # heard, and found wanting
    siege.withstood()


def test_a_server_that_did_not_hand_out_the_token_is_not_obeyed(
    make_grid: GridMaker,
) -> None:
    node = Handshake(RUN_ID, 5)
    node.server_nonce = b"x" * 32
    node.check_server(b"t" * 32, node.server_proof(b"t" * 32))
    for proof in (b"", node.node_proof(b"t" * 32), node.server_proof(b"u" * 32)):
        with pytest.raises(Refusal):
            node.check_server(b"t" * 32, proof)


# --- TLS --------------------------------------------------------------------------


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    names = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain, secret = folder / f"{name}.pem", folder / f"{name}.key"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return chain, secret


def test_sessions_over_tls(make_grid: GridMaker, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "server")
    grid = make_grid(2, certificate=chain, private_key=key)
    replies = list(grid.send_and_receive(to_all(grid, weights(), "train")))
    assert [reply.has_content() for reply in replies] == [True, True]
    # Plaintext gets nowhere on that port.
    offer = Offer.from_record(grid._grid.sent[0].content.config_records[OPEN_RECORD])
    assert offer.certificate == chain.read_bytes()
    assert Intruder(offer.address).refused() == grpc.StatusCode.UNAVAILABLE
    replies = list(grid.send_and_receive(to_all(grid, weights(), "train")))
    assert [reply.has_content() for reply in replies] == [True, True]


def test_a_server_with_another_certificate_is_not_trusted(
    make_grid: GridMaker, tmp_path: Path
) -> None:
    chain, key = certificate(tmp_path, "server")
    other, _ = certificate(tmp_path, "other")
    grid = make_grid(
        1, certificate=chain, private_key=key, root_certificate=other, open_timeout=1.5
    )
    with pytest.raises(SessionError, match="node 1000"):
        grid.open()


def test_a_node_refuses_plaintext_to_another_machine() -> None:
    context = Context(RUN_ID, 1000, {}, RecordDict(), {})

    def offer(address: str, insecure: bool) -> Offer:
        return Offer(address, b"", bytes(32), insecure, True, "", 1.0, Limits())

    for address in ("192.0.2.7:9000", "example.org:9000", "[2001:db8::1]:9000"):
        with pytest.raises(ConfigError, match="refusing plaintext"):
            Session(counting_app(), context, offer(address, False), Hands())
        Session(counting_app(), context, offer(address, True), Hands())
    Session(counting_app(), context, offer("[::1]:9000", False), Hands())


def test_loopback() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "10.0.0.1", "localhost.example.org", "::", "127.example"):
        assert not is_loopback(host)


def test_the_token_is_never_said(siege: Siege) -> None:
    node = siege.nodes[0]
    token = siege.offers[node].token
    assert len(token) == 32
    assert len({offer.token for offer in siege.offers.values()}) == 2
    handshake = Handshake(RUN_ID, node)
    handshake.server_nonce = b"x" * 32
    for said in (
        handshake.hello(),
        handshake.node_proof(token),
        handshake.server_proof(token),
    ):
        assert token not in said
    siege.withstood()
