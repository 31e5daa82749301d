"""Certificates and keys of a deployment to try out.

Between organisations, the server's certificate comes from a real authority and every
party makes its own key (see the README).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from flower_vfl.errors import ConfigError
from flower_vfl.parties.checkpoints import write_private


@dataclass(frozen=True)
class ServerFiles:
    """Files of the server's TLS."""

    authority: Path
    certificate: Path
    key: Path


def make_server_files(folder: Path, hosts: Sequence[str], days: int = 1) -> ServerFiles:
    """Make an authority and a server certificate; the authority's key is not kept."""
    try:
        import trustme
    except ImportError as error:
        remedy = "trustme: pip install 'flower-vfl[sim]'"
        raise ConfigError(f"a deployment's certificates need {remedy}") from error
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA(path_length=0)
    end = datetime.now(UTC) + timedelta(days=days)
    server = authority.issue_cert(*hosts, common_name=hosts[0], not_after=end)
    files = ServerFiles(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    authority.cert_pem.write_to_path(files.authority)
    server.cert_chain_pems[0].write_to_path(files.certificate)
    write_private(files.key, server.private_key_pem.bytes())
    return files


def make_key_pair(folder: Path, name: str) -> Path:
    """Make a SuperNode's key, like ``ssh-keygen -t ecdsa -b 384 -f <name>_key``."""
    folder.mkdir(parents=True, exist_ok=True)
    key, private = ec.generate_private_key(ec.SECP384R1()), folder / f"{name}_key"
    openssh, plain = PrivateFormat.OpenSSH, NoEncryption()
    write_private(private, key.private_bytes(Encoding.PEM, openssh, plain))
    text = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    private.with_suffix(".pub").write_bytes(text + b"\n")
    return private
