"""Encryption between the label party and the passive parties of one session."""

from __future__ import annotations

import os
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from flwr.app import Array
from sealed_cases import NAMES, pinned, plain_array
from torch import Tensor, nn

from flower_vfl import CrossEntropy, LabelParty, PartyError
from flower_vfl.parties.checkpoints import from_bytes, to_bytes
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.protocol.messages import ConfigError, to_tensor
from flower_vfl.protocol.sealing import (
    TRAINING,
    Seals,
    evaluation_use,
    new_seals,
    serving_use,
)

SHAPES = {"passive-1": (3,), "passive-2": (2, 2)}


def config(**changed: Any) -> TrainingConfig:
    given = {"seed": 1, "batch_size": 4, "parties": SHAPES, "sealed": True}
    return TrainingConfig(**{**given, **changed})


def parties(**differently: TrainingConfig) -> dict[str, Seals]:
    """Return the seals of three parties that have exchanged keys."""
    settings = pinned()
    sides = {}
    for name in NAMES:
        told = differently.get(name.replace("-", "_"), config())
        role: Any = "label" if name == "label" else "passive"
        sides[name] = new_seals(name, role, "label", told, "fingerprint")
    hellos = {name: side.hello(settings[name]) for name, side in sides.items()}
    for name, side in sides.items():
        side.exchange_keys([hellos[peer] for peer in side.peers], settings[name])
    return sides


def delivered(sides: dict[str, Seals], tensor: Tensor, *at: Any) -> Tensor:
    array = sides["passive-1"].embedding(tensor, *at)
    return sides["label"].embeddings({"passive-1": array}, *at)["passive-1"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3),
        torch.randn(4, 3).t(),  # not contiguous
        torch.randn(2, 3, 4, dtype=torch.float64),
        torch.randn(4, 3, dtype=torch.float16),
        torch.arange(4),
        torch.empty(0, 3),
    ],
)
def test_a_tensor_arrives_as_it_was(tensor: Tensor) -> None:
    found = delivered(parties(), tensor, TRAINING, 1, 1, 0)
    assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def test_bfloat16_travels_as_float32() -> None:
    tensor = torch.randn(4, 3).bfloat16()
    found = delivered(parties(), tensor, TRAINING, 1, 1, 0)
    assert torch.equal(found, tensor.float())


def test_an_answer_belongs_to_one_embedding() -> None:
    sides = parties()
    passive, label = sides["passive-1"], sides["label"]
    gradients = []
    for step in (1, 2):
        delivered(sides, torch.randn(4, 3), TRAINING, step, 1, step - 1)
        gradients.append(label.answer("passive-1", torch.ones(4, 3), TRAINING, step))
        if step == 1:
            found = passive.answered(gradients[0], TRAINING, 1)
            assert found is not None and torch.equal(found, torch.ones(4, 3))
            with pytest.raises(PartyError, match="has sent a second answer"):
                passive.answered(gradients[0], TRAINING, 1)
    asked = dict(passive.open_questions)
    with pytest.raises(PartyError, match="has sent a second answer"):
        passive.answered(gradients[0], TRAINING, 1)
    with pytest.raises(PartyError, match="repeated"):  # under the number of the new one
        passive.answered(gradients[0], TRAINING, 2)
    passive.open_questions = asked
    assert passive.answered(gradients[1], TRAINING, 2) is not None


def test_several_embeddings_wait_for_answers() -> None:
    """Each answer fits the embedding of its own step only."""
    sides = parties()
    passive, label = sides["passive-1"], sides["label"]
    arrays = {
        step: passive.embedding(torch.randn(4, 3), TRAINING, step, 1, step - 1)
        for step in (1, 2, 3)
    }
    answers = {}
    for step, array in arrays.items():
        label.embeddings({"passive-1": array}, TRAINING, step, 1, step - 1)
        given = torch.full((4, 3), float(step))
        answers[step] = label.answer("passive-1", given, TRAINING, step)
    asked = dict(passive.open_questions)
    for wrong in (2, 3):
        with pytest.raises(PartyError, match="repeated or swapped"):
            passive.answered(answers[wrong], TRAINING, 1)
        passive.open_questions = dict(asked)
    for step in (1, 2, 3):
        found = passive.answered(answers[step], TRAINING, step)
        assert found is not None and float(found[0, 0]) == step
    assert not passive.open_questions and not label.open_questions


def test_a_withheld_answer_is_an_answer() -> None:
    sides = parties()
    delivered(sides, torch.randn(4, 3), TRAINING, 1, 1, 0)
    answers = sides["label"].answers({}, TRAINING, 1)
    assert set(answers) == set(SHAPES)
    assert sides["passive-1"].answered(answers["passive-1"], TRAINING, 1) is None


AT = (TRAINING, 2, 1, 1)


@pytest.mark.parametrize(
    "at",
    [
        (TRAINING, 3, 1, 1),
        (TRAINING, 2, 2, 1),
        (TRAINING, 2, 1, 2),
        (evaluation_use("train"), 2, 1, 1),
        (serving_use(1, 5), 2, 1, 1),
    ],
)
def test_what_is_for_something_else_is_refused(at: Any) -> None:
    sides = parties()
    array = sides["passive-1"].embedding(torch.randn(4, 3), *AT)
    with pytest.raises(PartyError, match="altered, repeated or swapped") as caught:
        sides["label"].embeddings({"passive-1": array}, *at)
    assert (caught.value.party, caught.value.step) == ("passive-1", at[1])
    assert sides["label"].embeddings({"passive-1": array}, *AT)


