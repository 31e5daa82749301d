"""Runs on rows of which no party holds all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from imputation_cases import SHARES, UNION, aligned_app, row_index, start, strategy
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from vertical_cases import (
    ROWS,
    StatelessGrid,
    assert_equal,
    features,
    final_states,
    labels,
    losses,
    make_label,
    make_passive,
    scores,
    simple_parties,
)

from flower_vfl import (
    CrossEntropy,
    Imputation,
    InProcessGrid,
    LabelParty,
    MeanSquaredError,
    PartyError,
    in_process,
    vertical_client_app,
)
from flower_vfl.objectives import LADistill, Objective
from flower_vfl.parties.imputation import RowIndex
from flower_vfl.parties.schedule import TEST, TRAIN


def test_a_party_on_all_its_rows_trains_as_before_to_the_last_bit(
    tmp_path: Path,
) -> None:
    everything = RowIndex(torch.arange(ROWS), dict.fromkeys(SHARES, 1.0))

    def placed(make: Any) -> Any:
        def made(context: Context) -> Any:
            party = make(context)
            party.place(everything)
            return party

        return made

    plain = vertical_client_app(make_passive, make_label)
    other = vertical_client_app(placed(make_passive), placed(make_label))
    results = [start(plain, tmp_path / "a"), start(other, tmp_path / "b")]
    states = [final_states(tmp_path / name) for name in "ab"]
    for state in states[1].values():
        del state["union"]
    assert_equal(states[0], states[1])
    assert losses(results[0]) == losses(results[1])
    assert scores(results[0]) == scores(results[1])


@pytest.mark.parametrize(
    ("kind", "labels_kind", "pipeline"),
    [
        ("sampling", "random_pos", 0),
        ("sampling:fixed=false", "majority", 1),
        ("gaussian", "random_pred:samples=2", 0),
        pytest.param("random", "neighbors", 0, marks=pytest.mark.extra),
        ("random", "neighbors", 2),
    ],
)
def test_runs_repeat_where_only_the_node_state_survives(
    kind: str, labels_kind: str, pipeline: int, tmp_path: Path
) -> None:
    app = aligned_app(
        Imputation(labels=labels_kind, secret=7), Imputation(features=kind, secret=7)
    )
    results = [start(app, tmp_path / "a", pipeline=pipeline)]
    grid = StatelessGrid(app, 3, {"state-dir": str(tmp_path / "b")})
    results.append(strategy(pipeline=pipeline).start(grid, num_rounds=2))
    assert_equal(final_states(tmp_path / "a"), final_states(tmp_path / "b"))
    assert losses(results[0]) == losses(results[1])
    assert scores(results[0]) == scores(results[1])


def test_a_secret_of_its_own_survives_in_the_node_state(tmp_path: Path) -> None:
    app = aligned_app(Imputation(labels="random_pos"), Imputation())
    grid = StatelessGrid(app, 3, {"state-dir": str(tmp_path)})
    strategy(every=2).start(grid, num_rounds=1)
    first = final_states(tmp_path, "step-2")
    last = final_states(tmp_path)
    for name in first:
        secret = first[name]["union"]["secret"]
        assert secret == last[name]["union"]["secret"] and len(secret) > 25
    secrets = {state["union"]["secret"] for state in last.values()}
    assert len(secrets) == 3


def test_a_resumed_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    app = aligned_app(
        Imputation(labels="random_pos", secret=7),
        Imputation(features="random", secret=7),
    )
    start(app, tmp_path / "whole", every=3)
    parts = tmp_path / "parts"
    for epochs in (1, 2):
        with InProcessGrid(app, 3, {"state-dir": str(parts)}) as grid:
            made = strategy(every=3)
            made.checkpoints = replace(made.checkpoints, folder=parts)
            made.start(grid, num_rounds=epochs, resume=epochs == 2)
    assert_equal(final_states(tmp_path / "whole"), final_states(tmp_path / "parts"))


def test_rows_that_nobody_holds_are_trained_on(tmp_path: Path) -> None:
    label, passive = simple_parties(1)
    nobody = torch.full((24,), -1)
    # Batches of 4 rows: some have no real row at all.
    local = torch.cat([torch.arange(6), nobody])
    for party in (label, *passive):
        party.place(RowIndex(local, {"label": 0.2, "passive-1": 0.2}))
    with in_process([label, *passive]) as grid:
        result = strategy(batch_size=4, test_fraction=0.0).start(grid, num_rounds=3)
    schedule = label.configured()
    real = [bool((rows < 6).any()) for rows in schedule.training_batches(3)]
    assert not all(real)
    assert all(np.isfinite(loss) for loss in losses(result).values())


def test_evaluation_counts_rows_with_a_label_only() -> None:
    label, passive = simple_parties(1)
    label.place(row_index(0, 40))
    passive[0].place(row_index(1))
    with in_process([label, *passive]) as grid:
        driver = strategy(test_fraction=0.5)
        result = driver.start(grid, num_rounds=1)
        predicted = driver.predict("test")
    rows = label.configured().rows("test")
    local = row_index(0, 40).local[rows]
    assert 0 < int((local >= 0).sum()) < len(rows)
    truth = labels()[local[local >= 0]]
    expected = roc_auc_score(truth, predicted[(local >= 0).numpy()])
    assert scores(result)[1]["test_auc"] == pytest.approx(expected)


def test_a_given_split_is_mapped_and_compared() -> None:
    label, passive = simple_parties(1)
    codes = np.full(ROWS, TRAIN, dtype=np.int8)
    codes[:10] = TEST
    local = torch.arange(ROWS).flip(0)
    lacking = local.clone()
    lacking[:20] = -1  # training rows
    for party, numbers in ((label, local), (passive[0], lacking)):
        party.split = codes
        party.place(RowIndex(numbers))
    key = b"k" * 32
    described = label.describe(key), passive[0].describe(key)
    assert described[0].split_digest == described[1].split_digest != ""
    assert described[0].rows == described[1].rows == ROWS
    with in_process([label, *passive]) as grid:
        strategy().start(grid, num_rounds=1)
    assert label.configured().rows("test").tolist() == list(range(50, 60))
    passive[0].place(RowIndex(torch.where(local < 5, -1, local)))  # lacks test rows
    with (
        in_process([label, *passive]) as grid,
        pytest.raises(PartyError, match="split differ"),
    ):
        strategy().start(grid, num_rounds=1)


def test_ids_are_not_compared_after_an_alignment() -> None:
    label, _ = simple_parties(1, ids=[f"id-{i}" for i in range(ROWS)])
    assert label.describe(b"k" * 32).ids_digest
    label.place(row_index(0))
    assert not label.describe(b"k" * 32).ids_digest


def test_synthetic_rows_of_several_classes_and_values() -> None:
    values = features(0)[:, 0]
    cases: list[tuple[Objective, Tensor, str]] = [
        (
            CrossEntropy(nn.Linear(3, 3), 3),
            torch.bucketize(values, values.quantile(torch.tensor([0.3, 0.7]))),
            "random_pred:samples=3",
        ),
        (CrossEntropy(nn.Linear(3, 3), 3), torch.arange(ROWS) % 3, "minority"),
        (MeanSquaredError(nn.Linear(3, 1)), values, "neighbors"),
    ]
    for objective, truth, kind in cases:
        label = LabelParty(
            truth, objective, device="cpu", imputation=Imputation(labels=kind)
        )
        _, passive = simple_parties(1)
        label.place(row_index(0))
        passive[0].place(row_index(1))
        with in_process([label, *passive]) as grid:
            result = strategy().start(grid, num_rounds=1)
        assert np.isfinite(losses(result)[1])


@pytest.mark.parametrize(
    ("objective", "imputation", "message"),
    [
        (MeanSquaredError(nn.Linear(3, 1)), Imputation(), "use random_pos"),
        (
            MeanSquaredError(nn.Linear(3, 1)),
            Imputation(labels="random_pos", calibration="te"),
            "only cross-entropy",
        ),
        (
            LADistill(nn.Linear(3, 1), nn.Linear(3, 2)),
            Imputation(),
            "label of every row",
        ),
        (
            CrossEntropy(nn.Linear(3, 1)),
            Imputation(labels="neighbors", calibration="tr"),
            "random_pred",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_the_hello(
    objective: Objective, imputation: Imputation, message: str
) -> None:
    label = LabelParty(labels(), objective, device="cpu", imputation=imputation)
    _, passive = simple_parties(1)
    label.place(row_index(0))
    passive[0].place(row_index(1))
    with (
        in_process([label, *passive]) as grid,
        pytest.raises(PartyError, match=message),
    ):
        strategy().start(grid, num_rounds=1)


def test_a_row_index_of_other_rows_is_refused() -> None:
    label, _ = simple_parties(1)
    with pytest.raises(
        PartyError, match="its alignment has row 60, but it has only 60 rows"
    ):
        label.place(RowIndex(torch.tensor([60])))


def test_the_label_party_holds_no_training_row() -> None:
    label, passive = simple_parties(1)
    label.place(RowIndex(torch.full((UNION,), -1)))
    passive[0].place(row_index(1))
    with (
        in_process([label, *passive]) as grid,
        pytest.raises(PartyError, match="none of"),
    ):
        strategy().start(grid, num_rounds=1)


def test_a_run_that_continues_keeps_its_synthetic_rows() -> None:
    label, passive = simple_parties(1)
    label.place(row_index(0))
    passive[0].place(row_index(1))
    with in_process([label, *passive]) as grid:
        secrets = []
        for _ in range(2):
            strategy().start(grid, num_rounds=1)
            secrets.append((label.imputer.secret, passive[0].imputer.secret))
    assert secrets[0] == secrets[1] and 0 not in secrets[0]
    passive[0].place(row_index(1))
    assert passive[0].imputer.secret == 0  # a new alignment has a new one
