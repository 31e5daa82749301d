"""TCP connections that never became a stream, noticed for the log.

gRPC closes a connection that speaks no HTTP/2, fails the TLS handshake or stays silent,
and tells nobody. Linux lists the connections of a port, also for a minute those that
this end has closed, so a look every second finds them. One that gRPC resets, because it
sent more than gRPC reads at once, is gone too soon; outside Linux none is found.
"""

from __future__ import annotations

import ipaddress
import time
from pathlib import Path
from typing import Final
from urllib.parse import unquote

Peer = tuple[str, int]

_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTEN: Final = "0A"
_ESTABLISHED: Final = ("01", "03")  # and a connection that is being made


def peer_of(text: str) -> Peer:
    """Return host and port of a peer as gRPC names it."""
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


def read_endpoint(text: str) -> Peer:
    """Return host and port of an address as the kernel lists it."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    return _plain(str(ipaddress.ip_address(b"".join(words)))), int(port, 16)


class Strangers:
    """Finds the peers of a port that connected and never opened a stream."""

    def __init__(self, port: int, patience: float) -> None:
        self._port = port
        self._patience = patience
        self._known: set[Peer] = set()
        self._seen: dict[Peer, float] = {}

    def know(self, peer: str) -> None:
        """Note that a peer has opened a stream, which has its own log lines."""
        if peer.startswith(("ipv4:", "ipv6:")):
            self._known.add(peer_of(peer))

    def look(self) -> list[str]:
        """Return the peers that have not been returned before, as gRPC names them."""
        now, found = time.monotonic(), []
        states = self._states()
        self._known &= states.keys()
        self._seen = {p: t for p, t in self._seen.items() if p in states}
        for peer, state in states.items():
            if peer in self._known:
                continue
            since = self._seen.setdefault(peer, now)
            if state not in _ESTABLISHED or now - since > self._patience:
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
                _, local, remote, state, *_ = line.split()
                mine = int(local.rpartition(":")[2], 16) == self._port
                if mine and state != _LISTEN:
                    states[read_endpoint(remote)] = state
        return states
