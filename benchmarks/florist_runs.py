"""The runs behind the tables of ``florist.py``: one training each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from flower_vfl import CrossEntropy, Imputation, LabelParty, PassiveParty, in_process
from flower_vfl.leakage.attacks import leak_auc
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.base import LabelStep
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.parties.schedule import TRAIN
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.models import build_bottom, build_top
from flower_vfl.simulations.parties import PartyRows, load_rows
from flower_vfl.strategies import EarlyStopping, VerticalStrategy

WIDTH = 128


@dataclass(frozen=True)
class Sample:
    """How one dataset is trained on."""

    bottom: str
    epochs: int
    batch: int
    rate: float
    limit: int = 0


SAMPLES = {
    "criteo-indexed": Sample("florist-deep", 12, 512, 1e-3),
    "criteo": Sample("florist-deep", 12, 256, 1e-3),
    "give-me-some-credit": Sample("mlp:hidden=128,final=relu", 12, 1024, 1e-3, 40000),
    "imdb": Sample("mlp:hidden=128,final=relu", 8, 512, 1e-3, 20000),
}


@dataclass(frozen=True)
class Case:
    """One training run, up to its seed."""

    dataset: str
    alpha: float = 0.0
    beta: float = 0.0
    labels: str = "majority"
    features: str = "sampling"
    calibration: str = ""
    partial: bool = False
    measured: bool = False


@dataclass(frozen=True)
class Figures:
    """What a run, or the mean of several, shows."""

    auc: float
    ace: float
    distance: float  # attack AUC
    side: float

    @property
    def attack(self) -> float:
        """The better of both attacks."""
        return max(self.distance, self.side)


@lru_cache(maxsize=8)
def rows_of(dataset: str, seed: int) -> tuple[PartyRows, PartyRows]:
    """Return what the label party and the passive party hold of a dataset."""
    sample = SAMPLES[dataset]
    config = RunConfig(
        dataset=dataset,
        parties=1,
        seed=seed,
        limit=sample.limit,
        test_fraction=0.1,
        valid_fraction=0.1,
    )
    return load_rows(config, 0), load_rows(config, 1)


def absent_rows(codes: np.ndarray, ratio: float, seed: int, side: str) -> np.ndarray:
    """Return which rows one side lacks: the same for all strategies."""
    training = np.flatnonzero(codes == TRAIN)
    stream = np.random.default_rng([seed, len(side)])
    order = stream.permutation(training)  # a larger ratio adds to a smaller one
    mask = np.zeros(len(codes), dtype=bool)
    mask[order[: round(ratio * len(training))]] = True
    return mask


def holdings(case: Case, codes: np.ndarray, seed: int) -> tuple[RowIndex, RowIndex]:
    """Return what the label party and the passive party are placed on."""
    labels = absent_rows(codes, case.beta, seed, "label")
    features = absent_rows(codes, case.alpha, seed, "features")
    if case.partial:
        kept = torch.from_numpy(np.flatnonzero(~(labels | features)))
        return RowIndex(kept), RowIndex(kept)
    shares = {"passive-1": 1.0 - case.alpha, "label": 1.0 - case.beta}
    numbers = np.arange(len(codes))
    both = (np.where(absent, -1, numbers) for absent in (labels, features))
    own, others = (RowIndex(torch.from_numpy(local), shares) for local in both)
    return own, others


def epochs_between(case: Case, codes: np.ndarray) -> int:
    """Return how many epochs of a case have the steps of one full epoch."""
    rows, batch = int((codes == TRAIN).sum()), SAMPLES[case.dataset].batch
    kept = (1.0 - case.alpha) * (1.0 - case.beta) if case.partial else 1.0
    return math.ceil(rows / batch) // math.ceil(kept * rows / batch)


class Noting(LabelParty):
    """A curious label party: it keeps every embedding, by row."""

    seen: list[torch.Tensor]  # of each epoch

    def train_step(
        self, step: int, epoch: int, index: int, embeddings: Mapping[str, torch.Tensor]
    ) -> LabelStep:
        """Train as any other, and take notes."""
        received = embeddings["passive-1"].detach()
        if epoch > len(self.seen):
            self.seen.append(torch.zeros(self.rows, received.shape[1]))
        rows = self.configured().training_batches(epoch)[index]
        self.seen[epoch - 1][rows] = received
        return super().train_step(step, epoch, index, embeddings)


def attacks_by_draw(label: Noting, absent: np.ndarray) -> tuple[float, float]:
    """Return AUCs of telling synthetic rows by change and by equality.

    Change: 1 − cosine of a row's embeddings of the last two epochs. Equality: how close
    the nearest other row of the last epoch is.
    """
    rows = label.configured().rows("train")
    before, after = (F.normalize(part[rows], dim=1) for part in label.seen[-2:])
    change = 1.0 - (before * after).sum(dim=1)
    nearest = [
        (part @ after.T).topk(2, dim=1).values[:, 1] for part in after.split(2048)
    ]
    truth = torch.from_numpy(absent)[rows].long()
    return leak_auc(change, truth), leak_auc(torch.cat(nearest), truth)


def run(case: Case, seed: int) -> Figures:
    """Train once."""
    figures, _ = run_with(case, seed)
    return figures


def run_with(
    case: Case, seed: int, kind: type[LabelParty] = LabelParty
) -> tuple[Figures, LabelParty]:
    """Train once; return the label party too."""
    sample = SAMPLES[case.dataset]
    label_rows, passive_rows = rows_of(case.dataset, seed)
    spec = passive_rows.data.spec
    assert spec is not None
    torch.manual_seed(seed)
    adam = partial(torch.optim.Adam, lr=sample.rate)
    passive = PassiveParty(
        passive_rows.data.inputs,
        build_bottom(sample.bottom, spec, WIDTH),
        split=passive_rows.codes,
        device="cpu",
        optimizer=adam,
        imputation=Imputation(features=case.features, secret=seed),
    )
    label = kind(
        label_rows.labels,
        CrossEntropy(build_top("florist-deep", WIDTH, 1)),
        optimizer=adam,
        split=label_rows.codes,
        synthetic_labels=case.labels,
        calibration=case.calibration,
        secret=seed,
        trust_server=True,
        device="cpu",
    )
    if isinstance(label, Noting):
        label.seen = []
    own, others = holdings(case, label_rows.codes, seed)
    label.place(own)
    passive.place(others)
    every = epochs_between(case, label_rows.codes)
    strategy = VerticalStrategy(
        batch_size=sample.batch,
        seed=seed,
        evaluate_every=every,
        early_stopping=EarlyStopping(patience=3, restore_best=False),
        leakage=Leakage(membership="joint") if case.measured else None,
        progress=False,
    )
    with in_process([label, passive]) as grid:
        result = strategy.start(grid, num_rounds=sample.epochs * every)
    evaluated: Any = result.evaluate_metrics_clientapp.values()
    last = max(evaluated, key=lambda metrics: metrics["valid_auc"])
    found = result.membership().get("passive-1", {})
    kind = "embedding" if case.alpha else "spectral"
    attacks = [found.get(k, {}).get("mean", math.nan) for k in (kind, f"{kind}_sides")]
    return Figures(float(last["test_auc"]), float(last["test_ace"]), *attacks), label


def mean(case: Case, seeds: int) -> Figures:
    """Return the mean over seeds."""
    found = [run(case, seed) for seed in range(seeds)]
    names = ("auc", "ace", "distance", "side")
    auc, ace, distance, side = (
        statistics.mean(getattr(f, name) for f in found) for name in names
    )
    return Figures(auc, ace, max(distance, 1.0 - distance), side)
