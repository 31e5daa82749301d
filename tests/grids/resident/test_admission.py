"""Intruders of every kind at a server's door, while a training goes on behind it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import grpc
import pytest
from resident_cases import RUN_ID, GridMaker
from siege import AUTHENTICATE, Intruder, Siege

from flower_vfl.grids.resident import Limits
from flower_vfl.grids.resident.admission import Handshake, Refusal, TokenRegistry
from flower_vfl.grids.resident.settings import CHUNK


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
    guests = TokenRegistry(1)
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
