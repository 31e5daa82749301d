"""Forward passes of a passive party that wait for their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from vertical_cases import ADAM, COLUMNS, WIDTH, assert_equal, features

from flower_vfl import PartyError, PassiveParty
from flower_vfl.parties.checkpoints import from_bytes, to_bytes
from flower_vfl.protocol.config import TrainingConfig

PIPELINE, ROWS = 2, 16


class Tied(nn.Module):
    """Uses one layer twice, draws random numbers, and replaces its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(COLUMNS))
        self.inner = nn.Linear(COLUMNS, COLUMNS)
        self.twin = self.inner
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(COLUMNS, WIDTH)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        hidden = self.twin(self.drop(self.inner(x - self.mean).relu()))
        output: Tensor = self.last(hidden)
        return output


def party() -> PassiveParty:
    torch.manual_seed(0)
    made = PassiveParty(features(1), Tied(), name="p", optimizer=ADAM, device="cpu")
    made.configure(TrainingConfig(seed=1, batch_size=ROWS, pipeline=PIPELINE))
    return made


def gradient(step: int) -> Tensor:
    stream = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=stream)


def test_saved_passes_are_repeated_as_they_were() -> None:
    """One party stays in memory, the other is saved and loaded after every request."""
    stays, other = party(), party()
    requests = [("f", 1), ("f", 2), ("f", 3), ("b", 1), ("b", 2), ("b", 3)]
    for kind, step in requests:
        if kind == "f":
            expected = stays.forward(step, 1, step - 1)
            assert torch.equal(other.forward(step, 1, step - 1), expected)
        else:
            for each in (stays, other):
                each.backward(step, gradient(step))
        state = from_bytes(to_bytes(other.state_dict()))
        other = party()
        other.load_state_dict(state)
        assert_equal(other.state_dict(), stays.state_dict())
    assert not stays.state_dict()["waiting"]


def test_a_waiting_batch_can_be_asked_for_again() -> None:
    made, other = party(), party()
    first = made.forward(1, 1, 0)
    second = made.forward(2, 1, 1)
    other.load_state_dict(from_bytes(to_bytes(made.state_dict())))
    before = from_bytes(to_bytes(other.state_dict()))
    assert torch.equal(other.forward(1, 1, 0), first)
    assert torch.equal(other.forward(2, 1, 1), second)
    assert_equal(from_bytes(to_bytes(other.state_dict())), before)
    assert torch.equal(other.forward(3, 1, 2), made.forward(3, 1, 2))


def test_what_is_out_of_order_is_refused() -> None:
    made = party()
    for step in (1, 2, 3):
        made.forward(step, 1, step - 1)
    with pytest.raises(PartyError, match="step 4 while step 1 waits for its gradient"):
        made.forward(4, 2, 0)
    with pytest.raises(PartyError, match="gradient of step 2 but expects step 1"):
        made.backward(2, gradient(2))
    made.backward(1, gradient(1))
    with pytest.raises(PartyError, match="was asked for step 5"):
        made.forward(5, 2, 1)


def test_a_withheld_gradient_makes_room() -> None:
    made = party()
    for step in (1, 2, 3):
        made.forward(step, 1, step - 1)
    before = [weight.detach().clone() for weight in made.model.parameters()]
    made.backward(1, None)
    assert_equal([weight.detach() for weight in made.model.parameters()], before)
    made.forward(4, 2, 0)
    assert made.step == 1 and made.ahead == 3
