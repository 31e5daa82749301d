"""What both ends of a session agree on: names, limits, addresses, the offer."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from flwr.app import ConfigRecord

from flower_vfl.errors import ConfigError, VerticalError

OPEN_TYPE: Final = "query.resident_open"
"""Type of the one Flower message that opens a session."""
OPEN_RECORD: Final = "flower_vfl.grids.resident"
"""Key of the `ConfigRecord` in that message and in its reply."""
SERVICE: Final = "flower_vfl.Resident"
METHOD: Final = "Session"
CHUNK: Final = 1 << 22
"""Largest piece of a frame that one gRPC message carries, in bytes."""
WIRE_DTYPES: Final = ("float16", "bfloat16")


class SessionError(VerticalError):
    """Nodes that a session could not be opened with.

    Parameters
    ----------
    reasons : Mapping[int, str]
        For each node id, what went wrong.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        lines = "; ".join(f"node {node}: {why}" for node, why in reasons.items())
        super().__init__(
            f"no session with {len(reasons)} node(s): {lines}. Check that the "
            "ClientApp is wrapped with `resident(...)` and that the node can reach "
            "the address of the ResidentGrid."
        )

    def __reduce__(self) -> tuple[type[SessionError], tuple[dict[int, str]]]:
        """Survive a trip through Ray's pickling."""
        return type(self), (self.reasons,)


@dataclass(frozen=True)
class Limits:
    """Limits of every session of a `ResidentGrid`.

    Parameters
    ----------
    max_frame : int (default: 256 MiB)
        Largest message in either direction, in bytes.
    authenticate : float (default: 10.0)
        Seconds that a new connection has to prove who it is.
    pending : int (default: 16)
        Connections that may be unproven at the same time, beyond one for each node
        that a session was offered to and that is not connected.
    silence : float (default: 30.0)
        Seconds that a node may stay away before its unanswered messages come back as
        errors, and that a node looks for a lost server before it gives up.
    idle : float (default: 3600.0)
        Seconds without a message after which a connected node ends its session.
    keepalive : float (default: 10.0)
        Seconds between the pings that find a dead connection.
    """

    max_frame: int = 256 << 20
    authenticate: float = 10.0
    pending: int = 16
    silence: float = 30.0
    idle: float = 3600.0
    keepalive: float = 10.0

    def __post_init__(self) -> None:
        """Refuse limits that nothing can pass."""
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigError(f"limit '{field.name}' must be above zero")


@dataclass(frozen=True)
class Offer:
    """What the opening message tells one node."""

    address: str
    certificate: bytes
    token: bytes
    insecure: bool
    detached: bool
    wire_dtype: str
    patience: float
    limits: Limits

    def to_record(self) -> ConfigRecord:
        """Return the offer as a record of a Flower message."""
        plain: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "limits"
        }
        return ConfigRecord({**plain, **asdict(self.limits)})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Offer:
        """Read the offer out of a record of a Flower message."""
        values: dict[str, Any] = dict(record)
        limits = Limits(**{f.name: values.pop(f.name) for f in fields(Limits)})
        return cls(limits=limits, **values)


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[ipv6]:port``; a missing port is 0."""
    host, port = address, ""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        port = rest.removeprefix(":")
    elif address.count(":") == 1:
        host, _, port = address.partition(":")
    if not host or not (port or "0").isdecimal() or int(port or 0) > 65535:
        raise ConfigError(f"'{address}' is not an address of the form host:port")
    return host, int(port or 0)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine, whatever the network says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Return whether the host means every interface, which nobody can dial."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def transport_options(limits: Limits) -> list[tuple[str, int]]:
    """Return the gRPC options that both ends share."""
    every = int(limits.keepalive * 1000)
    return [
        ("grpc.max_receive_message_length", CHUNK + 16),
        ("grpc.max_send_message_length", CHUNK + 16),
        # Larger reads than 8 KiB: noise is read whole, so that its connection is closed
        # and not reset, which is what lets it be noticed (see strangers.py).
        ("grpc.experimental.tcp_read_chunk_size", 1 << 17),
        ("grpc.experimental.tcp_min_read_chunk_size", 1 << 15),
        ("grpc.keepalive_time_ms", every),
        ("grpc.keepalive_timeout_ms", every),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", every // 2),
    ]
