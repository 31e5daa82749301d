"""Features, labels and ids are in no message."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.common.serde import message_to_proto
from torch import Tensor, nn
from vertical_cases import ROWS, HookedGrid, features, labels, make_label, make_passive

from flower_vfl import CrossEntropy, InProcessGrid, LabelParty, PassiveParty, in_process
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
