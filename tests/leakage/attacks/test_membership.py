"""The spectral attack as a meter of membership."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from flower_vfl.leakage.attacks.spectral import membership_aucs, with_labels


def test_aucs_are_those_of_scikit_learn() -> None:
    stream = np.random.default_rng(0)
    rows = stream.normal(size=(200, 6)) * np.array([4.0, 1, 1, 1, 1, 1])
    real = stream.random(200) < 0.7
    rows[~real, 0] += 3.0
    centered = rows - rows.mean(axis=0)
    direction = np.linalg.svd(centered)[2][0]
    score = centered @ direction
    found = membership_aucs(torch.from_numpy(rows), torch.from_numpy(real))
    side = roc_auc_score(~real, score)
    assert found[""] == pytest.approx(roc_auc_score(~real, np.abs(score)))
    assert found["_sides"] == pytest.approx(max(side, 1.0 - side))


def test_only_the_side_finds_two_groups_of_one_size() -> None:
    rows = torch.randn(400, 3, generator=torch.Generator().manual_seed(1))
    real = torch.arange(400) < 200
    rows[real] += 8.0
    found = membership_aucs(rows, real)
    assert found["_sides"] > 0.99 and 0.4 < found[""] < 0.6


@pytest.mark.parametrize("real", [torch.ones(4).bool(), torch.zeros(4).bool()])
def test_a_batch_of_one_kind_says_nothing(real: torch.Tensor) -> None:
    assert membership_aucs(torch.randn(4, 2), real) == {}


def test_labels_stand_beside_embeddings() -> None:
    embedding = torch.arange(6.0).reshape(2, 3, 1)
    binary = with_labels(embedding, torch.tensor([0.0, 1.0]), "binary")
    assert binary.tolist() == [[0, 1, 2, 0], [3, 4, 5, 1]]
    classes = with_labels(embedding, torch.tensor([2, 0]), "multiclass")
    assert classes.tolist() == [[0, 1, 2, 0, 0, 1], [3, 4, 5, 1, 0, 0]]
    assert with_labels(embedding, None, "binary").tolist() == [[0, 1, 2], [3, 4, 5]]
