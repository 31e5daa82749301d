"""A trained split model, and the completion of its first party's model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.leakage.completion import CompletionResult, ModelCompletion
from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.parties.schedule import TEST, TRAIN
from flower_vfl.simulations.app import client_app, make_strategy
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import result_document, table
from flower_vfl.strategies import build_defense
from flower_vfl.transform import GradientTransform

ATTACKER = "passive-1"


@dataclass(frozen=True)
class Trained:
    """A split model and what its training reported."""

    attacker: PassiveParty
    label: LabelParty
    document: dict[str, Any]

    @property
    def labels(self) -> Tensor:
        """The classes of all rows."""
        assert self.label.raw_labels is not None
        return self.label.raw_labels.long()

    def rows(self, split: int) -> Tensor:
        """Return the rows of a split."""
        assert self.attacker.split is not None
        return torch.from_numpy((self.attacker.split == split).nonzero()[0])

    @property
    def test(self) -> float:
        """The test metric."""
        return float(
            self.document["final"][f"test_{MAIN_METRIC[self.label.objective.task]}"]
        )

    def mean(self, metric: str) -> float:
        """Return the mean of a training metric over parties and epochs."""
        records = table(self.document).query("split == 'train'")
        return float(records["value"][records["metric"] == metric].mean())


def train(config: RunConfig, readers: Sequence[GradientTransform] = ()) -> Trained:
    """Train a split model; readers see what leaves, after the defense."""
    config = replace(
        config, reproducible_noise=True, evaluate_every=config.epochs, device="cpu"
    )
    strategy = make_strategy(config, progress=False)
    if readers:
        defenses = [build_defense(config.defense)] if config.defense else []
        strategy.defense = replace(strategy.defense, what=[*defenses, *readers])
    started = time.time()
    with InProcessGrid(client_app, config.parties + 1, config.to_run_config()) as grid:
        result = strategy.start(grid, num_rounds=config.epochs)
        parties = grid.parties()
    attacker, label = parties[ATTACKER], parties["label"]
    assert isinstance(attacker, PassiveParty) and isinstance(label, LabelParty)
    document = result_document(config, "in-process", result, time.time() - started)
    return Trained(attacker, label, document)


def complete(
    attack: ModelCompletion,
    trained: Trained,
    model: nn.Module,
    seed: int,
    held: int = TEST,
) -> CompletionResult:
    """Let the attacker complete a bottom model; score it on held-out rows as well."""
    features, labels = trained.attacker.features, trained.labels
    training, test = trained.rows(TRAIN), trained.rows(held)
    return replace(attack, seed=seed).run(
        model,
        tuple(part[training] for part in features),
        labels[training],
        int(labels.max()) + 1,
        tuple(part[test] for part in features),
        labels[test],
    )
