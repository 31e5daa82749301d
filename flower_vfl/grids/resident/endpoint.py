"""Network addresses, and the address and certificate of a grid."""

import ipaddress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import grpc

from flower_vfl.errors import ConfigError

Pem = bytes | str | Path
"""PEM bytes, or the file that holds them."""


class Endpoint:
    """Where a grid listens, what its nodes connect to, and its certificate."""

    def __init__(
        self,
        address: str,
        advertise: str | None,
        certificate: Pem | None,
        private_key: Pem | None,
        root_certificate: Pem | None,
        insecure: bool,
    ) -> None:
        self.address = address
        self.insecure = insecure
        self._host, _ = split_address(address)
        self._advertised = None if advertise is None else split_address(advertise)
        if is_wildcard(self._host) and advertise is None:
            raise ConfigError(
                f"nodes cannot connect to {self._host}: give an address to `advertise`"
            )
        self.credentials: grpc.ServerCredentials | None = None
        self.root = b""
        if (certificate is None) != (private_key is None):
            raise ConfigError("`certificate` and `private_key` go together")
        if certificate is not None and private_key is not None:
            pair = (_read_pem(private_key), _read_pem(certificate))
            self.credentials = grpc.ssl_server_credentials([pair])
            self.root = _read_pem(root_certificate or certificate)
        elif not (insecure or is_loopback(self._host)):
            raise ConfigError(
                f"refusing plaintext on {address}, which other machines can reach. "
                "Give a certificate and its private key, or `insecure=True` to allow it"
            )

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


def is_wildcard(host: str) -> bool:
    """Return whether a host stands for all network interfaces."""
    address = _ip_address(host)
    return address is not None and address.is_unspecified
