"""Finds TCP connections that never open a stream, so that they can be logged.

gRPC closes a connection that does not speak HTTP/2, fails the TLS handshake or stays
silent, and reports none of them. Linux lists the connections of a port, including those
that the server closed in the last minute. Connections that gRPC resets, because they
sent more than gRPC reads at once, disappear too soon to be found. Other operating
systems have no such list.
"""

import ipaddress
import time
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import unquote

Peer = tuple[str, int]

_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTEN: Final = "0A"
_ESTABLISHED: Final = ("01", "03")  # and connections that are being established


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
    """Finds the peers of a port that connected and never opened a stream."""

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
