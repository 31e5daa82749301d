"""Certificates and keys of one deployment on this machine, valid for a day.

Between organisations, the server's certificate comes from a real authority and every
party makes its own key (see the README).
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = timedelta(days=1)
_CLOCK_SKEW = timedelta(hours=1)
_CURVE = ec.SECP384R1


@dataclass(frozen=True)
class ServerFiles:
    """Files of the server's TLS."""

    authority: Path
    certificate: Path
    key: Path


def make_server_files(folder: Path, hosts: Sequence[str]) -> ServerFiles:
    """Make an authority and a server certificate; the authority's key is not kept."""
    folder.mkdir(parents=True, exist_ok=True)
    issuer = "flower-vfl authority of one deployment"
    issuer_key, key = (ec.generate_private_key(_CURVE()) for _ in range(2))
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    authority = _signed(issuer, issuer_key, issuer, issuer_key, constraints)
    server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    certificate = _signed(hosts[0], key, issuer, issuer_key, constraints, server, names)
    files = ServerFiles(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    files.authority.write_bytes(authority)
    files.certificate.write_bytes(certificate)
    _write_private(files.key, key, serialization.PrivateFormat.PKCS8)
    return files


def make_key_pair(folder: Path, name: str) -> Path:
    """Make a SuperNode's key, like ``ssh-keygen -t ecdsa -b 384 -f <name>_key``."""
    folder.mkdir(parents=True, exist_ok=True)
    key, private = ec.generate_private_key(_CURVE()), folder / f"{name}_key"
    _write_private(private, key, serialization.PrivateFormat.OpenSSH)
    text = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    private.with_suffix(".pub").write_bytes(text + b"\n")
    return private


def _signed(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    constraints: x509.BasicConstraints,
    *extensions: x509.ExtensionType,
) -> bytes:
    """Return a certificate for signatures, or of an authority for certificates."""
    now, public, ca = datetime.now(UTC), key.public_key(), constraints.ca
    usage = x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)
    own = x509.SubjectKeyIdentifier.from_public_key(public)
    other = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFETIME)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in (own, other, *extensions):
        builder = builder.add_extension(extension, critical=False)
    signed = builder.sign(issuer_key, hashes.SHA384())
    return signed.public_bytes(serialization.Encoding.PEM)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_private(
    path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat
) -> None:
    """Write a private key that no other user can read at any moment."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    plain = serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
