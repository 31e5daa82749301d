"""Settings that both ends of a session share: names, limits, addresses, the offer."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, Final

import grpc
from flwr.app import ConfigRecord

from flower_vfl.errors import ConfigError, VerticalError

OPEN_TYPE: Final = "query.resident_open"  # of the Flower message that opens a session
OPEN_RECORD: Final = "flower_vfl.grids.resident"  # in that message and in its reply
METHOD: Final = "/flower_vfl.Resident/Session"  # of gRPC
CHUNK: Final = 1 << 22  # bytes of the largest part of a frame in one gRPC message
WIRE_DTYPES: Final = ("float16", "bfloat16")
Pem = bytes | str | Path  # PEM bytes, or the file that holds them
REMEDY: Final = (
    "Other machines can read it: give the ResidentGrid a certificate and its private "
    "key, or `insecure=True` to allow it"
)


class SessionError(VerticalError):
    """Some nodes did not open a session.

    Parameters
    ----------
    reasons : Mapping[int, str]
        The reason for each node id.

    Examples
    --------
    >>> SessionError({7: "no answer"}).reasons
    {7: 'no answer'}
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        self.reasons = dict(reasons)
        nodes = "; ".join(f"node {node}: {why}" for node, why in reasons.items())
        remedy = "Wrap the ClientApp with `resident(...)`, and let nodes reach the grid"
        super().__init__(f"no session with {len(reasons)} node(s): {nodes}. {remedy}")

    def __reduce__(self) -> tuple[type[SessionError], tuple[dict[int, str]]]:
        """Keep the reasons when Ray pickles the error."""
        return type(self), (self.reasons,)


@dataclass(frozen=True)
class Limits:
    """Limits of every session of a `ResidentGrid`.

    Parameters
    ----------
    max_frame : int (default: 256 MiB)
        Largest message in either direction, in bytes.
    authenticate : float (default: 10.0)
        Seconds that a new connection has to authenticate itself.
    pending : int (default: 64)
        Connections that may be unauthenticated at the same time, beyond one for each
        node that is expected. The oldest makes room for the newest.
    silence : float (default: 30.0)
        Seconds that a node may be disconnected, and that it tries to reconnect.
    idle : float (default: 3600.0)
        Seconds without a message after which a connected node ends its session.
    keepalive : float (default: 10.0)
        Seconds between the pings that detect a dead connection.

    Examples
    --------
    >>> Limits(silence=5.0).silence
    5.0
    """

    max_frame: int = 256 << 20
    authenticate: float = 10.0
    pending: int = 64
    silence: float = 30.0
    idle: float = 3600.0
    keepalive: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigError(f"limit '{field.name}' must be above zero")


@dataclass(frozen=True)
class SessionOffer:
    """What the opening message tells one node."""

    address: str
    certificate: bytes
    token: bytes
    insecure: bool
    detached: bool
    wire_dtype: str
    connect_timeout: float
    limits: Limits
    path: str = ""  # of the server's Unix socket, if it has one

    def to_record(self) -> ConfigRecord:
        """Return the offer as a record of a Flower message."""
        values = asdict(self)
        limits = values.pop("limits")
        return ConfigRecord({**values, **limits})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> SessionOffer:
        """Read the offer from a record of a Flower message."""
        values: dict[str, Any] = dict(record)
        limits = Limits(**{f.name: values.pop(f.name) for f in fields(Limits)})
        return cls(limits=limits, **values)


def transport_options(limits: Limits) -> list[tuple[str, int]]:
    """Return the gRPC options of both ends."""
    interval = int(limits.keepalive * 1000)
    return [
        ("grpc.max_receive_message_length", CHUNK + 16),
        ("grpc.max_send_message_length", CHUNK + 16),
        # gRPC reads 8 KiB by default and resets connections that sent more without
        # being HTTP/2. Those that it closes can be logged (ConnectionMonitor).
        ("grpc.experimental.tcp_read_chunk_size", 1 << 17),
        ("grpc.experimental.tcp_min_read_chunk_size", 1 << 15),
        ("grpc.keepalive_time_ms", interval),
        ("grpc.keepalive_timeout_ms", interval),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", interval // 2),
    ]


class Endpoint:
    """Where a grid listens, what its nodes connect to, and its certificate."""

    def __init__(
        self, address: str, advertise: str | None, insecure: bool, *pems: Pem | None
    ) -> None:
        certificate, private_key, root_certificate = pems
        self.address = address
        self.insecure = insecure
        self._host, _ = split_address(address)
        self._advertised = None if advertise is None else split_address(advertise)
        ip = _ip_address(self._host)
        if ip is not None and ip.is_unspecified and advertise is None:
            raise ConfigError(f"nodes cannot connect to {self._host}: set `advertise`")
        self.credentials: grpc.ServerCredentials | None = None
        self.root = b""
        if (certificate is None) != (private_key is None):
            raise ConfigError("`certificate` and `private_key` go together")
        if certificate is not None and private_key is not None:
            pair = (_read_pem(private_key), _read_pem(certificate))
            self.credentials = grpc.ssl_server_credentials([pair])
            self.root = _read_pem(root_certificate or certificate)
        elif not (insecure or is_loopback(self._host)):
            raise ConfigError(f"refusing plaintext on {address}. {REMEDY}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect, and nothing is to be encrypted."""
        plain = self.credentials is None and self._advertised is None
        return plain and is_loopback(self._host)

    def advertised(self, port: int) -> str:
        """Return the address that nodes connect to."""
        host, advertised = self._advertised or (self._host, 0)
        return join_address(host, advertised or port)


def _read_pem(value: Pem) -> bytes:
    return value if isinstance(value, bytes) else Path(value).read_bytes()


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


def _ip_address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that a host is without asking a name server."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether a host is certainly this machine."""
    address = _ip_address(host)
    return address is not None and address.is_loopback
