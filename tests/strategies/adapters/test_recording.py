"""Recordings of apps that others wrote, by a grid and by a client mod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from grid_cases import TYPE, message, rows
from third_party_apps import (
    DIGIT_BATCH,
    TUMOUR_ROUNDS,
    digit_client,
    digit_server,
    digits,
    part_of,
    rows_of,
    run,
    run_tumours,
    tumours,
)

from flower_vfl import InProcessGrid, Recorder, record_grid, record_mod
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.recording import read_recording

WHERE: dict[str, Any] = {"message_type": TYPE, "embeddings": "arrays"}


@pytest.mark.parametrize("defense", ["", "marvell:s=4"])
def test_a_grid_records_what_an_app_sends(defense: str, tmp_path: Path) -> None:
    """Flower's vertical example: it trains as before, and all that was sent is kept."""
    sent: list[np.ndarray] = []
    labels = tumours()[1][part_of("train")]

    def recorded(client: Any, nodes: int) -> Grid:
        def listening(asked: Message, context: Context) -> Message:
            reply = client(asked, context)
            if "arrays" in reply.content:
                sent.append(reply.content["arrays"]["embedding"].numpy())
            return reply

        inner = InProcessGrid(listening, nodes)
        return record_grid(inner, tmp_path / "recording", labels=labels, **WHERE)

    before = run_tumours(InProcessGrid, defense=defense, seed=1)
    after = run_tumours(recorded, defense=defense, seed=1)
    for name, weight in after.weights.items():
        assert torch.equal(weight, before.weights[name]), name
    recording = read_recording(tmp_path / "recording")  # nobody closed the grid
    assert len(recording.parties) == 2
    for place, own in enumerate(recording.parties.values()):
        received = [gradient for gradient, _ in after.received[place::2]]
        np.testing.assert_array_equal(own["gradient"], np.concatenate(received))
        embeddings = sent[place : 2 * TUMOUR_ROUNDS : 2]  # then those of test rows
        np.testing.assert_array_equal(own["embedding"], np.concatenate(embeddings))
        assert own["label"].tolist() == labels.tolist() * TUMOUR_ROUNDS


def test_a_mod_records_with_a_process_for_each_message(tmp_path: Path) -> None:
    """Each message finds a new recorder; one that is sent again is recorded once."""
    client, asked = digit_client(), []

    def recorded(message: Message, context: Context) -> Message:
        mod = record_mod(
            tmp_path,
            message_type="train.label_step",
            labels=lambda message, _: digits()[1][rows_of(message)],
            rows=lambda message, _: rows_of(message),
            embeddings="embeddings",
        )
        if message.metadata.message_type == "train.label_step":
            asked.append(message.content)
            model = context.state.get("model")
            mod(message, context, client)
            if model is None:
                context.state.pop("model")
            else:
                context.state["model"] = model
        return mod(message, context, client)

    outcome = run(
        InProcessGrid, recorded, 3, digit_server, {}, lambda m: digits()[1][rows_of(m)]
    )
    recording = read_recording(tmp_path)
    assert list(recording.parties) == ["left", "right"]
    for place, (name, own) in enumerate(recording.parties.items()):
        assert own["step"].tolist() == sorted([*range(1, 31)] * DIGIT_BATCH)
        received = [gradient for gradient, _ in outcome.received[place::2]]
        wanted = np.concatenate(received).reshape(len(own["gradient"]), -1)
        np.testing.assert_array_equal(own["gradient"], wanted)
        sent = np.concatenate([each["embeddings"][name].numpy() for each in asked])
        np.testing.assert_array_equal(own["embedding"], sent.reshape(len(wanted), -1))
        np.testing.assert_array_equal(own["label"], digits()[1][own["row"]])


def test_embeddings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    client = ClientApp()

    @client.query("embed")
    def embed(asked: Message, context: Context) -> Message:
        arrays = ArrayRecord([rows(5, 2)])
        return Message(RecordDict({"arrays": arrays}), reply_to=asked)

    with record_grid(
        InProcessGrid(client, 1), tmp_path, labels=[0, 1, 0, 1], party="bank", **WHERE
    ) as grid:
        with pytest.raises(PartyError, match="'arrays' that came before it has no arr"):
            grid.push_messages([message(rows(4, 2))])
        ids = grid.push_messages([Message(RecordDict(), 1, "query.embed")])
        assert len(list(grid.pull_messages(ids))) == 1
        with pytest.raises(PartyError, match=r"'bank': .* 4 rows.*has '0' of shape \("):
            grid.push_messages([message(rows(4, 2))])
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_may_be_given(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    given = {"message_type": TYPE, "labels": [0, 1, 0, 1]}
    grid = record_grid(InProcessGrid(ClientApp(), 1), recorder, **given)
    grid.push_messages([message(rows(4, 2))])
    assert list(tmp_path.iterdir()) == []
    recorder.save()
    assert len(read_recording(tmp_path).labels) == 4
    other = record_grid(InProcessGrid(ClientApp(), 1), tmp_path, **given)
    with pytest.raises(ConfigError, match="holds a recording already"):
        other.push_messages([message(rows(4, 2))])
