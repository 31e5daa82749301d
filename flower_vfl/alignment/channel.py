"""Encrypted chunks: only the receiver can read them, only the sender can write them.

Each party has an X25519 identity whose public key the others have pinned, and sends a
`Hello` with a key of this session. Two parties derive a key for each direction from the
four Diffie-Hellman values of their identities and session keys (the pattern KK of the
Noise framework): nothing of an earlier session can be replayed, and an identity that is
stolen later decrypts nothing. A chunk is encrypted with ChaCha20-Poly1305; session,
agreed settings, header and the chunk's number in its direction are authenticated too.
Without pins, a server could replace the hellos by its own and read everything: such a
channel needs a server that is declared trusted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import x25519
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flower_vfl.errors import ConfigError, PartyError

from .elements import TAG, Group, framed
from .messages import REMEDY, EncryptedChunk, Header, Hello, RoundMessage

_REMEDY = f"Somebody may be changing messages on their way. {REMEDY}"


class ChannelError(PartyError):
    """A hello or a chunk that was changed, or that came out of order."""


class Identity:
    """The long-term X25519 key pair of a party.

    Parameters
    ----------
    private : bytes | None (default: None)
        The 32 bytes of the private key; None generates a new one.

    Examples
    --------
    >>> bank, shop = Identity(), Identity()
    >>> bank.exchange(shop.public) == shop.exchange(bank.public)
    True
    """

    def __init__(self, private: bytes | None = None) -> None:
        if private is not None and len(private) != 32:
            raise ConfigError("a private key has 32 bytes")
        kind = x25519.X25519PrivateKey
        self._key = kind.from_private_bytes(private) if private else kind.generate()
        self.public = self._key.public_key().public_bytes_raw()

    def private_bytes(self) -> bytes:
        """Return the private key, for a file that only this party can read."""
        return self._key.private_bytes_raw()

    def exchange(self, public: bytes) -> bytes:
        """Return the Diffie-Hellman secret shared with the owner of a public key."""
        return self._key.exchange(x25519.X25519PublicKey.from_public_bytes(public))


class SecureChannel:
    """The encryption between one party and all others for one session."""

    def __init__(
        self,
        name: str,
        session: bytes,
        agreed: bytes,
        identity: Identity | None = None,
        pins: Mapping[str, bytes] | None = None,
        trust_server: bool = False,
    ) -> None:
        if pins is None and not trust_server:
            raise ConfigError(
                "no public keys of the other parties are pinned, and the server could "
                "read what is sent; pin them, or declare the server trusted"
            )
        if pins is not None and identity is None:
            raise ConfigError("a party that pins keys needs a private key of its own")
        self.name, self._pins = name, pins
        self._context = framed(TAG, session, agreed)
        self._identity, self._long_term = identity or Identity(), identity is not None
        self._fresh: Identity | None = Identity()
        self._keys: dict[tuple[str, str], bytes] = {}  # by sender and receiver
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}

    def hello(self) -> Hello:
        """Return the public keys that the other parties need."""
        return Hello(self.name, self._identity.public, self._session_key().public)

    def exchange_keys(self, hellos: Sequence[Hello]) -> None:
        """Derive the keys shared with every other party, once."""
        others = [hello for hello in hellos if hello.sender != self.name]
        for hello in others:
            if (self.name, hello.sender) in self._keys:
                raise ChannelError(hello.sender, "has sent a second hello", _REMEDY)
            self._derive_keys(hello)
        missing = set(self._pins or {}) - {hello.sender for hello in others}
        if missing:
            names = ", ".join(sorted(missing))
            raise ConfigError(f"keys are pinned for parties not taking part: {names}")
        self._fresh = None  # no more keys can be derived in this session

    def _derive_keys(self, hello: Hello) -> None:
        sender = hello.sender
        if self._pins is not None:
            if sender not in self._pins:
                raise ConfigError(f"no public key is pinned for the party '{sender}'")
            if self._pins[sender] != hello.identity:
                raise ChannelError(sender, "its key is not the pinned one", _REMEDY)
        mine, fresh = self._identity, self._session_key()
        if hello.session_key == fresh.public or hello.identity == mine.public:
            raise ChannelError(sender, "has sent this party's own key", _REMEDY)
        try:
            mixed = [mine.exchange(hello.session_key), fresh.exchange(hello.identity)]
            equal = fresh.exchange(hello.session_key) + mine.exchange(hello.identity)
        except ValueError:
            raise ChannelError(sender, "has sent an invalid key", _REMEDY) from None
        # The two in the middle are the other way round at the other party.
        first_is_me = self.name < sender
        secret = equal + b"".join(mixed if first_is_me else reversed(mixed))
        hellos = sorted((self.hello(), hello), key=lambda each: each.sender)
        names = [framed(h.sender.encode(), h.identity, h.session_key) for h in hellos]
        info = framed(self._context, *names)
        keys = HKDF(SHA256(), 64, salt=None, info=info).derive(secret)
        low, high = hellos[0].sender, hellos[1].sender
        self._keys[low, high], self._keys[high, low] = keys[:32], keys[32:]

    def encrypt(self, header: Header, content: bytes) -> EncryptedChunk:
        """Return a chunk from this party."""
        key = self._keys.get((self.name, header.receiver))
        if header.sender != self.name or key is None:
            which = f"from '{header.sender}' to '{header.receiver}'"
            raise ConfigError(f"'{self.name}' cannot encrypt a chunk {which}")
        number = self._sent.get(header.receiver, 0)
        self._sent[header.receiver] = number + 1  # first: a number is never used twice
        given = number.to_bytes(12, "big"), content, header.to_bytes()
        return EncryptedChunk(header, number, ChaCha20Poly1305(key).encrypt(*given))

    def decrypt(self, chunk: EncryptedChunk) -> bytes:
        """Return the content of a chunk for this party; an error ends the session."""
        header, sender = chunk.header, chunk.header.sender
        key, turn = self._keys.get((sender, self.name)), self._received.get(sender, 0)
        if header.receiver != self.name or sender == self.name or key is None:
            problem = f"has sent a chunk that is not for '{self.name}'"
        elif chunk.number != turn:
            kind = "replayed" if chunk.number < turn else "out of order"
            problem = f"chunk {chunk.number} is {kind}; {turn} is next"
        else:
            given = turn.to_bytes(12, "big"), chunk.content, header.to_bytes()
            try:
                content = ChaCha20Poly1305(key).decrypt(*given)
            except InvalidTag:
                cause = "was changed, or encrypted by others or for other settings"
                problem = f"chunk {turn} {cause}"
            else:
                self._received[sender] = turn + 1
                return content
        self.close()
        raise ChannelError(sender, problem, _REMEDY)

    def close(self) -> None:
        """Forget the keys of this session."""
        self._keys.clear()
        self._fresh = None

    def state_dict(self) -> dict[str, Any]:
        """Return the secrets of this session, without a long-term private key."""
        fresh, own = self._fresh, None if self._long_term else self._identity
        return {
            "fresh": fresh and fresh.private_bytes(),
            "own": own.private_bytes() if own and fresh else None,
            **{"keys": self._keys, "sent": self._sent, "received": self._received},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of the same party and session."""
        fresh, own = state["fresh"], state["own"]
        self._fresh = None if fresh is None else Identity(fresh)
        self._identity = self._identity if own is None else Identity(own)
        self._keys, self._sent = state["keys"], state["sent"]
        self._received = state["received"]

    def _session_key(self) -> Identity:
        if self._fresh is None:
            raise ConfigError("the keys of this session are derived already")
        return self._fresh


