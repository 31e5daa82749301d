"""Where a grid listens, what its nodes dial, and under which certificate."""

from __future__ import annotations

from pathlib import Path

import grpc

from flower_vfl.errors import ConfigError

from .settings import is_loopback, is_wildcard, join_address, split_address

Pem = bytes | str | Path
"""PEM bytes, or the file that holds them."""


class Endpoint:
    """The network side of a grid."""

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
            raise ConfigError(f"nobody can dial {self._host}: say what to `advertise`")
        self.credentials: grpc.ServerCredentials | None = None
        self.root = b""
        if (certificate is None) != (private_key is None):
            raise ConfigError("`certificate` and `private_key` go together")
        if certificate is not None and private_key is not None:
            pair = (_pem(private_key), _pem(certificate))
            self.credentials = grpc.ssl_server_credentials([pair])
            self.root = _pem(root_certificate or certificate)
        elif not (insecure or is_loopback(self._host)):
            raise ConfigError(
                f"refusing plaintext on {address}, which others can reach. Give a "
                "certificate and its private key, or `insecure=True` to allow it"
            )

    def dial(self, port: int) -> str:
        """Return what the nodes dial."""
        host, advertised = self._advertised or (self._host, 0)
        return join_address(host, advertised or port)


def _pem(value: Pem) -> bytes:
    return value if isinstance(value, bytes) else Path(value).read_bytes()
