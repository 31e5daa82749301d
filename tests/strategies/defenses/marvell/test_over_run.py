"""Marvell's bound for a whole run: an attacker with every gradient of a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from marvell_cases import batch_of
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flower_vfl import Batch, ConfigError, PartyError
from flower_vfl.privacy.accountant import composed_auc
from flower_vfl.strategies import Compose, Iso, Marvell, PerParty, Scheduled
from flower_vfl.strategies.defenses.registry import build_defense, defense_spec

SPEC = "marvell:auc=0.65,over=run,epochs=5"
D = 4


def epoch_of(labels: Tensor, stream: torch.Generator) -> Tensor:
    """Return normal gradients: the positive rows lie elsewhere and are wider."""
    wide = 1.0 + 0.4 * labels[:, None]
    rows = torch.randn(len(labels), D, generator=stream) * wide
    return rows + labels[:, None] * torch.tensor([2.0, 1.0, 0.0, 0.0])


def train(transform: Marvell, epochs: int) -> tuple[list[Tensor], Tensor, list[float]]:
    """Return the gradients that leave, epoch by epoch, and the divergences."""
    stream = torch.Generator().manual_seed(3)
    labels = (torch.arange(20_000) % 4 == 0).long()
    sent, spent = [], []
    for epoch in range(1, epochs + 1):
        batch = Batch("passive-1", epoch, 7, labels, epoch)
        changed = transform(epoch_of(labels, stream), batch)
        assert changed is not None
        sent.append(changed)
        spent.append(batch.metrics["sum_kl"])
    return sent, labels, spent


def likelihoods(sent: list[Tensor], labels: Tensor) -> np.ndarray:
    """Return the best score: the sum of the log-likelihood ratios of all epochs.

    Normal distributions with the covariance of each class are what was drawn from.
    """
    total = np.zeros(len(labels))
    for rows in sent:
        model = QuadraticDiscriminantAnalysis().fit(rows.numpy(), labels.numpy())
        total += model.decision_function(rows.numpy())
    return total


@pytest.mark.parametrize("auc", [0.65, 0.8])
def test_the_best_attacker_over_all_epochs_stays_below(auc: float) -> None:
    sent, labels, spent = train(Marvell(auc=auc, over="run", epochs=10), 10)
    found = roc_auc_score(labels, likelihoods(sent, labels))
    assert 0.5 + (auc - 0.5) / 3 < found < auc
    stale = torch.stack(sent).mean(dim=0)  # the mean over the epochs of each row
    direction = stale[labels == 1].mean(dim=0) - stale[labels == 0].mean(dim=0)
    assert 0.5 < roc_auc_score(labels, stale @ direction) < auc
    assert composed_auc(spent) == pytest.approx(auc, rel=1e-6)


def test_the_bound_of_a_step_is_none_for_the_epochs() -> None:
    sent, labels, spent = train(Marvell(auc=0.65), 10)
    assert roc_auc_score(labels, likelihoods(sent, labels)) > 0.65
    assert max(map(composed_auc, ([each] for each in spent))) <= 0.65 + 1e-9


def test_several_classes_share_the_bound() -> None:
    labels = torch.arange(3000) % 3
    stream = torch.Generator().manual_seed(1)
    rows = torch.randn(3000, D, generator=stream) + labels[:, None]
    batch = Batch("passive-1", 1, 7, labels, 1)
    Marvell(auc=0.7, over="run", epochs=4)(rows, batch)
    spent = [batch.metrics["sum_kl"]] * 4
    assert composed_auc(spent) == pytest.approx(0.7, rel=1e-6)


def test_after_its_epochs_it_refuses() -> None:
    transform = build_defense(SPEC)
    labels = torch.arange(40) % 2
    rows = epoch_of(labels, torch.Generator().manual_seed(0))
    assert transform(rows, Batch("bank", 50, 7, labels, epoch=5)) is not None
    with pytest.raises(PartyError, match=r"'bank', step 51: .*for 5 epochs") as caught:
        transform(rows, Batch("bank", 51, 7, labels, epoch=6))
    assert "epochs=" in caught.value.remedy


def test_a_batch_of_one_class_is_refused() -> None:
    labels = torch.ones(8).long()
    rows = torch.randn(8, D, generator=torch.Generator().manual_seed(0))
    with pytest.raises(PartyError, match="larger batches"):
        build_defense(SPEC)(rows, batch_of(labels))
    assert Marvell(auc=0.65)(rows, batch_of(labels)) is not None


@pytest.mark.parametrize(
    "spec",
    [
        "marvell:over=run,epochs=5",
        "marvell:auc=0.65,over=run",
        "marvell:auc=0.65,epochs=5",
        "marvell:auc=0.65,over=run,epochs=-1",
        "marvell:auc=0.65,over=epoch,epochs=5",
    ],
)
def test_what_does_not_fit_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError):
        build_defense(spec)
    with pytest.raises(ConfigError, match="span"):
        Marvell(auc=0.65, over="epoch")  # type: ignore[arg-type]


def test_its_settings_are_part_of_its_text() -> None:
    assert defense_spec(build_defense(SPEC)) == SPEC
    assert build_defense(SPEC).requires_labels


def test_a_raised_defense_spends_less() -> None:
    transform = Marvell(auc=0.65, over="run", epochs=5)
    transform.strengthen(2.0)
    _, _, spent = train(transform, 5)
    assert composed_auc(spent) < 0.6


def test_what_combinations_promise() -> None:
    run = build_defense(SPEC)
    weak = Marvell(auc=0.9, over="run", epochs=5)
    assert Marvell(auc=0.65).run_auc is None
    assert run.run_auc == 0.65
    assert Compose([run, Iso()]).run_auc == 0.65
    assert Compose([weak, run]).run_auc == 0.65
    assert Compose([run, Marvell()]).run_auc is None  # it uses labels again
    assert Compose([Iso()]).run_auc is None
    assert PerParty({"a": run}, default=weak).run_auc == 0.9
    assert PerParty({"a": run}).run_auc is None
    assert Scheduled({1: run}).run_auc is None
