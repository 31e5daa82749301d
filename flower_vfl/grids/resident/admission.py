"""Connections that are not authenticated yet, and those that were refused."""

import asyncio
import ipaddress
import time
from collections import Counter
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from flwr.supercore import log

_INTERVAL: Final = 10.0
_LINES: Final = 20  # most refusals that are logged one by one in an interval
_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTEN: Final = "0A"
_ESTABLISHED: Final = ("01", "03")  # and connections that are being established

Peer = tuple[str, int]


class WaitingStreams:
    """The streams that are not authenticated yet, in order of arrival.

    When there are too many, the oldest stream of the largest group is timed out. A
    group names the same node from one host, so a stranger displaces itself.
    """

    def __init__(self) -> None:
        self._groups: dict[asyncio.Timeout, tuple[str, int | None]] = {}

    def add(self, timeout: asyncio.Timeout, peer: str, limit: int) -> None:
        """Add a stream by its timeout, after making room for it."""
        while len(self._groups) >= limit:
            [(largest, _)] = Counter(self._groups.values()).most_common(1)
            oldest = next(t for t, group in self._groups.items() if group == largest)
            del self._groups[oldest]
            if not oldest.expired():
                oldest.reschedule(0.0)
        self._groups[timeout] = (peer.rpartition(":")[0], None)

    def name(self, timeout: asyncio.Timeout, node_id: int) -> None:
        """Note that a stream names a node that is expected to connect."""
        if timeout in self._groups:
            self._groups[timeout] = (self._groups[timeout][0], node_id)

    def remove(self, timeout: asyncio.Timeout) -> bool:
        """Forget a stream; return whether it still had its place."""
        return self._groups.pop(timeout, None) is not None


class RefusalLog:
    """Logs refused connections, and only counts them when there are too many."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._count = 0

    def add(self, peer: str, problem: object) -> None:
        """Log one refusal, or count it."""
        self.flush()
        self._count += 1
        if self._count <= _LINES:
            log(WARNING, "Session refused: peer %s: %s", peer, problem)

    def flush(self) -> None:
        """Log how many refusals were only counted, once an interval."""
        if time.monotonic() - self._start < _INTERVAL:
            return
        if self._count > _LINES:
            text = "Session refused: %s more connections in the last %g s"
            log(WARNING, text, self._count - _LINES, _INTERVAL)
        self._start, self._count = time.monotonic(), 0


def parse_grpc_peer(text: str) -> Peer:
    """Return host and port of a peer in gRPC's notation."""
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return _normalize(host.strip("[]")), int(port)


@lru_cache(1 << 15)  # a flood leaves thousands of closed connections for a minute
def parse_kernel_address(text: str) -> Peer:
    """Return host and port of an address in the notation of ``/proc/net/tcp``."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    return _normalize(str(ipaddress.ip_address(b"".join(words)))), int(port, 16)


def _normalize(host: str) -> str:
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


class ConnectionMonitor:
    """Finds the peers of a port that connected and never opened a stream.

    gRPC closes them and reports none. Linux lists the connections of a port, also
    those closed in the last minute, but not those that were reset.
    """

    def __init__(self, port: int, timeout: float) -> None:
        self._port = port
        self._timeout = timeout
        self._known: set[Peer] = set()
        self._first_seen: dict[Peer, float] = {}

    def ignore(self, peer: str) -> None:
        """Exclude a peer that has opened a stream, which is logged elsewhere."""
        if peer.startswith(("ipv4:", "ipv6:")):
            self._known.add(parse_grpc_peer(peer))

    def poll(self) -> list[str]:
        """Return the peers found since the last call, in gRPC's notation."""
        now, found = time.monotonic(), []
        states = self._states()
        self._known &= states.keys()
        self._first_seen = {p: t for p, t in self._first_seen.items() if p in states}
        for peer, state in states.items():
            if peer in self._known:
                continue
            since = self._first_seen.setdefault(peer, now)
            if state not in _ESTABLISHED or now - since > self._timeout:
                self._known.add(peer)
                kind = "ipv6" if ":" in peer[0] else "ipv4"
                found.append(f"{kind}:{peer[0]}:{peer[1]}")
        return found

    def _states(self) -> dict[Peer, str]:
        states = {}
        for table in _TABLES:
            try:
                lines = Path(table).read_text().splitlines()[1:]
            except OSError:
                continue
            for line in lines:
                _, local, remote, state, _ = line.split(maxsplit=4)
                if local.endswith(f":{self._port:04X}") and state != _LISTEN:
                    states[parse_kernel_address(remote)] = state
        return states
