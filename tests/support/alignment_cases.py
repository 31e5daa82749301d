"""Parties whose ids overlap in part, and what is left of a handshake, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto
from torch import nn
from vertical_cases import StatelessGrid

from flower_vfl import (
    CrossEntropy,
    Imputation,
    InProcessGrid,
    LabelParty,
    PassiveParty,
    vertical_client_app,
)
from flower_vfl.alignment import AlignmentSettings
from flower_vfl.alignment.handshake import SavedAlignment
from flower_vfl.parties.base import Party
from flower_vfl.parties.checkpoints import open_store
from flower_vfl.protocol import replay
from flower_vfl.strategies import Alignment, Checkpoints, VerticalStrategy

IDS: list[list[object]] = [
    [f"person-{n}" for n in numbers]
    for numbers in (range(0, 30), range(12, 44), range(20, 50))
]
NAMES = ["label", "passive-1", "passive-2"]
TRUSTING = AlignmentSettings(trust_server=True)
COLUMNS, WIDTH = 4, 3


def make_parties(ids: Sequence[Sequence[object]] = IDS) -> list[Party]:
    """Return a label party and passive parties with ids that overlap in part."""
    torch.manual_seed(0)
    passive: list[Party] = [
        PassiveParty(
            torch.randn(len(own), COLUMNS),
            nn.Linear(COLUMNS, WIDTH),
            ids=own,
            device="cpu",
            optimizer=partial(torch.optim.SGD, lr=0.1),
            imputation=Imputation(secret=1),
        )
        for own in ids[1:]
    ]
    top = CrossEntropy(nn.Linear(WIDTH * len(passive), 1))
    labels = torch.arange(len(ids[0])) % 2
    label = LabelParty(
        labels, top, ids=ids[0], device="cpu", imputation=Imputation(secret=1)
    )
    return [label, *passive]


def make_app(
    ids: Sequence[Sequence[object]] = IDS,
    aligning: Callable[[Context], AlignmentSettings] = lambda context: TRUSTING,
) -> ClientApp:
    """Return an app that makes those parties at simulated nodes."""

    def party(context: Context) -> Any:
        return make_parties(ids)[int(context.node_config["partition-id"])]

    return vertical_client_app(party, party, alignment=aligning)


def make_strategy(
    method: str = "psu",
    *,
    group: str = "ristretto255",
    padding: int = 0,
    relay_bytes: int = 400,
    checkpoints: Checkpoints | None = None,
) -> VerticalStrategy:
    alignment = Alignment(method, group=group, padding=padding, relay_bytes=relay_bytes)
    return VerticalStrategy(
        batch_size=16,
        seed=3,
        progress=False,
        alignment=alignment,
        checkpoints=checkpoints or Checkpoints(),
    )


def ids_by_row(party: Party) -> dict[int, object]:
    """Return the id that a party has for each aligned row that it holds."""
    assert party.row_index is not None
    local = party.row_index.local.tolist()
    return {row: party.ids[own] for row, own in enumerate(local) if own >= 0}  # type: ignore[index]


def check_rows(parties: Sequence[Party], method: str, padding: int) -> None:
    """Compare the aligned rows with the sets that Python makes of the ids."""
    ids = [set(party.ids) for party in parties]  # type: ignore[arg-type]
    expected = set.union(*ids) if method == "psu" else set.intersection(*ids)
    merged: dict[int, object] = {}
    for party, own in zip(parties, ids, strict=True):
        held = ids_by_row(party)
        assert set(held.values()) == own & expected
        for row, one in held.items():
            assert merged.setdefault(row, one) == one  # equal ids meet, and no others
    assert len(set(merged.values())) == len(merged) == len(expected)
    dummies = {party.rows - len(expected) for party in parties}
    assert len(dummies) == 1
    most = 2 * padding if method == "psu" else 0
    assert (padding if method == "psu" else 0) <= dummies.pop() <= most


def state_of(grid: StatelessGrid, node: int) -> Any:
    kind = type(context_to_proto(Context(0, 0, {}, RecordDict(), {})))
    return context_from_proto(kind.FromString(grid.contexts[node])).state


def alignment_of(grid: StatelessGrid, node: int) -> SavedAlignment:
    kept = SavedAlignment.load(
        open_store(Context(0, node, {}, state_of(grid, node), {}), "party")
    )
    assert kept is not None
    return kept


def secrets_of(grid: StatelessGrid) -> list[int]:
    """Return the nodes in whose state or memory a handshake is left."""
    left = [
        n
        for n in grid.contexts
        if "flower_vfl.alignment.handshake" in state_of(grid, n)
    ]
    live = [s for process in grid.processes.values() for s in process.values()]
    return left + [0 for s in live if s.handshake or s.saved_handshake]


def handshakes_of(grid: InProcessGrid) -> list[object]:
    """Return the handshakes that live behind a grid."""
    run = grid.run.run_id
    live = [s for key, s in replay.sessions.items() if key[0] == run]
    assert live
    return [s.handshake for s in live if s.handshake or s.saved_handshake]
