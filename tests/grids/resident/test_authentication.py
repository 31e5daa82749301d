"""Connections that must be refused while a training goes on."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc
import pytest
from resident_cases import RUN_ID, GridMaker
from untrusted_client import AUTHENTICATE, BackgroundTraining, UntrustedClient

from flower_vfl.grids.resident import Limits
from flower_vfl.grids.resident.authentication import (
    Authentication,
    RefusedError,
    TokenRegistry,
)
from flower_vfl.grids.resident.settings import CHUNK


@pytest.fixture(scope="module")
def shared_training(make_module_grid: GridMaker) -> Iterator[BackgroundTraining]:
    limits = Limits(authenticate=AUTHENTICATE, pending=4, max_frame=3 * CHUNK)
    made = BackgroundTraining(make_module_grid(2, limits=limits))
    yield made
    made.stop()


@pytest.fixture
def training(shared_training: BackgroundTraining) -> Iterator[BackgroundTraining]:
    """Return the training, which must have gone on at the end of each test."""
    yield shared_training
    shared_training.check()


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
    end = time.monotonic() + 30
    while not refusals() and time.monotonic() < end:
        time.sleep(0.01)
    [line] = refusals()
    assert "ipv4:127.0.0.1:" in line
    for word in words:
        assert word in line


def test_an_empty_token(training: BackgroundTraining, refusals: Refusals) -> None:
    client = UntrustedClient(training.address)
    client.authenticate(b"", training.nodes[0])
    assert client.status() == UNAUTHENTICATED
    check_line(refusals, "wrong proof", str(training.nodes[0]))


def test_a_wrong_token(training: BackgroundTraining, refusals: Refusals) -> None:
    client = UntrustedClient(training.address)
    client.authenticate(bytes(32), training.nodes[0])
    assert client.status() == UNAUTHENTICATED
    check_line(refusals, "wrong proof")


def test_the_token_of_another_node(
    training: BackgroundTraining, refusals: Refusals
) -> None:
    client = UntrustedClient(training.address)
    client.authenticate(training.offers[training.nodes[1]].token, training.nodes[0])
    assert client.status() == UNAUTHENTICATED
    check_line(refusals, "wrong proof")


@pytest.mark.parametrize("what", ["run", "node"])
def test_a_token_outside_its_run_or_node(
    training: BackgroundTraining, refusals: Refusals, what: str
) -> None:
    node = training.nodes[0]
    client = UntrustedClient(training.address)
    run_id, node_id = (RUN_ID + 1, node) if what == "run" else (RUN_ID, node + 500)
    client.authenticate(training.offers[node].token, node_id, run_id)
    assert client.status() == UNAUTHENTICATED
    check_line(refusals, "no valid token")


def test_a_replayed_handshake(training: BackgroundTraining, refusals: Refusals) -> None:
    # What an eavesdropper has of the handshake of the node.
    node = training.nodes[0]
    recorded = Authentication(RUN_ID, node)
    recorded.server_nonce = b"n" * 32
    proof = recorded.proof(training.offers[node].token, b"node")
    client = UntrustedClient(training.address)
    client.send(recorded.hello())
    assert client.receive() != recorded.server_nonce
    client.send(proof)
    assert client.status() == UNAUTHENTICATED
    check_line(refusals, "wrong proof")


def test_a_second_connection(training: BackgroundTraining, refusals: Refusals) -> None:
    node = training.nodes[0]
    client = UntrustedClient(training.address)
    client.authenticate(training.offers[node].token, node)
    # Not final: a node whose first connection was cut would do the same.
    assert client.status() == grpc.StatusCode.UNAVAILABLE
    check_line(refusals, "already connected", str(node))


def test_a_node_may_reconnect_with_its_token_until_it_gets_a_new_one() -> None:
    tokens = TokenRegistry()
    token = tokens.issue(RUN_ID, 5)
    for _ in range(2):
        node = Authentication(RUN_ID, 5)
        node.server_nonce = b"x" * 32
        assert tokens.check(node, node.proof(token, b"node")) == token
    tokens.issue(RUN_ID, 5)
    with pytest.raises(RefusedError):
        tokens.check(node, node.proof(token, b"node"))


@pytest.mark.parametrize(
    "chunk", [b"", b"\x00", b"\x00" + b"GET / HTTP/1.1" * 4, b"\xff" * 61, b"\x01" * 99]
)
def test_malformed_frames(
    training: BackgroundTraining, refusals: Refusals, chunk: bytes
) -> None:
    client = UntrustedClient(training.address)
    client.sent.put(chunk)
    assert client.status() == UNAUTHENTICATED
    check_line(refusals, "malformed")


def test_a_malformed_proof(training: BackgroundTraining, refusals: Refusals) -> None:
    client = UntrustedClient(training.address)
    client.send(Authentication(RUN_ID, training.nodes[0]).hello())
    client.receive()
    client.send(b"malformed")
    assert client.status() == UNAUTHENTICATED
    check_line(refusals, "wrong proof")


def test_an_unknown_method(training: BackgroundTraining, refusals: Refusals) -> None:
    assert UntrustedClient(training.address, "Other").status() == UNAUTHENTICATED
    check_line(refusals, "unknown method")


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40], ids=["http", "noise"]
)
def test_bytes_that_are_not_http2(
    training: BackgroundTraining, refusals: Refusals, words: bytes
) -> None:
    host, port = training.address.split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(words)
        client.settimeout(4 * AUTHENTICATE)
        with suppress(ConnectionResetError):
            while client.recv(4096):
                pass
    check_line(refusals, "never opened a stream")


@pytest.mark.parametrize("size", [1000, CHUNK, CHUNK + 100_000])
def test_an_oversized_first_frame(
    training: BackgroundTraining, refusals: Refusals, size: int
) -> None:
    client = UntrustedClient(training.address)
    client.sent.put(b"\x00" + bytes(size))
    assert client.status() != grpc.StatusCode.OK
    check_line(refusals)


def test_an_oversized_frame_of_an_authenticated_node(
    training: BackgroundTraining, refusals: Refusals
) -> None:
    # A node that was offered a session and did not connect; someone else does.
    server = training.grid._server
    assert server is not None
    token = server.create_session(RUN_ID, 4242)
    client = UntrustedClient(training.address)
    client.authenticate(token, 4242)
    client.receive()
    client.send(b"R" + bytes(4 * CHUNK))
    client.status()
    check_line(refusals, "over the limit", "4242")


def test_a_half_open_stream(training: BackgroundTraining, refusals: Refusals) -> None:
    silent, stuck = UntrustedClient(training.address), UntrustedClient(training.address)
    stuck.send(Authentication(RUN_ID, training.nodes[0]).hello())
    start = time.monotonic()
    assert silent.status() == grpc.StatusCode.UNAVAILABLE
    assert stuck.status() == grpc.StatusCode.UNAVAILABLE
    assert 0.5 * AUTHENTICATE < time.monotonic() - start < 30.0
    lines = refusals()
    assert len(lines) == 2
    assert all("too long" in line for line in lines)


def test_a_half_open_connection_is_closed(
    training: BackgroundTraining, refusals: Refusals
) -> None:
    host, port = training.address.split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.settimeout(30.0)
        while silent.recv(4096):
            pass
    check_line(refusals, "never opened a stream")


def test_leaving_during_the_handshake(
    training: BackgroundTraining, refusals: Refusals
) -> None:
    client = UntrustedClient(training.address)
    client.send(Authentication(RUN_ID, training.nodes[0]).hello())
    client.receive()
    client.close()
    check_line(refusals, "before it was authenticated")


def test_the_oldest_of_too_many_connections_are_refused(
    training: BackgroundTraining, refusals: Refusals
) -> None:
    many = [UntrustedClient(training.address) for _ in range(12)]
    end = time.monotonic() + 30
    while len(refusals()) < 8 and time.monotonic() < end:
        time.sleep(0.01)
    assert sum("too many" in line for line in refusals()) == 8
    while len(refusals()) < 12 and time.monotonic() < end + AUTHENTICATE:
        time.sleep(0.01)
    assert len(refusals()) == 12
    for each in many:
        each.close()
    late = UntrustedClient(training.address)
    late.authenticate(bytes(32), training.nodes[0])
    assert late.status() == UNAUTHENTICATED  # it was served


def test_a_server_that_did_not_issue_the_token_is_refused() -> None:
    node = Authentication(RUN_ID, 5)
    node.server_nonce = b"x" * 32
    node.check_server(b"t" * 32, node.proof(b"t" * 32, b"server"))
    for proof in (
        b"",
        node.proof(b"t" * 32, b"node"),
        node.proof(b"u" * 32, b"server"),
    ):
        with pytest.raises(RefusedError):
            node.check_server(b"t" * 32, proof)


def test_the_token_is_never_sent(training: BackgroundTraining) -> None:
    node_id = training.nodes[0]
    token = training.offers[node_id].token
    assert len(token) == 32
    assert len({offer.token for offer in training.offers.values()}) == 2
    node = Authentication(RUN_ID, node_id)
    node.server_nonce = b"x" * 32
    for frame in (
        node.hello(),
        node.proof(token, b"node"),
        node.proof(token, b"server"),
    ):
        assert token not in frame
