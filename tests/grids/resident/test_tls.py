"""Sessions over TLS, and where plaintext is refused."""

from __future__ import annotations

import asyncio
import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flwr.app import Context, RecordDict, UserConfigValue
from resident_cases import RUN_ID, GridMaker, counting_app, to_all, weights
from torch import nn
from untrusted_client import UntrustedClient

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    NodePolicy,
    PartyError,
    PassiveParty,
    ResidentGrid,
    resident,
    vertical_client_app,
)
from flower_vfl.grids.resident import Limits, SessionError
from flower_vfl.grids.resident.event_loop import event_loop
from flower_vfl.grids.resident.executor import Executor
from flower_vfl.grids.resident.local_socket import Listener
from flower_vfl.grids.resident.session import NodeSession
from flower_vfl.grids.resident.settings import OPEN_RECORD, SessionOffer, is_loopback
from flower_vfl.strategies import VerticalStrategy


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    names = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
    ]
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain, secret = folder / f"{name}.pem", folder / f"{name}.key"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return chain, secret


def test_sessions_over_tls(make_grid: GridMaker, tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "server")
    grid = make_grid(2, certificate=chain, private_key=key)
    replies = list(grid.send_and_receive(to_all(grid, weights(), "train")))
    assert [reply.has_content() for reply in replies] == [True, True]
    # The port refuses plaintext.
    record = grid._grid.sent[0].content.config_records[OPEN_RECORD]
    offer = SessionOffer.from_record(record)
    assert offer.certificate == chain.read_bytes()
    assert UntrustedClient(offer.address).status() == grpc.StatusCode.UNAVAILABLE
    replies = list(grid.send_and_receive(to_all(grid, weights(), "train")))
    assert [reply.has_content() for reply in replies] == [True, True]


def test_a_server_with_another_certificate_is_not_trusted(
    make_grid: GridMaker, tmp_path: Path
) -> None:
    chain, key = certificate(tmp_path, "server")
    other, _ = certificate(tmp_path, "other")
    grid = make_grid(
        1, certificate=chain, private_key=key, root_certificate=other, open_timeout=0.7
    )
    with pytest.raises(SessionError, match="node 1000"):
        grid.open()


def test_a_node_refuses_plaintext_to_another_machine() -> None:
    context = Context(RUN_ID, 1000, {}, RecordDict(), {})

    def offer(address: str, insecure: bool) -> SessionOffer:
        return SessionOffer(address, b"", bytes(32), insecure, True, "", 1.0, Limits())

    for address in ("192.0.2.7:9000", "example.org:9000", "[2001:db8::1]:9000"):
        with pytest.raises(ConfigError, match="refusing plaintext"):
            NodeSession(counting_app(), context, offer(address, False), Executor())
        NodeSession(counting_app(), context, offer(address, True), Executor())
    NodeSession(counting_app(), context, offer("[::1]:9000", False), Executor())


def test_a_node_that_requires_tls_takes_nothing_else(tmp_path: Path) -> None:
    """Neither plaintext on loopback nor the Unix socket that an offer may name."""
    config: dict[str, UserConfigValue] = {"require-tls": True}
    context = Context(RUN_ID, 1000, config, RecordDict(), {})
    chain, _ = certificate(tmp_path, "server")
    listener = Listener()

    def session(given: bytes) -> NodeSession:
        limits = Limits(authenticate=1.0)
        rest = bytes(32), True, True, "", 0.2, limits, listener.path
        offer = SessionOffer("127.0.0.1:9", given, *rest)
        return NodeSession(counting_app(), context, offer, Executor())

    try:
        with pytest.raises(ConfigError, match="has no certificate"):
            session(b"")
        work = session(chain.read_bytes()).run()
        ended = asyncio.run_coroutine_threadsafe(work, event_loop()).result(20)
        assert ended.startswith("no server at 127.0.0.1:9")
        with pytest.raises(BlockingIOError):  # nobody has connected
            listener.socket.accept()
    finally:
        listener.close()


def test_a_policy_of_the_app_requires_tls_too(tmp_path: Path) -> None:
    def label(_: Context) -> LabelParty:
        return LabelParty(torch.arange(40) % 2, CrossEntropy(nn.Linear(4, 1)))

    def passive(_: Context) -> PassiveParty:
        return PassiveParty(torch.randn(40, 3), nn.Linear(3, 4))

    def connect(**given: Path) -> list[str]:
        app = vertical_client_app(
            passive, label, policy=lambda _: NodePolicy(require_tls=True)
        )
        nodes = [{"role": "label"}, {"role": "passive", "name": "shop"}]
        with ResidentGrid(InProcessGrid(resident(app), nodes), **given) as grid:
            training = VerticalStrategy(progress=False).connect(grid)
            return [*training.participants.passive]

    with pytest.raises(PartyError, match=r"plaintext.*require-tls.*a certificate"):
        connect()
    chain, key = certificate(tmp_path, "server")
    assert connect(certificate=chain, private_key=key) == ["shop"]


def test_loopback() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "10.0.0.1", "localhost.example.org", "::", "127.example"):
        assert not is_loopback(host)
