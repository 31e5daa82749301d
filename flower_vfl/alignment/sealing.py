"""Letters that only their receiver can read and only their sender can have written.

Each party has an X25519 identity whose public key the others have pinned. At the start
of a session every party sends a `Hello` with a key of this session. Two parties agree
on their keys by the four Diffie-Hellman values of their identities and session keys
(the pattern KK of the Noise framework): the session keys make every session's seals
new, so that nothing of an earlier session can be replayed and an identity that is
stolen later opens nothing; the identities make sure that it is the pinned party. Each
direction has its own key.

A letter is sealed with ChaCha20-Poly1305. Sealed along with its content are the session
(with whatever the parties must agree on: group, ring, padding), the phase, owner and
hop, sender and receiver, the number of elements, the part of the list and the number of
the letter in its direction. The receiver takes letters of one sender in the order in
which they were sealed: a letter that is forged, changed, replayed, swapped or left out
is refused.

Without pins whoever relays the hellos could replace them by its own and read
everything. So there are seals without pins only when the server is declared trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flower_vfl.errors import ConfigError, PartyError

from .elements import TAG

_REMEDY = (
    "Somebody may be changing messages on their way; the handshake has ended and "
    "nothing of it was kept"
)


class SealError(PartyError):
    """A hello or a letter that is not what its sender wrote, or not in its turn."""


class Identity:
    """The lasting key pair of a party.

    Parameters
    ----------
    private : bytes | None (default: None)
        The 32 bytes of the private key; None makes a new one.
    """

    def __init__(self, private: bytes | None = None) -> None:
        if private is not None and len(private) != 32:
            raise ConfigError("a private key has 32 bytes")
        self._key = (
            X25519PrivateKey.generate()
            if private is None
            else X25519PrivateKey.from_private_bytes(private)
        )
        self.public = self._key.public_key().public_bytes_raw()

    def private_bytes(self) -> bytes:
        """Return the private key, for a file that only this party can read."""
        return self._key.private_bytes_raw()

    def exchange(self, public: bytes) -> bytes:
        """Return the secret that is shared with the holder of a public key."""
        return self._key.exchange(X25519PublicKey.from_public_bytes(public))


@dataclass(frozen=True)
class Hello:
    """What a party sends to every other at the start of a session; nothing secret.

    Parameters
    ----------
    sender : str
        Name of the party.
    identity : bytes
        Its lasting public key.
    fresh : bytes
        Its public key of this session.
    """

    sender: str
    identity: bytes
    fresh: bytes


@dataclass(frozen=True)
class Header:
    """What is sealed along with a content, and can be read by all.

    Parameters
    ----------
    phase : str
        Of the protocol.
    owner : str
        Whose ids the list has.
    hop : int
        How many times the list has been sent.
    sender : str
        Who has sealed it.
    receiver : str
        Who can open it.
    count : int
        Elements of the whole list.
    part : int (default: 0)
        Which part of the list this is.
    parts : int (default: 1)
        In how many parts the list travels.
    """

    phase: str
    owner: str
    hop: int
    sender: str
    receiver: str
    count: int
    part: int = 0
    parts: int = 1

    def packed(self) -> bytes:
        """Return the bytes of the header, different for different headers."""
        names = [self.phase, self.owner, self.sender, self.receiver]
        numbers = (self.hop, self.count, self.part, self.parts)
        return framed(*(n.encode() for n in names), struct.pack(">4Q", *numbers))


@dataclass(frozen=True)
class Sealed:
    """A sealed letter.

    Parameters
    ----------
    header : Header
        What everybody may read.
    number : int
        Which letter it is from this sender to this receiver, from 0.
    content : bytes
        What only the receiver can read.
    """

    header: Header
    number: int
    content: bytes


class SecureChannel:
    """One party's seals for one session.

    Parameters
    ----------
    name : str
        Name of this party.
    session : bytes
        Name of the session.
    agreed : bytes
        What all parties must have the same: the group, the ring, the padding, in bytes.
    identity : Identity | None (default: None)
        The lasting key pair, whose public key the others have pinned. It is needed with
        pins; without it a new one is made.
    pins : Mapping[str, bytes] | None (default: None)
        Public key of every other party.
    trust_server : bool (default: False)
        Whether the server is trusted not to replace keys. Needed when there are no
        pins.
    """

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
                "no public keys of the other parties are pinned, so that the server "
                "could read the lists; pin them, or declare the server trusted"
            )
        if pins is not None and identity is None:
            raise ConfigError("pinned keys of others need a private key of this party")
        self.name = name
        self._context = framed(TAG, session, agreed)
        self._identity = identity or Identity()
        self._lasting = identity is not None
        self._fresh: Identity | None = Identity()
        self._pins = pins
        self._keys: dict[tuple[str, str], bytes] = {}  # by sender and receiver
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}

    def hello(self) -> Hello:
        """Return what the other parties need."""
        return Hello(self.name, self._identity.public, self._session_key().public)

    def meet(self, hellos: Sequence[Hello]) -> None:
        """Agree on keys with every other party; once."""
        others = [hello for hello in hellos if hello.sender != self.name]
        for hello in others:
            if (self.name, hello.sender) in self._keys:
                raise SealError(hello.sender, "has sent a second hello", _REMEDY)
            self._meet_one(hello)
        missing = set(self._pins or {}) - {hello.sender for hello in others}
        if missing:
            names = ", ".join(sorted(missing))
            raise ConfigError(f"keys are pinned of parties that take no part: {names}")
        self._fresh = None  # no more keys can be agreed on in this session

    def _meet_one(self, hello: Hello) -> None:
        sender = hello.sender
        if self._pins is not None:
            if sender not in self._pins:
                raise ConfigError(f"no public key of the party '{sender}' is pinned")
            if self._pins[sender] != hello.identity:
                raise SealError(sender, "has another key than the pinned one", _REMEDY)
        mine, fresh = self._identity, self._session_key()
        if hello.fresh == fresh.public or hello.identity == mine.public:
            raise SealError(sender, "has sent this party's own key", _REMEDY)
        try:
            mixed = [mine.exchange(hello.fresh), fresh.exchange(hello.identity)]
            equal = fresh.exchange(hello.fresh) + mine.exchange(hello.identity)
        except ValueError:
            raise SealError(sender, "has sent a key that is none", _REMEDY) from None
        # The two in the middle are the other way round at the other party.
        first_is_me = self.name < sender
        secret = equal + b"".join(mixed if first_is_me else reversed(mixed))
        hellos = sorted((self.hello(), hello), key=lambda each: each.sender)
        names = [framed(h.sender.encode(), h.identity, h.fresh) for h in hellos]
        info = framed(self._context, *names)
        keys = HKDF(SHA256(), 64, salt=None, info=info).derive(secret)
        low, high = hellos[0].sender, hellos[1].sender
        self._keys[low, high], self._keys[high, low] = keys[:32], keys[32:]

    def seal(self, header: Header, content: bytes) -> Sealed:
        """Return a letter from this party."""
        key = self._keys.get((self.name, header.receiver))
        if header.sender != self.name or key is None:
            raise ConfigError(
                f"'{self.name}' cannot seal a letter from '{header.sender}' to "
                f"'{header.receiver}'"
            )
        number = self._sent.get(header.receiver, 0)
        self._sent[header.receiver] = number + 1  # first: a number is never used twice
        cipher = ChaCha20Poly1305(key)
        text = cipher.encrypt(_nonce(number), content, header.packed())
        return Sealed(header, number, text)

    def open(self, sealed: Sealed) -> bytes:
        """Return the content of a letter to this party; an error ends the session."""
        try:
            content = self._opened(sealed)
        except SealError:
            self.close()
            raise
        sender = sealed.header.sender
        self._received[sender] = self._received.get(sender, 0) + 1
        return content

    def _opened(self, sealed: Sealed) -> bytes:
        header, sender = sealed.header, sealed.header.sender
        key = self._keys.get((sender, self.name))
        if header.receiver != self.name or sender == self.name or key is None:
            raise SealError(
                sender, f"has sent a letter that is not for '{self.name}'", _REMEDY
            )
        turn = self._received.get(sender, 0)
        if sealed.number != turn:
            kind = "replayed" if sealed.number < turn else "out of order"
            problem = f"letter {sealed.number} is {kind}; {turn} is next"
            raise SealError(sender, problem, _REMEDY)
        cipher = ChaCha20Poly1305(key)
        try:
            return cipher.decrypt(_nonce(turn), sealed.content, header.packed())
        except InvalidTag:
            problem = (
                f"letter {turn} was changed, or sealed for other settings or by "
                "somebody else"
            )
            raise SealError(sender, problem, _REMEDY) from None

    def close(self) -> None:
        """Forget the keys of this session."""
        self._keys.clear()
        self._fresh = None

    def state_dict(self) -> dict[str, Any]:
        """Return the secrets of this session; a lasting private key is not in it."""
        fresh, own = self._fresh, None if self._lasting else self._identity
        keys = [[*pair, key.hex()] for pair, key in self._keys.items()]
        return {
            "fresh": None if fresh is None else fresh.private_bytes().hex(),
            "own": own.private_bytes().hex() if own and fresh else None,
            "keys": keys,
            "sent": dict(self._sent),
            "received": dict(self._received),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another object of the same party and session was."""
        fresh, own = state["fresh"], state["own"]
        self._fresh = None if fresh is None else Identity(bytes.fromhex(fresh))
        if own is not None:
            self._identity = Identity(bytes.fromhex(own))
        self._keys = {(a, b): bytes.fromhex(key) for a, b, key in state["keys"]}
        self._sent, self._received = dict(state["sent"]), dict(state["received"])

    def _session_key(self) -> Identity:
        if self._fresh is None:
            raise ConfigError("this session's keys are agreed on already")
        return self._fresh


def framed(*parts: bytes) -> bytes:
    """Return the parts in one piece from which they could be told apart again."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")
