"""Sealed training: embeddings and gradients that the server relays and cannot read.

docs/threat-model.md ("Sealed training") describes the key exchange and what is
authenticated. An answer (a gradient, or predictions) is bound to the one embedding that
it answers. A gradient that a defense withholds is an empty answer.
"""

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from flwr.app import Array
from torch import Tensor

from flower_vfl.alignment.channel import SecureChannel
from flower_vfl.alignment.elements import framed
from flower_vfl.alignment.keys import AlignmentSettings
from flower_vfl.alignment.messages import Hello
from flower_vfl.errors import PartyError

from .config import Role, TrainingConfig
from .lazy_array import Buffer, BufferArray, LazyArray
from .messages import TensorArray, from_npy

TRAINING = "training"  # what an embedding is for; others are made by the functions
_TAG = b"flower-vfl/sealing/v1"
_STYPE = "flower_vfl.sealed"
_NONCE, _MARK = 12, 16  # bytes before and at the end of a ciphertext
_REMEDY = (
    "The server, or that party, has sent something else than was agreed on; nothing of "
    "it was used. Find out which, and resume from a checkpoint"
)


@dataclass
class Seals:
    """What a party keeps of one session of sealed training, at its node only."""

    name: str
    label: str
    peers: list[str]  # at the label party all passive parties, elsewhere the label
    agreed: bytes
    exchange: dict[str, Any] = field(default_factory=dict)  # while keys are exchanged
    keys: dict[tuple[str, str], bytes] = field(default_factory=dict)
    # By peer, use and, for training, step: a pipelined run has several.
    open_questions: dict[tuple[str, str, int], bytes] = field(default_factory=dict)
    restores: int = 0
    step: int = 0  # the last one whose embedding was encrypted

    def hello(self, own: AlignmentSettings) -> Hello:
        """Begin the key exchange and return the public keys of this party."""
        channel = self._channel(own)
        self.exchange = channel.state_dict()
        return channel.hello()

    def exchange_keys(self, hellos: Sequence[Hello], own: AlignmentSettings) -> None:
        """Derive the keys of this session, once."""
        names = sorted(hello.sender for hello in hellos)
        state, self.exchange = self.exchange, {}
        if not state or names != sorted(self.peers):
            problem = f"got the public keys of {', '.join(names) or 'nobody'}"
            remedy = f"It has to get those of {', '.join(self.peers)}, and only once"
            raise PartyError(self.name, problem, remedy)
        channel = self._channel(own)
        channel.load_state_dict(state)
        channel.exchange_keys(hellos)
        self.keys = channel.state_dict()["keys"]

    def _channel(self, own: AlignmentSettings) -> SecureChannel:
        pins = own.pins_of_others(self.name)
        if pins is not None and self.name != self.label:  # others are not talked to
            pins = {name: key for name, key in pins.items() if name == self.label}
        trust = own.trust_server
        return SecureChannel(self.name, _TAG, self.agreed, own.identity, pins, trust)

    def restored(self) -> None:
        """Refuse from now on what was encrypted before the party was restored."""
        self.restores += 1
        self.step = 0
        self.open_questions.clear()

    def embedding(self, tensor: Tensor, use: str, step: int, *at: int) -> Array:
        """Return an embedding that only the label party can read."""
        if use == TRAINING:
            if step <= self.step:
                problem = "was asked twice for the embedding of one batch"
                raise PartyError(self.name, problem, _REMEDY, step)
            self.step = step
        bound = self._bound("embedding", use, b"", step, *at)
        array = self._encrypt(self.label, tensor, bound, step)
        self.open_questions[_question(self.label, use, step)] = _mark(array)
        return array

    def embeddings(
        self, arrays: Mapping[str, Array], use: str, step: int, *at: int
    ) -> dict[str, Tensor]:
        """Return the embeddings that the passive parties have encrypted."""
        bound = self._bound("embedding", use, b"", step, *at)
        found, what = {}, f"its {use} embedding"
        for name, array in arrays.items():
            found[name] = self._decrypt(name, array, bound, what, step)
            self.open_questions[_question(name, use, step)] = _mark(array)
        return found

    def answers(
        self, tensors: Mapping[str, Tensor], use: str, step: int
    ) -> dict[str, Array]:
        """Return an answer to every passive party, also to those without a tensor."""
        return {n: self.answer(n, tensors.get(n), use, step) for n in self.peers}

    def answer(self, party: str, tensor: Tensor | None, use: str, step: int) -> Array:
        """Return an answer to an embedding of a party; None is withheld."""
        asked = self.open_questions.pop(_question(party, use, step), b"")
        bound = self._bound("answer", use, asked, step)
        return self._encrypt(party, torch.empty(0) if tensor is None else tensor, bound)

    def answered(self, array: Array | None, use: str, step: int) -> Tensor | None:
        """Return the label party's answer to an embedding; None is withheld."""
        asked = self.open_questions.pop(_question(self.label, use, step), b"")
        if array is None or not asked:
            sent = "no answer" if array is None else "a second answer"
            problem = f"has sent {sent} to the {use} embedding of '{self.name}'"
            raise PartyError(self.label, problem, _REMEDY, step)
        bound = self._bound("answer", use, asked, step)
        what = f"its answer to the {use} embedding of '{self.name}'"
        found = self._decrypt(self.label, array, bound, what, step)
        return found if found.numel() else None

    def _bound(self, kind: str, use: str, asked: bytes, *at: int) -> bytes:
        """Return what is authenticated along with a tensor."""
        missing = [0] * (3 - len(at))  # of step, epoch and index
        numbers = struct.pack(">4q", self.restores, *at, *missing)
        return framed(kind.encode(), use.encode(), numbers, asked)

    def _cipher(self, sender: str, receiver: str, step: int | None) -> AESGCM:
        key = self.keys.get((sender, receiver))
        if key is None:
            other = receiver if sender == self.name else sender
            problem = f"shares no key with '{other}' in this session"
            remedy = "The setup of a sealed run exchanges keys before the first step"
            raise PartyError(self.name, problem, remedy, step)
        return AESGCM(key)

    def _encrypt(
        self, receiver: str, tensor: Tensor, bound: bytes, step: int | None = None
    ) -> Array:
        # Random, because a step that is repeated after a crash may have new contents.
        nonce = os.urandom(_NONCE)
        cipher = self._cipher(self.name, receiver, step)
        data = cipher.encrypt(nonce, TensorArray(tensor).data, bound)
        return BufferArray("uint8", (_NONCE + len(data),), _STYPE, nonce, data)

    def _decrypt(
        self, sender: str, array: Array, bound: bytes, what: str, step: int
    ) -> Tensor:
        cipher = self._cipher(sender, self.name, step)
        if array.stype != _STYPE:
            problem = f"{what} was not encrypted when it arrived at '{self.name}'"
            raise PartyError(sender, problem, _REMEDY, step)
        data = memoryview(_whole(array))
        try:
            return from_npy(cipher.decrypt(data[:_NONCE], data[_NONCE:], bound))
        except Exception:  # InvalidTag, and the many types of numpy on bad bytes
            problem = f"{what} was altered, repeated or swapped on its way to "
            problem += f"'{self.name}', or encrypted with other keys or settings"
            raise PartyError(sender, problem, _REMEDY, step or None) from None


