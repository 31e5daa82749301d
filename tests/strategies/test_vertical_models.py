"""Aggregations and models of many kinds, beside the same model in one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, Message
from torch import Tensor, nn
from vertical_cases import (
    COLUMNS,
    ROWS,
    SGD,
    WIDTH,
    HookedGrid,
    assert_equal,
    features,
    labels,
    losses,
    scores,
    simple_parties,
    train,
    weights,
)

from flower_vfl import (
    CrossEntropy,
    LabelParty,
    MeanSquaredError,
    PassiveParty,
    in_process,
)
from flower_vfl.parties.schedule import TEST, TRAIN, split_rows
from flower_vfl.protocol.messages import to_tensor
from flower_vfl.randomness import generator
from flower_vfl.strategies import VerticalStrategy


class Weighted(nn.Module):
    """An aggregation with weights of its own."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(0.5, 1.5, parties))

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.weights, parts, strict=True)
        return torch.stack([weight * part for weight, part in pairs]).sum(0)


JOIN: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "concat": lambda parts: torch.cat(parts, dim=1),
    "sum": lambda parts: torch.stack(parts).sum(0),
    "mean": lambda parts: torch.stack(parts).mean(0),
    "max": lambda parts: torch.stack(parts).max(0).values,
    "product": lambda parts: torch.stack(parts).prod(0),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", [*JOIN, "module"])
def test_aggregations_against_autograd_in_one_piece(kind: str, own: bool) -> None:
    torch.manual_seed(1)
    count = 2 + own
    bottoms = [nn.Linear(COLUMNS, WIDTH) for _ in range(count)]
    top = nn.Linear(WIDTH * count if kind == "concat" else WIDTH, 1)
    module = Weighted(count)
    reference = copy.deepcopy(nn.ModuleList([*bottoms, top, module]))
    label = LabelParty(
        labels(),
        CrossEntropy(top),
        optimizer=SGD,
        aggregation=module if kind == "module" else kind,
        device="cpu",
        **({"features": features(0), "model": bottoms[0]} if own else {}),  # type: ignore[arg-type]
    )
    passive = [
        PassiveParty(features(i + 1), model, device="cpu", optimizer=SGD)
        for i, model in enumerate(bottoms[own:])
    ]
    _, result = train([label, *passive], epochs=2, batch_size=0, seed=6)

    rows = torch.from_numpy(np.flatnonzero(split_rows(ROWS, 6) == TRAIN))
    optimizer = SGD(reference.parameters())
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        parts = [
            model(features(i + 1 - own)[rows]) for i, model in enumerate(reference[:-2])
        ]
        joined = reference[-1](parts) if kind == "module" else JOIN[kind](parts)
        loss = F.binary_cross_entropy_with_logits(
            reference[-2](joined)[:, 0], labels()[rows].float()
        )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    assert list(losses(result).values()) == pytest.approx(expected, rel=1e-6)
    ours = nn.ModuleList([*bottoms, top, module]).state_dict()
    for name, theirs in reference.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-7)
    if kind == "module":
        assert not torch.equal(module.weights, Weighted(count).weights)


@pytest.mark.parametrize("aggregation", ["sum", "concat", "max"])
@pytest.mark.parametrize("parties", [1, 2])
def test_modules_that_work_in_place_disturb_nobody(
    parties: int, aggregation: str
) -> None:
    def run(inplace: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(4)
        width = WIDTH * parties if aggregation == "concat" else WIDTH
        top = nn.Sequential(nn.LeakyReLU(0.1, inplace), nn.Linear(width, 1))
        label = LabelParty(
            labels(), CrossEntropy(top), aggregation=aggregation, device="cpu"
        )
        passive = [
            PassiveParty(
                features(i + 1),
                nn.Sequential(
                    nn.LeakyReLU(0.2, inplace),
                    nn.Linear(COLUMNS, WIDTH),
                    nn.LeakyReLU(0.3, inplace),
                ),
                device="cpu",
            )
            for i in range(parties)
        ]
        data = [p.features[0].clone() for p in passive]
        strategy, result = train([label, *passive])
        predicted = [strategy.predict().tolist() for _ in range(2)]
        assert predicted[0] == predicted[1]
        assert_equal([p.features[0] for p in passive], data)
        return weights(label, *passive), [losses(result), scores(result), predicted]

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("aggregation", ["sum", "product", "mean", "max", "concat"])
@pytest.mark.parametrize("parties", [1, 2])
def test_what_was_sent_is_never_changed_afterwards(
    parties: int, aggregation: str
) -> None:
    """In one process a message shares its tensors with the party that made it."""
    torch.manual_seed(0)
    width = WIDTH * parties if aggregation == "concat" else WIDTH
    top = nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(width, 1))
    label = LabelParty(labels(), CrossEntropy(top), optimizer=SGD, device="cpu")
    passive = [
        PassiveParty(
            features(i + 1),
            nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.LeakyReLU(0.2, inplace=True)),
            device="cpu",
            optimizer=SGD,
        )
        for i in range(parties)
    ]
    sent: list[tuple[Array, Tensor]] = []

    def note(message: Message) -> Message:
        for record in message.content.array_records.values():
            sent.extend((a, to_tensor(a).clone()) for a in record.values())
        return message

    grid = HookedGrid(in_process([label, *passive]), note, note)  # type: ignore[arg-type]
    strategy = VerticalStrategy(batch_size=16, aggregation=aggregation, progress=False)
    strategy.start(grid, num_rounds=2)
    strategy.predict("train")
    assert len(sent) > 20 * parties
    for array, then in sent:
        assert torch.equal(to_tensor(array), then)
        assert np.array_equal(array.numpy(), then.numpy())