class ChunkCodec:
    """Splits the lists that a party sends, and joins those that it receives."""

    def __init__(self, channel: SecureChannel, group: Group, rows: int) -> None:
        self._channel = channel
        self._group = group
        self._rows = rows  # most elements in a chunk
        # by sender: the header that must come next, and what has come before it
        self._partial: dict[str, tuple[Header, bytearray]] = {}

    def chunks(self, message: RoundMessage) -> int:
        """Return the number of chunks of a list."""
        return max(1, -(-len(message.elements) // self._rows))

    def encode(self, message: RoundMessage, chunk: int) -> EncryptedChunk:
        """Return one encrypted chunk of a list; chunks must be encoded in order."""
        header = replace(message.header, chunk=chunk, chunks=self.chunks(message))
        start = chunk * self._rows
        rows = message.elements[start : start + self._rows]
        return self._channel.encrypt(header, self._group.encode(rows))

    def decode(self, chunk: EncryptedChunk) -> RoundMessage | None:
        """Return the whole list after its last chunk, None before."""
        content = self._channel.decrypt(chunk)
        header, sender = chunk.header, chunk.header.sender
        start = replace(header, chunk=0), bytearray()
        awaited, received = self._partial.pop(sender, start)
        received += content
        size, whole = len(received), header.count * self._group.size
        if header != awaited or size > whole:
            raise ChannelError(sender, "has mixed the chunks of two lists", REMEDY)
        number = header.chunk + 1
        if number < header.chunks:
            self._partial[sender] = replace(header, chunk=number), received
            return None
        if size != whole or number != header.chunks:
            problem = f"has not sent the {header.count} elements that it announced"
            raise ChannelError(sender, problem, REMEDY)
        header = replace(header, chunk=0, chunks=1)
        return RoundMessage(header, self._group.decode(received))

    def close(self) -> None:
        """Forget the chunks of incomplete lists."""
        self._partial.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the incomplete lists as plain values and arrays."""
        return {
            sender: [awaited.to_list(), np.array(received, np.uint8)]
            for sender, (awaited, received) in self._partial.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same party and session."""
        self._partial = {
            sender: (Header.from_list(awaited), bytearray(received))
            for sender, (awaited, received) in state.items()
        }
