"""A split run equals the model trained in one piece by a plain PyTorch loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from torch import Tensor, nn

from flower_vfl import (
    CrossEntropy,
    LabelParty,
    MeanSquaredError,
    Objective,
    PassiveParty,
    in_process,
)
from flower_vfl.parties.schedule import TRAIN, split_rows
from flower_vfl.randomness import RandomState, derive_seed, generator
from flower_vfl.strategies import VerticalStrategy

ROWS, COLUMNS, WIDTH, EPOCHS, BATCH, SEED = 150, 5, 6, 3, 32, 7
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}


def bottom(kind: str) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(COLUMNS, 16), nn.ReLU()]
    if kind == "dropout":
        layers.append(nn.Dropout(0.3))
    if kind == "batch-norm":
        layers.append(nn.BatchNorm1d(16))
    return nn.Sequential(*layers, nn.Linear(16, WIDTH))


def labels_for(task: str) -> Tensor:
    stream = torch.Generator().manual_seed(3)
    if task == "regression":
        return torch.randn(ROWS, generator=stream)
    return torch.randint(0, 2 if task == "binary" else 4, (ROWS,), generator=stream)


def plain_loss(task: str, output: Tensor, labels: Tensor) -> Tensor:
    if task == "binary":
        return F.binary_cross_entropy_with_logits(output[:, 0], labels.float())
    if task == "multiclass":
        return F.cross_entropy(output, labels)
    return F.mse_loss(output[:, 0], labels)


def plain_training(
    names: list[str],
    features: list[Tensor],
    bottoms: list[nn.Module],
    top: nn.Module,
    labels: Tensor,
    task: str,
    aggregation: str,
    optimizer: str,
) -> list[float]:
    """Train one model the ordinary way; dropout draws from each party's own stream."""
    modules = nn.ModuleList([*bottoms, top])
    optim = OPTIMIZERS[optimizer](modules.parameters())
    streams = {
        name: RandomState(derive_seed(SEED, "training", name))
        for name in [*names, "label"]
    }
    codes = split_rows(ROWS, SEED, 0.2)
    rows = torch.from_numpy((codes == TRAIN).nonzero()[0])
    losses = []
    modules.train()
    for epoch in range(1, EPOCHS + 1):
        order = torch.randperm(len(rows), generator=generator(SEED, "batches", epoch))
        batches = rows[order].split(BATCH)
        total = 0.0
        for batch in batches:
            optim.zero_grad()
            parts = []
            for name, data, module in zip(names, features, bottoms, strict=True):
                with streams[name]:
                    parts.append(module(data[batch]))
            joined = parts[0]
            if aggregation == "concat":
                joined = torch.cat(parts, dim=1)
            else:
                for part in parts[1:]:
                    joined = joined + part
            with streams["label"]:
                loss = plain_loss(task, top(joined), labels[batch])
            loss.backward()
            optim.step()
            total += loss.item() * len(batch)
        losses.append(total / len(rows))
    return losses


def weights(*modules: nn.Module) -> list[Tensor]:
    return [t for module in modules for t in module.state_dict().values()]


@pytest.mark.parametrize(
    ("task", "aggregation", "parties", "own_features", "optimizer", "kind"),
    covering(
        ["binary", "multiclass", "regression"],
        ["concat", "sum"],
        [1, 3],
        [False, True],
        ["adam", "momentum"],
        ["plain", "dropout", "batch-norm"],
        strength=3,
    ),
)
def test_split_run_is_bit_equal_to_the_plain_loop(
    task: str,
    aggregation: str,
    parties: int,
    own_features: bool,
    optimizer: str,
    kind: str,
) -> None:
    torch.manual_seed(0)
    labels = labels_for(task)
    names = [f"passive-{i + 1}" for i in range(parties)]
    if own_features:
        names = ["label", *names]
    features = [torch.randn(ROWS, COLUMNS) for _ in names]
    bottoms = [bottom(kind) for _ in names]
    outputs = 4 if task == "multiclass" else 1
    inputs = WIDTH * len(names) if aggregation == "concat" else WIDTH
    top = nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Dropout(0.2))
    top.append(nn.Linear(8, outputs))
    reference = copy.deepcopy((bottoms, top))

    objective: Objective = (
        MeanSquaredError(top)
        if task == "regression"
        else CrossEntropy(top, classes=2 if task == "binary" else 4)
    )
    make = OPTIMIZERS[optimizer]
    own = {"features": features[0], "model": bottoms[0]} if own_features else {}
    skip = int(own_features)
    grid = in_process(
        [
            LabelParty(labels, objective, optimizer=make, device="cpu", **own),
            *(
                PassiveParty(x, m, optimizer=make, device="cpu")
                for x, m in zip(features[skip:], bottoms[skip:], strict=True)
            ),
        ]
    )
    strategy = VerticalStrategy(
        batch_size=BATCH, seed=SEED, aggregation=aggregation, evaluate_every=2
    )
    result = strategy.start(grid, num_rounds=EPOCHS)

    losses = plain_training(
        names, features, *reference, labels, task, aggregation, optimizer
    )
    split_losses = [m["loss"] for m in result.train_metrics_clientapp.values()]
    assert split_losses == losses
    split_weights = weights(*bottoms, top)
    plain_weights = weights(*reference[0], reference[1])
    assert len(split_weights) == len(plain_weights)
    for ours, theirs in zip(split_weights, plain_weights, strict=True):
        assert torch.equal(ours, theirs)
