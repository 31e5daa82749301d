"""Mutual authentication of a node and the server with a shared token.

The token reaches the node inside a Flower message and is never sent on the stream. Each
end draws a nonce and proves with an HMAC of both nonces, run and node that it has the
token, so a recorded handshake cannot be replayed (docs/resident.md).
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Final

from .wire import WireError

_MAGIC: Final = b"flower-vfl/1"
_HELLO: Final = struct.Struct(f"<{len(_MAGIC)}sQQ32s")
_UINT64: Final = (1 << 64) - 1


class RefusedError(Exception):
    """A connection was refused; `retry` says whether the peer may try again."""

    def __init__(self, reason: str, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry


def session_number(token: bytes) -> int:
    """Return the number of a session in its frames, which follows from its token."""
    return int.from_bytes(hmac.digest(token, b"session", "sha256")[:8], "little")


class Authentication:
    """The identity and the nonces of one authentication handshake."""

    def __init__(self, run_id: int, node_id: int, node_nonce: bytes = b"") -> None:
        self.run_id = run_id & _UINT64
        self.node_id = node_id & _UINT64
        self.node_nonce = node_nonce or secrets.token_bytes(32)
        self.server_nonce = b""

    def hello(self) -> bytes:
        """Return the first frame that the node sends."""
        return _HELLO.pack(_MAGIC, self.run_id, self.node_id, self.node_nonce)

    @classmethod
    def from_hello(cls, frame: bytes | memoryview) -> Authentication:
        """Parse the first frame of a node."""
        if len(frame) != _HELLO.size or bytes(frame[: len(_MAGIC)]) != _MAGIC:
            raise WireError("malformed hello")
        _, run_id, node_id, nonce = _HELLO.unpack(frame)
        return cls(run_id, node_id, nonce)

    def proof(self, token: bytes, sender: bytes) -> bytes:
        """Return the HMAC by which ``b"node"`` or ``b"server"`` proves its token."""
        transcript = self.hello() + self.server_nonce + sender
        return hmac.digest(token, transcript, "sha256")

    def check_server(self, token: bytes, proof: bytes | memoryview) -> None:
        """Raise an error if the server does not know the token."""
        if not hmac.compare_digest(self.proof(token, b"server"), bytes(proof)):
            raise RefusedError("the server did not issue the token of this node")


class TokenRegistry:
    """The tokens that a server has issued and not revoked."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, int], bytes] = {}

    def issue(self, run_id: int, node_id: int) -> bytes:
        """Return a new token for a node and revoke its previous one."""
        token = secrets.token_bytes(32)
        self._tokens[run_id & _UINT64, node_id & _UINT64] = token
        return token

    def revoke(self, run_id: int, node_id: int) -> None:
        """Make the token of a node invalid."""
        self._tokens.pop((run_id & _UINT64, node_id & _UINT64), None)

    def check(self, peer: Authentication, proof: bytes | memoryview) -> bytes:
        """Return the token of a node if its proof is correct."""
        token = self._tokens.get((peer.run_id, peer.node_id))
        # An unknown node takes as long as a known one.
        expected = peer.proof(token or secrets.token_bytes(32), b"node")
        correct = hmac.compare_digest(expected, bytes(proof))
        node = f"node {peer.node_id} of run {peer.run_id}"
        if token is None:
            raise RefusedError(f"{node} has no valid token")
        if not correct:
            raise RefusedError(f"wrong proof for {node}")
        return token
