"""Features, labels and ids are in no message, embeddings in none of a sealed run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.common.serde import message_to_proto
from sealed_cases import EPOCHS, RecordingGrid, sealed_grid, strategy
from torch import Tensor, nn
from vertical_cases import ROWS, HookedGrid, features, labels, make_label, make_passive

from flower_vfl import CrossEntropy, InProcessGrid, LabelParty, PassiveParty, in_process
from flower_vfl.protocol import replay
from flower_vfl.protocol.client_app import vertical_client_app
from flower_vfl.strategies import Checkpoints, VerticalStrategy


def needles() -> dict[str, bytes]:
    """Return every form in which data of a row could stand in a message."""
    found: dict[str, bytes] = {}
    for party in range(3):
        x = features(party)
        for row in range(ROWS):
            for kind in (np.float32, np.float64, np.float16):
                data = x[row].numpy().astype(kind)
                found[f"features {party} {row} {kind.__name__}"] = data.tobytes()
    for column in range(4):
        found[f"column {column}"] = features(1)[:16, column].numpy().tobytes()
    y = labels().numpy()
    for kind in (np.float32, np.float64, np.int64, np.int32, np.int8, np.bool_):
        for size in (16, 12):
            found[f"labels {kind.__name__} {size}"] = y[:size].astype(kind).tobytes()
    return found


def test_features_labels_and_ids_never_travel() -> None:
    ids = [f"customer-{i * 7919}" for i in range(ROWS)]
    numbers = [int(i) * 7919 + 10**9 for i in range(ROWS)]

    def label(context: Context) -> LabelParty:
        party = make_label(context)
        party.ids = ids
        return party

    def passive(context: Context) -> PassiveParty:
        party = make_passive(context)
        party.ids = ids if context.node_config["partition-id"] == 1 else None
        return party

    sent: list[bytes] = []
    seen_labels: set[bytes] = set()
    inner = InProcessGrid(vertical_client_app(passive, label), 3)

    def record(message: Message) -> None:
        sent.append(message_to_proto(message).SerializeToString())

    def record_reply(reply: Message) -> Message:
        record(reply)
        return reply

    grid = HookedGrid(inner, record, record_reply)
    strategy = VerticalStrategy(
        batch_size=16,
        valid_fraction=0.2,
        checkpoints=Checkpoints(every=2, keep_final=True),
    )
    strategy.start(grid, num_rounds=2)
    strategy.predict("train")
    party = inner.parties()["label"]
    schedule = party.configured()
    for epoch in (1, 2):  # labels in the order of the batches too
        for index in range(3):
            rows = schedule.training_batches(epoch)[index]
            values = labels()[rows].numpy()
            for kind in (np.float32, np.float64, np.int64, np.int8):
                seen_labels.add(values.astype(kind).tobytes())
    everything = b"\0".join(sent)
    assert len(everything) > 10_000
    assert b"passive-1" in everything  # the search does find what is there
    embedding = read_embedding(sent)
    assert embedding in everything
    for what, needle in needles().items():
        assert needle not in everything, what
    for needle in seen_labels:
        assert needle not in everything
    for one in ids:
        assert one.encode() not in everything
    assert json.dumps(numbers[:2]).encode() not in everything


def read_embedding(sent: list[bytes]) -> bytes:
    """Return the data of one embedding, found in the bytes of the messages."""
    marker = b"\x93NUMPY"
    carrying = next(data for data in sent if marker in data)
    start = carrying.index(marker)
    length = int.from_bytes(carrying[start + 8 : start + 10], "little")
    return carrying[start + 10 + length : start + 10 + length + 16 * 3 * 4]


def test_trusted_labels_are_the_only_exception() -> None:
    """The search above would find labels if they were sent."""
    torch.manual_seed(0)
    label = LabelParty(
        labels(), CrossEntropy(nn.Linear(3, 1)), device="cpu", trust_server=True
    )
    passive = PassiveParty(features(1), nn.Linear(4, 3), device="cpu")

    class Needs:
        requires_labels = True

        def __call__(self, gradient: Tensor, batch: object) -> Tensor:
            return gradient

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    sent: list[bytes] = []

    def record(reply: Message) -> Message:
        sent.append(message_to_proto(reply).SerializeToString())
        return reply

    grid = HookedGrid(in_process([label, passive]), after=record)
    VerticalStrategy(batch_size=16, defense=[Needs()]).start(grid, num_rounds=1)
    rows = label.configured().training_batches(1)[0]
    assert labels()[rows].float().numpy().tobytes() in b"".join(sent)


def patterns(tensors: list[Tensor]) -> set[bytes]:
    """Return the bytes of all pairs of neighbours; a single float may be chance."""
    found: set[bytes] = set()
    for tensor in tensors:
        flat = tensor.detach().numpy().flatten()
        pairs = np.stack([flat[:-1], flat[1:]], axis=1)
        found |= {pair.tobytes() for pair in pairs if pair.all()}
    return found


@pytest.fixture
def seen_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Collect all embeddings, gradients and predictions of the parties of this test."""
    tensors: list[Tensor] = []
    for name in ("forward", "embed_for_use"):
        method = getattr(PassiveParty, name)

        def keep(party: PassiveParty, *args: Any, _method: Any = method) -> Tensor:
            tensors.append(_method(party, *args))
            return tensors[-1]

        monkeypatch.setattr(PassiveParty, name, keep)
    backward = PassiveParty.backward

    def keep_gradient(party: PassiveParty, step: int, gradient: Tensor) -> Any:
        tensors.append(gradient)
        return backward(party, step, gradient)

    monkeypatch.setattr(PassiveParty, "backward", keep_gradient)
    yield tensors


@pytest.mark.parametrize("sealed", [False, True])
def test_what_the_server_sees(sealed: bool, seen_tensors: list[Tensor]) -> None:
    """The transcript of a sealed run has no float of an embedding or a gradient."""
    with sealed_grid() as inner:
        grid = RecordingGrid(inner)
        strategy(sealed).start(grid, num_rounds=EPOCHS)
        keys: set[bytes] = set()
        for key, session in replay.sessions.items():
            if key[0] == inner.run.run_id and session.seals is not None:
                keys |= set(session.seals.keys.values())
    everything = b"\0".join(grid.sent)
    searched = patterns(seen_tensors)
    assert len(searched) > 500 and len(everything) > 10_000
    windows = {everything[i : i + 8] for i in range(len(everything) - 7)}
    found = searched & windows
    kinds = {array.dtype for array in grid.arrays}
    if not sealed:
        assert found == searched and kinds == {"float32"}
        return
    assert not found
    assert kinds == {"uint8"} and len(grid.arrays) > 50
    assert len(keys) == 4 and not any(key in everything for key in keys)
