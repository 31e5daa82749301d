"""Test metrics of split training beside a plain PyTorch loop, mean over the seeds.

Both start from the same weights, see the same batches and use the default settings of
``flower-vfl run``; the plain loop trains one model with one optimizer and knows nothing
of parties. Prints one line per dataset.
"""

from __future__ import annotations

import argparse
import logging
import statistics

import torch
from torch import Tensor, nn

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.metrics import MAIN_METRIC, METRICS
from flower_vfl.parties.base import Party
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.schedule import TEST, TRAIN
from flower_vfl.randomness import RandomState, derive_seed, generator
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.models.registry import build_optimizer
from flower_vfl.simulations.parties import load_rows, make_label, make_passive

TARGETS = {
    "breast-cancer": 0.985,
    "spambase": 0.95,
    "credit-default": 0.75,
    "diabetes": 0.65,
    "digits": 0.95,
}


def split_score(config: RunConfig) -> float:
    """Return the main test metric of a split run."""
    nodes = config.parties + 1
    with InProcessGrid(client_app, nodes, config.to_run_config()) as grid:
        final = train(grid, config, "in-process", progress=False)["final"]
    names = [f"test_{name}" for name in MAIN_METRIC.values()]
    return next(final[name] for name in names if name in final)


def plain_score(config: RunConfig) -> float:
    """Return the same metric of a model trained in one piece."""
    parties: list[Party] = []
    for index in range(config.parties + 1):
        name = f"passive-{index}" if index else "label"
        with RandomState(derive_seed(config.seed, "model", name)):
            rows = load_rows(config, index)
            make = make_passive if index else make_label
            parties.append(make(config, rows))
    label = parties[0]
    assert isinstance(label, LabelParty) and label.raw_labels is not None
    objective, codes = label.objective, label.split
    bottoms = [p.model for p in parties[1:] if p.model is not None]
    features = [p.features for p in parties[1:]]
    modules = nn.ModuleList([*bottoms, objective])
    optimizer = build_optimizer(config.optimizer)(list(modules.parameters()))
    labels = objective.encode(label.raw_labels)
    assert codes is not None
    train_rows = torch.from_numpy((codes == TRAIN).nonzero()[0])

    def joined(rows: Tensor) -> Tensor:
        parts = [
            bottom(*(x[rows] for x in inputs))
            for bottom, inputs in zip(bottoms, features, strict=True)
        ]
        return torch.cat(parts, dim=1)

    for epoch in range(1, config.epochs + 1):
        stream = generator(config.seed, "batches", epoch)
        order = train_rows[torch.randperm(len(train_rows), generator=stream)]
        for rows in order.split(config.batch_size):
            optimizer.zero_grad()
            loss = objective.loss(objective.top(joined(rows)), labels[rows])
            loss.backward()
            optimizer.step()
    modules.eval()
    test_rows = torch.from_numpy((codes == TEST).nonzero()[0])
    with torch.no_grad():
        predicted = objective.predict(joined(test_rows)).double().numpy()
    truth = label.raw_labels[test_rows].double().numpy()
    return METRICS[objective.task](predicted, truth)[MAIN_METRIC[objective.task]]


def main() -> None:
    """Compare every dataset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--datasets", nargs="+", default=list(TARGETS), choices=TARGETS)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    for dataset in arguments.datasets:
        split, plain = [], []
        for seed in range(arguments.seeds):
            config = RunConfig(dataset=dataset, seed=seed)
            split.append(split_score(config))
            plain.append(plain_score(config))
        ours, theirs = statistics.mean(split), statistics.mean(plain)
        print(
            f"{dataset}: split {ours:.4f}, plain {theirs:.4f}, difference "
            f"{ours - theirs:+.4f}, wanted at least {TARGETS[dataset]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
