"""Who may open a session: the handshake, and the server's list of invited nodes.

The token reaches the node inside a Flower message and never travels on the stream:

1. node → server: run id, node id and a nonce (`hello`);
2. server → node: another nonce (`challenge`);
3. node → server: HMAC-SHA256 under the token of both nonces, run and node (`proof`);
4. server → node: the same with the server's label (`welcome`), so that the node knows
   that it talks to the one who handed out the token.

A recorded handshake is worthless, because the server's nonce is new every time.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading
from typing import Final

from .wire import WireError

TOKEN_BYTES: Final = 32
NONCE_BYTES: Final = 32
MAX_HANDSHAKE: Final = 256
"""Largest frame before a peer has proved who it is, in bytes."""

_MAGIC: Final = b"flower-vfl/1"
_HELLO: Final = struct.Struct(f"<{len(_MAGIC)}sQQ{NONCE_BYTES}s")
_MASK: Final = (1 << 64) - 1
_NODE_LABEL: Final = b"node"
_SERVER_LABEL: Final = b"server"


class Refusal(Exception):  # noqa: N818 (an outcome, not a fault)
    """A connection that is turned away."""

    def __init__(self, reason: str, again: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.again = again


class Handshake:
    """The nonces and the identity that one handshake is about."""

    def __init__(
        self, run_id: int, node_id: int, node_nonce: bytes | None = None
    ) -> None:
        self.run_id = run_id
        self.node_id = node_id
        self.node_nonce = node_nonce or secrets.token_bytes(NONCE_BYTES)
        self.server_nonce = b""

    def hello(self) -> bytes:
        """Return the node's first frame."""
        run, node = self.run_id & _MASK, self.node_id & _MASK
        return _HELLO.pack(_MAGIC, run, node, self.node_nonce)

    @classmethod
    def from_hello(cls, frame: bytes | memoryview) -> Handshake:
        """Read the node's first frame."""
        if len(frame) != _HELLO.size:
            raise WireError("garbage instead of a greeting")
        magic, run_id, node_id, nonce = _HELLO.unpack(frame)
        if magic != _MAGIC:
            raise WireError("garbage instead of a greeting")
        return cls(run_id, node_id, nonce)

    def node_proof(self, token: bytes) -> bytes:
        """Return what only the invited node can say."""
        return self._mac(token, _NODE_LABEL)

    def server_proof(self, token: bytes) -> bytes:
        """Return what only the inviting server can say."""
        return self._mac(token, _SERVER_LABEL)

    def check_server(self, token: bytes, proof: bytes | memoryview) -> None:
        """Make sure that the peer is the server that handed out the token."""
        if not hmac.compare_digest(self.server_proof(token), bytes(proof)):
            raise Refusal("the server did not hand out this token")

    def _mac(self, token: bytes, label: bytes) -> bytes:
        said = self.hello() + self.server_nonce + label
        return hmac.new(token, said, hashlib.sha256).digest()


class TokenRegistry:
    """The tokens that a server has handed out, and how many peers are unproven."""

    def __init__(self, pending: int) -> None:
        self._pending = pending
        self._unproven = 0
        self._tokens: dict[tuple[int, int], bytes] = {}
        self._lock = threading.Lock()

    def invite(self, run_id: int, node_id: int) -> bytes:
        """Return a new token for a node; an older one of the same node is void."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._tokens[run_id & _MASK, node_id & _MASK] = token
        return token

    def revoke(self, run_id: int, node_id: int) -> None:
        """Make the node's token void."""
        with self._lock:
            self._tokens.pop((run_id & _MASK, node_id & _MASK), None)

    def enter(self, expected: int) -> None:
        """Count a peer that has yet to prove itself."""
        with self._lock:
            if self._unproven >= self._pending + expected:
                raise Refusal("too many connections that are not admitted", again=True)
            self._unproven += 1

    def leave(self) -> None:
        """Take back one `enter`: the peer was admitted or turned away."""
        with self._lock:
            self._unproven -= 1

    def check(self, handshake: Handshake, proof: bytes | memoryview) -> bytes:
        """Return the node's token if the proof is right."""
        with self._lock:
            token = self._tokens.get((handshake.run_id, handshake.node_id))
        # An unknown node takes as long as a known one.
        right = handshake.node_proof(token or secrets.token_bytes(TOKEN_BYTES))
        same = hmac.compare_digest(right, bytes(proof))
        if token is None:
            raise Refusal(
                f"node {handshake.node_id} of run {handshake.run_id} was not invited"
            )
        if not same:
            raise Refusal(f"wrong proof for node {handshake.node_id}")
        return token
