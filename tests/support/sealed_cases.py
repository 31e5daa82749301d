"""Parties that pinned each other's keys, and servers that tamper, for sealed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.serverapp import Grid
from vertical_cases import ADAM, bottom, features, labels, make_passive, top

from flower_vfl import (
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    NodePolicy,
    vertical_client_app,
)
from flower_vfl.alignment import AlignmentSettings, Identity
from flower_vfl.grids.wrapped import WrappedGrid
from flower_vfl.protocol.messages import Content, Verb, read
from flower_vfl.protocol.replay import node_name
from flower_vfl.strategies import Checkpoints, Defense, VerticalStrategy

NAMES = ["label", "passive-1", "passive-2"]
EPOCHS = 2
Tamper = Callable[[Sequence[tuple[Message, Content]]], None]


def pinned(
    names: Sequence[str] = NAMES, **wrong: bytes
) -> dict[str, AlignmentSettings]:
    """Return settings of parties that have pinned each other's keys."""
    identities = {name: Identity() for name in names}
    pins = {name: each.public for name, each in identities.items()}
    return {
        name: AlignmentSettings(identities[name], {**pins, **wrong, name: pins[name]})
        for name in names
    }


def make_label(context: Context, **options: Any) -> LabelParty:
    """Return a label party with dropout, batch norm and Adam, always the same.

    It trusts the server with the seed of its randomness, so that runs can be compared.
    """
    torch.manual_seed(7)
    return LabelParty(
        labels(),
        CrossEntropy(top(3)),
        features=features(0),
        model=bottom(),
        optimizer=ADAM,
        device="cpu",
        **{"trust_server": True, **options},
    )


def sealed_app(
    settings: Mapping[str, AlignmentSettings] | None = None,
    policy: NodePolicy | None = None,
    **options: Any,
) -> ClientApp:
    """Return an app of three parties that have pinned each other's keys."""
    own = settings or pinned()
    return vertical_client_app(
        make_passive,
        lambda context: make_label(context, **options),
        alignment=lambda context: own[node_name(context)],
        policy=lambda context: policy or NodePolicy(),
    )


def sealed_grid(
    folder: Path | None = None,
    settings: Mapping[str, AlignmentSettings] | None = None,
    **options: Any,
) -> InProcessGrid:
    config = {"state-dir": str(folder)} if folder else None
    return InProcessGrid(sealed_app(settings, **options), 3, config)


def strategy(sealed: bool = True, **options: Any) -> VerticalStrategy:
    given = {
        "batch_size": 16,
        "seed": 3,
        "valid_fraction": 0.2,
        "evaluation_rows": 5,
        "progress": False,
        "defense": Defense((), at="label", noise_seed=5),
        "checkpoints": Checkpoints(every=4, keep_final=True),
    }
    return VerticalStrategy(sealed=sealed, **{**given, **options})


class TamperingGrid(WrappedGrid):
    """A server that changes requests before it sends them."""

    def __init__(self, inner: Grid, tamper: Tamper) -> None:
        super().__init__(inner)
        self.tamper = tamper

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        asked = [(message, read(message)) for message in messages]
        self.tamper(asked)
        for message, content in asked:
            message.content.clear()
            message.content.update(content.records())
        sent = [message for message, _ in asked]
        return self._grid.send_and_receive(sent, timeout=timeout)


class RecordingGrid(WrappedGrid):
    """A server that keeps everything that passes it."""

    def __init__(self, inner: Grid) -> None:
        super().__init__(inner)
        self.sent: list[bytes] = []
        self.arrays: list[Array] = []
        self.contents: list[tuple[str, Content]] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        asked = list(messages)
        replies = list(self._grid.send_and_receive(asked, timeout=timeout))
        for message in (*asked, *replies):
            self.sent.append(message_to_proto(message).SerializeToString())
            content = read(message)
            self.arrays += content.arrays.values()
            self.contents.append((message.metadata.message_type, content))
        return replies

    def session_keys(self) -> list[bytes]:
        """Return the public session keys of all parties in all setups."""
        found: list[bytes] = []
        for kind, content in self.contents:
            if kind == Verb.CONFIGURE:
                found += content.config.get("session-keys", [])  # type: ignore[arg-type]
        return found


def plain_array(array: Array, data: bytes | bytearray) -> Array:
    """Return an array with other bytes."""
    return Array(array.dtype, array.shape, array.stype, bytes(data))
