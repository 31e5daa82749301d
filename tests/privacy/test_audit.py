"""The canary audit of real runs: it stays below the bound, and it can fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flower_vfl import (
    CrossEntropy,
    LabelParty,
    LabelPrivacy,
    Leakage,
    PassiveParty,
    VerticalStrategy,
    in_process,
)
from flower_vfl.parties.imputation.label_imputer import BatchLabels
from flower_vfl.privacy.private_labels import PrivateLabels

ROWS, BOUND = 1500, 0.75


def audited(parties: int = 1) -> dict[str, float]:
    """Return the last figures of the audit of a small run."""
    stream = torch.Generator().manual_seed(5)
    features = [torch.randn(ROWS, 4, generator=stream) for _ in range(parties)]
    labels = (features[0].sum(1) > 0).long()
    privacy = LabelPrivacy(auc=BOUND, loss="plain", key=3, canaries=600)
    top = CrossEntropy(nn.Linear(3 * parties, 1))
    label = LabelParty(labels, top, label_privacy=privacy, trust_server=True)
    passive = [PassiveParty(part, nn.Linear(4, 3)) for part in features]
    strategy = VerticalStrategy(
        batch_size=150, leakage=Leakage(attacks=("norm",)), progress=False
    )
    with in_process([label, *passive]) as grid:
        records = strategy.start(grid, num_rounds=8).records
    return {each.metric: each.value for each in records}


@pytest.mark.parametrize("parties", [1, 3])
def test_labels_that_are_drawn_once_stay_below_the_bound(parties: int) -> None:
    found = audited(parties)
    assert found["canary_auc_low"] < BOUND
    assert found["canary_auc"] > BOUND - 0.05  # all that the bound allows


def test_labels_that_are_drawn_anew_in_every_epoch_exceed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = iter(range(10**9))

    def anew(self: PrivateLabels, labels: BatchLabels, rows: Tensor) -> BatchLabels:
        assert self.mechanism is not None
        true = self._known[rows]
        noisy = self.mechanism.randomise(true, [next(numbers) for _ in rows], 1)
        return BatchLabels(noisy.to(true), noisy.to(true), true=true)

    monkeypatch.setattr(PrivateLabels, "batch", anew)
    assert audited()["canary_auc_low"] > BOUND + 0.05
