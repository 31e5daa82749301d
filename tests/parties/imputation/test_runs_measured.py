"""Calibration and membership attacks in runs on rows that parties lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from imputation_cases import UNION, aligned_app, row_index, start, strategy
from torch import nn
from vertical_cases import (
    ROWS,
    bottom,
    features,
    final_states,
    scores,
    simple_parties,
    top,
)

from flower_vfl import (
    CrossEntropy,
    Imputation,
    LabelParty,
    PartyError,
    PassiveParty,
    in_process,
)
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.imputation import RowIndex
from flower_vfl.parties.schedule import TEST, TRAIN, split_rows
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.strategies import VerticalStrategy


def calibrated(kind: str, when: str, alpha: float, beta: float) -> dict[str, Any]:
    """Return metrics of a model that can learn the truth, on synthetic rows."""
    rows = 3000
    stream = np.random.default_rng(5)
    x = stream.integers(0, 4, rows)
    y = stream.random(rows) < np.array([0.05, 0.2, 0.3, 0.6])[x]
    codes = np.where(np.arange(rows) < 2000, TRAIN, TEST).astype(np.int8)
    torch.manual_seed(1)
    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.05)  # noqa: E731
    label = LabelParty(
        y.astype(np.int64),
        CrossEntropy(nn.Linear(4, 1)),
        optimizer=adam,
        split=codes,
        device="cpu",
        imputation=Imputation(labels=kind, calibration=when, secret=1),
    )
    one_hot = np.eye(4, dtype=np.float32)[x]
    passive = PassiveParty(
        one_hot,
        nn.Linear(4, 4),
        split=codes,
        device="cpu",
        optimizer=adam,
        imputation=Imputation(secret=1),
    )
    shares = {"label": 1.0 - beta, "passive-1": 1.0 - alpha}
    for party, ratio in ((label, beta), (passive, alpha)):
        lacks = (stream.random(rows) < ratio) & (codes == TRAIN)
        party.place(
            RowIndex(torch.from_numpy(np.where(lacks, -1, np.arange(rows))), shares)
        )
    with in_process([label, passive]) as grid:
        result = VerticalStrategy(batch_size=250, threads=1, progress=False).start(
            grid, num_rounds=15
        )
    return dict(scores(result)[15])


@pytest.mark.parametrize(
    ("alpha", "beta"),
    [(0.0, 0.5), pytest.param(0.5, 0.0, marks=pytest.mark.extra), (0.4, 0.4)],
)
def test_calibration_brings_probabilities_back(alpha: float, beta: float) -> None:
    plain = calibrated("majority", "", alpha, beta)["test_ace"]
    for when in ("te", "tr"):
        found = calibrated("majority", when, alpha, beta)
        assert found["test_ace"] < 0.5 * plain
        assert found["test_auc"] > 0.68  # the truth has 0.74


def labelled(seed: int) -> float:
    """Return the share of training rows that the label party holds."""
    training = split_rows(UNION, seed) == TRAIN
    return float(row_index(0).held.numpy()[training].mean())


def test_a_party_that_only_predicts_is_calibrated_too(tmp_path: Path) -> None:
    start(aligned_app(Imputation(calibration="te", secret=7)), tmp_path)
    state = final_states(tmp_path)["label"]
    blind = LabelParty(
        None, CrossEntropy(top(3)), rows=ROWS, features=features(0), model=bottom()
    )
    blind.describe(b"")
    assert blind.objective.calibration is None
    blind.configure(
        TrainingConfig(1, 16, parties={"passive-1": (3,), "passive-2": (3,)})
    )
    blind.load_state_dict(state)
    found = blind.objective.calibration
    assert found is not None and found.when == "te"
    assert found.weight == pytest.approx(labelled(3) * 0.75 * 0.75)


def test_membership_is_measured_on_both_sides(tmp_path: Path) -> None:
    leakage = Leakage(membership="joint")
    app = aligned_app(
        Imputation(labels="minority", secret=7),
        Imputation(features="gaussian", secret=7),
    )
    result = start(app, tmp_path, leakage=leakage)
    found = result.membership()
    assert set(found) == {"passive-1", "passive-2"}
    for party in found.values():
        kinds = {"spectral", "spectral_sides", "embedding", "embedding_sides"}
        assert set(party) == kinds
        assert all(0.0 <= numbers["mean"] <= 1.0 for numbers in party.values())
        assert party["embedding"]["batches"] == party["spectral"]["batches"] == 8
    assert result.leakage() == {}  # labels were not attacked
    kind = ("membership", "passive-1", "embedding")
    steps = [r.step for r in result.records if (r.metric, r.party, r.attack) == kind]
    assert steps == list(range(1, 9))


def test_membership_with_labels_needs_a_label_party_that_trusts(tmp_path: Path) -> None:
    app = aligned_app(trust_server=False)
    with pytest.raises(PartyError, match="does not trust"):
        start(app, tmp_path, leakage=Leakage(membership="joint"))
    result = start(app, tmp_path, leakage=Leakage(membership="own"))
    assert set(result.membership()["passive-1"]) >= {"embedding", "spectral"}


def test_score_attacks_look_for_real_labels_only(tmp_path: Path) -> None:
    leakage = Leakage(attacks=("norm",), membership="own")
    result = start(aligned_app(), tmp_path, leakage=leakage)
    assert set(result.leakage()["passive-1"]) == {"norm"}
    assert "spectral" in result.membership()["passive-1"]


def test_a_run_without_missing_rows_measures_no_membership() -> None:
    label, passive = simple_parties(1)
    with in_process([label, *passive]) as grid:
        driver = strategy(leakage=Leakage(membership="own"))
        assert driver.start(grid, num_rounds=1).membership() == {}
