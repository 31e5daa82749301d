"""TCP connections without a stream are found once."""

from __future__ import annotations

import socket
import time

import pytest

from flower_vfl.grids.resident.admission import (
    ConnectionMonitor,
    parse_grpc_peer,
    parse_kernel_address,
)


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:127.0.0.1:5000", ("127.0.0.1", 5000)),
        ("ipv6:%5B::1%5D:80", ("::1", 80)),
        ("ipv6:%5B::ffff:10.0.0.7%5D:443", ("10.0.0.7", 443)),
    ],
)
def test_peers_in_the_notation_of_grpc(text: str, peer: tuple[str, int]) -> None:
    assert parse_grpc_peer(text) == peer


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("0100007F:1F90", ("127.0.0.1", 8080)),
        ("00000000000000000000000001000000:0050", ("::1", 80)),
        ("0000000000000000FFFF00000700000A:01BB", ("10.0.0.7", 443)),
    ],
)
def test_addresses_in_the_notation_of_linux(text: str, peer: tuple[str, int]) -> None:
    assert parse_kernel_address(text) == peer


def test_a_silent_connection_is_found_once_and_an_ignored_one_never() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monitor = ConnectionMonitor(port, timeout=0.05)
        with (
            socket.create_connection(("127.0.0.1", port)) as silent,
            socket.create_connection(("127.0.0.1", port)) as known,
        ):
            monitor.ignore(f"ipv4:127.0.0.1:{known.getsockname()[1]}")
            assert monitor.poll() == []
            time.sleep(0.1)
            name = f"ipv4:127.0.0.1:{silent.getsockname()[1]}"
            assert monitor.poll() == [name]
            assert monitor.poll() == []


def test_a_connection_that_this_end_closed_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monitor = ConnectionMonitor(port, timeout=60.0)
        with socket.create_connection(("127.0.0.1", port)) as caller:
            accepted, _ = server.accept()
            accepted.close()
            caller.recv(1)
            name = f"ipv4:127.0.0.1:{caller.getsockname()[1]}"
        assert monitor.poll() == [name]
