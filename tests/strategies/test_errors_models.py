"""Models whose outputs are wrong, at the start or in mid-run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from error_cases import assert_words, fails_before_training, start
from torch import Tensor, nn
from vertical_cases import COLUMNS, WIDTH, features, labels, simple_parties

from flower_vfl import CrossEntropy, LabelParty, PartyError, PassiveParty


class Turning(nn.Module):
    """A linear layer that returns something else after some calls in training."""

    def __init__(self, calls: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.left, self.change = nn.Linear(COLUMNS, WIDTH), calls, change

    def forward(self, x: Tensor) -> Tensor:
        self.left -= self.training
        output: Tensor = self.linear(x)
        return self.change(output) if self.left < 0 else output


def spoil(value: float) -> Callable[[Tensor], Tensor]:
    def change(output: Tensor) -> Tensor:
        output = output.clone()
        output[1, 2] = value
        return output

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_embedding_that_turns_bad_in_mid_run(value: float) -> None:
    label, (one, _) = simple_parties()
    two = PassiveParty(features(2), Turning(4, spoil(value)), device="cpu")
    with pytest.raises(PartyError) as caught:
        start([label, one, two])
    assert caught.value.party == "passive-2"
    assert caught.value.step == 5
    assert_words(caught.value, "1 NaN or infinite of 48", "learning rate")


def test_large_but_finite_embeddings_are_accepted() -> None:
    """Their sum overflows, each of them does not."""
    still = partial(torch.optim.SGD, lr=0.0)
    label, (one, _) = simple_parties(optimizer=still)
    label.objective.top.weight.data.zero_()  # type: ignore[union-attr,operator]
    large = Turning(0, lambda x: x * 0 + 3e38)
    two = PassiveParty(features(2), large, device="cpu", optimizer=still)
    start([label, one, two], epochs=1)
    assert label.step == 3


@pytest.mark.parametrize(
    ("change", "got"),
    [
        pytest.param(lambda x: x[:-1], "(15, 3)", id="a row less"),
        pytest.param(lambda x: torch.cat([x, x]), "(32, 3)", id="twice the rows"),
        pytest.param(lambda x: x[:, 0], "(16,)", id="1-D"),
        pytest.param(lambda x: (x, x), "tuple", id="a tuple"),
    ],
)
def test_a_bottom_model_with_the_wrong_output(
    change: Callable[[Tensor], Tensor], got: str
) -> None:
    label, (one, _) = simple_parties()
    two = PassiveParty(features(2), Turning(1, change), device="cpu")
    with pytest.raises(PartyError) as caught:
        start([label, one, two])
    assert (caught.value.party, caught.value.step) == ("passive-2", 2)
    assert_words(caught.value, got, "16 rows", "one row per input row")


def test_a_bottom_model_with_the_wrong_output_from_the_start() -> None:
    label, (one, _) = simple_parties()
    two = PassiveParty(features(2), nn.Sequential(nn.Linear(COLUMNS, 3), nn.Flatten(0)))
    fails_before_training([label, one, two], "passive-2", "one row per input row")


def test_a_top_model_that_is_too_narrow() -> None:
    _, passive = simple_parties()
    label = LabelParty(labels(), CrossEntropy(nn.Linear(WIDTH, 1)), name="bank")
    fails_before_training(
        [label, *passive], "'bank'", "passive-1 (3,), passive-2 (3,)", "as wide as"
    )


def test_a_top_model_with_too_many_outputs() -> None:
    _, passive = simple_parties()
    label = LabelParty(labels(), CrossEntropy(nn.Linear(2 * WIDTH, 2)), name="bank")
    fails_before_training([label, *passive], "'bank'", "one output column")


def test_a_sum_of_different_widths() -> None:
    label, (one, _) = simple_parties()
    two = PassiveParty(features(2), nn.Linear(COLUMNS, WIDTH + 1))
    fails_before_training(
        [label, one, two], "passive-2: (4,)", "same width", aggregation="sum"
    )


def test_a_loss_that_explodes_is_the_label_partys() -> None:
    label, passive = simple_parties()
    with pytest.raises(PartyError) as caught:
        start([label, *passive], learning_rate=1e25, epochs=20)
    assert caught.value.step is not None
    assert_words(caught.value, "learning rate")