class TwoInputs(nn.Module):
    """Categories and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 2), nn.Linear(COLUMNS, 2)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        return torch.cat([self.table(categories), self.linear(numbers)], dim=1)


def test_parties_of_different_kinds_in_one_run() -> None:
    """Tuple features, a recurrent model, no parameters, frozen, own optimizers."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(2, 7, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.gru(x.view(len(x), 2, 2))[0]
            return output[:, -1]

    torch.manual_seed(0)
    frozen = nn.Linear(COLUMNS, 5).requires_grad_(False)
    categories = torch.arange(ROWS) % 5
    passive = [
        PassiveParty((categories, features(1)), TwoInputs(), device="cpu"),
        PassiveParty(features(2).numpy(), Last(), device="cpu", optimizer=SGD),
        PassiveParty(features(3).double().numpy(), nn.Identity(), device="cpu"),
        PassiveParty(features(4), frozen, device="cpu"),
    ]
    label = LabelParty(
        labels().numpy(),
        CrossEntropy(nn.Linear(4 + 7 + 4 + 5, 1)),
        optimizer=partial(torch.optim.Adagrad, lr=0.1),
        device="cpu",
    )
    before = [weights(party) for party in passive]
    _, result = train([label, *passive], epochs=4)
    assert losses(result)[4] < losses(result)[1]
    moved = [
        not all(torch.equal(a, b) for a, b in zip(old, weights(party), strict=True))
        for old, party in zip(before, passive, strict=True)
    ]
    assert moved == [True, True, False, False]
    assert [party.step for party in passive] == [12] * 4
    assert all(party.device == torch.device("cpu") for party in (label, *passive))


def test_a_convolution_as_the_cut_layer() -> None:
    """Embeddings with four dimensions, joined by channel, against one piece."""
    torch.manual_seed(0)
    images = torch.randn(ROWS, 1, 6, 6)
    halves = images[..., :3], images[..., 3:]
    bottoms = [nn.Conv2d(1, 2 + i, 3, padding=1) for i in range(2)]
    top = nn.Sequential(nn.Conv2d(5, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    reference = copy.deepcopy(nn.ModuleList([*bottoms, top]))
    label = LabelParty(labels(), CrossEntropy(top), optimizer=SGD, device="cpu")
    passive = [
        PassiveParty(x, m, device="cpu", optimizer=SGD)
        for x, m in zip(halves, bottoms, strict=True)
    ]
    _, result = train([label, *passive], epochs=1, batch_size=0, seed=1)
    rows = torch.from_numpy(np.flatnonzero(split_rows(ROWS, 1) == TRAIN))
    order = torch.randperm(len(rows), generator=generator(1, "batches", 1))
    rows = rows[order]
    joined = torch.cat([reference[i](halves[i][rows]) for i in range(2)], dim=1)
    loss = F.binary_cross_entropy_with_logits(
        reference[2](joined)[:, 0], labels()[rows].float()
    )
    loss.backward()  # type: ignore[no-untyped-call]
    SGD(reference.parameters()).step()
    assert losses(result)[1] == pytest.approx(loss.item())
    ours = nn.ModuleList([*bottoms, top]).state_dict()
    for name, theirs in reference.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-7)


def test_half_precision_bottom_models_train() -> None:
    label, (one, _) = simple_parties()
    half = nn.Linear(COLUMNS, WIDTH).bfloat16()
    two = PassiveParty(features(2).bfloat16(), half, device="cpu", optimizer=SGD)
    before = half.weight.detach().clone()
    train([label, one, two])
    assert half.weight.dtype == torch.bfloat16
    assert not torch.equal(half.weight, before)


def test_regression_in_the_labels_own_unit() -> None:
    torch.manual_seed(0)
    y = features(1)[:, 0] * 70 + 150
    label = LabelParty(
        y,
        MeanSquaredError(nn.Linear(WIDTH, 1), center=150, scale=70),
        optimizer=SGD,
        device="cpu",
    )
    passive = PassiveParty(
        features(1), nn.Linear(COLUMNS, WIDTH), device="cpu", optimizer=SGD
    )
    strategy, result = train([label, passive], epochs=30)
    test = y[split_rows(ROWS, 0) == TEST].numpy()
    found = scores(result)[30]
    assert found["test_pearson"] > 0.95
    assert found["test_rmse"] == pytest.approx(
        float(np.sqrt(np.mean((strategy.predict() - test) ** 2))), rel=1e-5
    )
