"""The proxy of ``benchmarks/wan.py``: delay, rate, order and count of bytes."""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "wan.py"


@pytest.fixture(scope="module")
def wan() -> ModuleType:
    pytest.importorskip("tensorboard")
    spec = importlib.util.spec_from_file_location("wan_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their types
    spec.loader.exec_module(module)
    return module


def echo_once(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)


def test_bytes_arrive_in_order_not_before_they_are_due(wan: ModuleType) -> None:
    sent = bytes(range(256)) * 400  # 102,400 bytes: 82 ms each way at 10 Mbit/s
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo_once, args=(server,), daemon=True).start()
        link = wan.Link(milliseconds=40, megabits=10)
        with wan.proxied(link, server.getsockname()[1]) as (proxy, port):
            with socket.create_connection(("127.0.0.1", port)) as line:
                started = time.monotonic()
                line.sendall(sent)
                received, first = b"", 0.0
                while len(received) < len(sent):
                    received += line.recv(65536)
                    first = first or time.monotonic() - started
                seconds = time.monotonic() - started
            assert received == sent
            assert proxy.bytes_until(time.time()) == 2 * len(sent)
    assert first >= 0.040  # a round trip
    assert seconds >= 0.040 + len(sent) * 8e-7  # and the line's rate