def test_every_bit_counts() -> None:
    sides = parties()
    array = sides["passive-1"].embedding(torch.randn(2, 1), *AT)
    for place in range(len(array.data)):
        data = bytearray(array.data)
        data[place] ^= 1 << place % 8
        changed = {"passive-1": plain_array(array, data)}
        with pytest.raises(PartyError, match="altered"):
            sides["label"].embeddings(changed, *AT)
    for length in (0, 5, 12, 20, len(array.data) - 1):
        short = {"passive-1": plain_array(array, array.data[:length])}
        with pytest.raises(PartyError, match="altered"):
            sides["label"].embeddings(short, *AT)


def test_sides_and_directions_have_keys_of_their_own() -> None:
    sides = parties()
    array = sides["passive-2"].embedding(torch.randn(4, 3), *AT)
    with pytest.raises(PartyError, match="swapped"):
        sides["label"].embeddings({"passive-1": array}, *AT)
    with pytest.raises(PartyError, match="shares no key with 'stranger'"):
        sides["label"].embeddings({"stranger": array}, *AT)
    assert len(set(sides["label"].keys.values())) == 4
    reflected = sides["passive-1"].embedding(torch.randn(4, 3), *AT)
    with pytest.raises(PartyError, match="swapped"):
        sides["passive-1"].answered(reflected, TRAINING, 2)


@pytest.mark.parametrize(
    "changed",
    [{"batch_size": 5}, {"seed": 2}, {"parties": {**SHAPES, "passive-3": (1,)}}],
)
def test_other_settings_give_other_keys(changed: Any) -> None:
    sides = parties(passive_1=config(**changed))
    array = sides["passive-1"].embedding(torch.randn(4, 3), *AT)
    with pytest.raises(PartyError, match="other keys or settings"):
        sides["label"].embeddings({"passive-1": array}, *AT)


def test_what_only_one_party_is_told_does_not_matter() -> None:
    own = config(learning_rate=0.5, defense="iso", defended="label", leakage="{}")
    sides = parties(label=own)
    assert (
        sides["label"].keys["label", "passive-1"]
        == (sides["passive-1"].keys["label", "passive-1"])
    )


def test_no_two_ciphertexts_are_equal() -> None:
    sides, tensor = parties(), torch.ones(4, 3)
    use = evaluation_use("test")
    found = {sides["passive-1"].embedding(tensor, use, 1).data for _ in range(50)}
    assert len(found) == 50 == len({data[:12] for data in found})


def test_the_state_survives_in_another_process() -> None:
    sides = parties()
    array = sides["passive-1"].embedding(torch.ones(4, 3), *AT)
    label, passive = (
        Seals(**from_bytes(to_bytes(vars(sides[name])))) for name in NAMES[:2]
    )
    assert label == sides["label"]
    assert label.embeddings({"passive-1": array}, *AT)
    answer = label.answer("passive-1", torch.ones(4, 3), TRAINING, 2)
    assert passive.answered(answer, TRAINING, 2) is not None
    with pytest.raises(PartyError, match="asked twice"):
        passive.embedding(torch.ones(4, 3), *AT)


def pickled() -> bytes:
    """Return an array whose contents must not be loaded."""
    buffer = BytesIO()
    np.save(buffer, np.array([os.getcwd], dtype=object), allow_pickle=True)
    return buffer.getvalue()


OPEN_BRACKET = b"\x93NUMPY\x01\x00\x0b\x00{'descr': ("  # tokenize.TokenError in numpy


@pytest.mark.parametrize(
    "content", [b"", b"no array", b"\x93NUMPY", pickled(), OPEN_BRACKET]
)
def test_a_party_that_encrypts_nonsense_is_named(content: bytes) -> None:
    sides = parties()
    key, nonce = sides["passive-1"].keys["passive-1", "label"], os.urandom(12)
    bound = sides["passive-1"]._bound("embedding", AT[0], b"", *AT[1:])
    data = nonce + AESGCM(key).encrypt(nonce, content, bound)
    array = Array("uint8", (len(data),), "flower_vfl.sealed", data)
    with pytest.raises(PartyError) as caught:
        sides["label"].embeddings({"passive-1": array}, *AT)
    assert caught.value.party == "passive-1"


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_a_party_that_encrypts_other_numbers_than_floats_is_named(
    dtype: torch.dtype,
) -> None:
    label = LabelParty(torch.arange(4) % 2, CrossEntropy(nn.Linear(3, 1)), name="label")
    label.describe(b"")
    label.configure(config(parties={"passive-1": (3,)}, test_fraction=0.0))
    found = delivered(parties(), torch.ones(4, 3, dtype=dtype), TRAINING, 1, 1, 0)
    with pytest.raises(PartyError, match=r"'passive-1', step 1.*of type torch\."):
        label.train_step(1, 1, 0, {"passive-1": found})


def test_an_unsealed_party_cannot_read_it() -> None:
    array = parties()["passive-1"].embedding(torch.ones(4, 3), *AT)
    with pytest.raises(ConfigError, match="cannot be read"):
        to_tensor(array)