def _whole(array: Array) -> Buffer:
    """Return the bytes of an array, without a copy if they arrived in one piece."""
    parts = array.buffers() if isinstance(array, LazyArray) else (array.data,)
    return parts[0] if len(parts) == 1 else array.data


def _mark(array: Array) -> bytes:
    """Return what tells a ciphertext from all others."""
    last = array.buffers()[-1] if isinstance(array, LazyArray) else array.data
    return bytes(last[-_MARK:])


def _question(peer: str, use: str, step: int) -> tuple[str, str, int]:
    """Return the key of an open question; one for each use that is not training."""
    return peer, use, step if use == TRAINING else 0


def evaluation_use(split: str) -> str:
    """Return the use of the embeddings of a split."""
    return f"evaluation ({split})"


def serving_use(number: int, size: int) -> str:
    """Return the use of the embeddings of a served batch."""
    return f"serving ({number} of {size} rows)"


def new_seals(
    name: str, role: Role, label: str, config: TrainingConfig, aligned: str
) -> Seals:
    """Return seals without keys, for the alignment with the fingerprint `aligned`."""
    if (role == "label") != (name == label):
        problem = f"is a {role} party but was told that '{label}' is the label party"
        raise PartyError(name, problem, "Check the server: it confuses the roles")
    if config.defended == "strategy":
        problem = "cannot encrypt gradients for a defense at the strategy"
        remedy = 'Have the label party apply the defense: Defense(..., at="label")'
        raise PartyError(name, problem, remedy)
    settings = json.dumps(config.common().to_record(), sort_keys=True)
    agreed = framed(label.encode(), settings.encode(), aligned.encode())
    peers = list(config.parties) if role == "label" else [label]
    return Seals(name, label, peers, agreed)
