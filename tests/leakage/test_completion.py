"""Model completion: what it may know, what it must leave alone, what it achieves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score, top_k_accuracy_score
from torch import Tensor, nn

from flower_vfl.errors import ConfigError
from flower_vfl.leakage import mixmatch
from flower_vfl.leakage.completion import CompletionResult, ModelCompletion
from flower_vfl.leakage.mixmatch import (
    CompletedModel,
    auxiliary_rows,
    completion_scores,
    reinitialise,
)

ROWS, COLUMNS = 600, 60
QUICK = ModelCompletion(labels=8, steps=150, batch_size=16, lr=0.01)


def four_scores(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return features and four classes: the largest of four sums of few columns.

    Most columns say nothing, so a few labels do not tell which ones do.
    """
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, generator=stream)
    return x, x[:, :8].view(ROWS, 4, 2).sum(dim=2).argmax(dim=1)


def small_network(columns: int = COLUMNS, width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(columns, 32), nn.ReLU(), nn.Linear(32, width))


def fitted(bottom: nn.Module, inputs: tuple[Tensor, ...], labels: Tensor) -> nn.Module:
    """Train as the label party would: all labels, a head of its own."""
    classes = int(labels.max()) + 1
    with torch.no_grad():
        width = bottom(*inputs).flatten(1).shape[1]
    head = nn.Linear(width, classes)
    both = [*bottom.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(both, lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        logits = head(torch.relu(bottom(*inputs)).flatten(1))
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    return bottom


@pytest.fixture(scope="module")
def victim() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = four_scores()
    return fitted(small_network(), (x[:400],), y[:400]), x, y


def attack(
    settings: ModelCompletion, victim: tuple[nn.Module, Tensor, Tensor]
) -> CompletionResult:
    bottom, x, y = victim
    return settings.run(bottom, x[:400], y[:400], 4, x[400:], y[400:])


def test_the_trained_bottom_model_gives_labels_away(
    victim: tuple[nn.Module, Tensor, Tensor],
) -> None:
    settings = replace(QUICK, labels=16)
    results = [attack(replace(settings, seed=seed), victim) for seed in range(2)]
    assert results[0].metric == "accuracy"
    found = np.mean([[r.train_success, r.test_success] for r in results], axis=0)
    alone = np.mean(
        [[r.baseline_train_success, r.baseline_test_success] for r in results], axis=0
    )
    assert (found > alone + 0.2).all()
    assert results[0].train_success == results[0].train["accuracy"]
    assert len({result.rows for result in results}) == 2


def test_an_untrained_bottom_model_gives_nothing_away() -> None:
    torch.manual_seed(1)
    x, y = four_scores()
    result = QUICK.run(small_network(), x, y, 4)
    assert result.train_success < 0.45  # chance is 0.25
    assert result.test_success is None and result.baseline_test_success is None


def test_runs_repeat_and_leave_everything_else_alone(
    victim: tuple[nn.Module, Tensor, Tensor],
) -> None:
    bottom = victim[0]
    weights, random = copy.deepcopy(bottom.state_dict()), torch.get_rng_state()
    bottom.train()
    settings = replace(QUICK, steps=20)
    assert attack(settings, victim) == attack(settings, victim)
    assert attack(settings, victim) != attack(replace(settings, seed=1), victim)
    for name, value in bottom.state_dict().items():
        assert torch.equal(value, weights[name])
    assert bottom.training and all(p.requires_grad for p in bottom.parameters())
    assert all(p.grad is None or p.grad.isfinite().all() for p in bottom.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_only_auxiliary_labels_are_learned_from(
    victim: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    bottom, x, four = victim
    y = four // 2
    known = auxiliary_rows(y, 2, 8, 0)
    monkeypatch.setattr(mixmatch, "auxiliary_rows", lambda *_: known)
    turned = 1 - y
    turned[known] = y[known]
    settings = replace(QUICK, steps=20, metric="accuracy")
    truth, lie = (settings.run(bottom, x, labels, 2) for labels in (y, turned))
    assert truth.train_success == pytest.approx(1 - lie.train_success)
    assert truth.baseline_train_success == pytest.approx(1 - lie.baseline_train_success)


def test_auxiliary_rows_are_balanced_and_drawn_by_the_seed() -> None:
    labels = torch.tensor([0] * 50 + [1] * 5 + [2] * 20)
    rows = auxiliary_rows(labels, 3, 11, seed=0)
    assert labels[rows].bincount().tolist() == [4, 4, 3]
    assert torch.equal(rows, auxiliary_rows(labels, 3, 11, seed=0))
    assert not torch.equal(rows, auxiliary_rows(labels, 3, 11, seed=1))
    with pytest.raises(ConfigError, match="class 1 are needed, but only 5"):
        auxiliary_rows(labels, 3, 18, seed=0)
    with pytest.raises(ConfigError, match="too few"):
        auxiliary_rows(labels, 3, 2, seed=0)


def test_scores_equal_scikit_learn() -> None:
    stream = np.random.default_rng(0)
    two = stream.dirichlet([1, 1], size=200)
    truth = stream.integers(0, 2, size=200)
    scores = completion_scores(torch.from_numpy(two), torch.from_numpy(truth))
    assert scores["f1"] == pytest.approx(f1_score(truth, two[:, 1] > 0.5))
    assert scores["auc"] == pytest.approx(roc_auc_score(truth, two[:, 1]))
    assert scores["accuracy"] == pytest.approx(np.mean((two[:, 1] > 0.5) == truth))
    many = stream.dirichlet([1] * 9, size=200)
    truth = np.arange(200) % 9
    scores = completion_scores(torch.from_numpy(many), torch.from_numpy(truth))
    assert scores["top5"] == pytest.approx(top_k_accuracy_score(truth, many, k=5))
    one = completion_scores(torch.tensor([[0.4, 0.6]]), torch.tensor([1]))
    assert one == {"accuracy": 1.0, "f1": 1.0}


class Codes(nn.Module):
    """A table with numeric and categorical columns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.dense = small_network(3 + 4)

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        columns = torch.cat([numbers, self.table(codes[:, 0])], dim=1)
        cut: Tensor = self.dense(columns)
        return cut


class Picture(nn.Module):
    """Takes pixels and returns a cut layer of two dimensions per row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        )

    def forward(self, image: Tensor) -> Tensor:
        assert image.dtype == torch.uint8
        cut: Tensor = self.layers(image.float() / 255).mean(dim=3)
        return cut


def table_case() -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    codes = torch.randint(0, 6, (300, 1))
    return Codes(), (torch.randn(300, 3), codes), codes[:, 0] % 2


def image_case() -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    labels = torch.arange(300) % 3
    images = torch.randint(0, 60, (300, 1, 6, 4), dtype=torch.uint8)
    images[torch.arange(300), :, 2 * labels] += 190  # which row is bright
    return Picture(), (images,), labels


def words_case() -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    words = (torch.rand(300, 40) < 0.2).float()
    return small_network(40), (words,), (words[:, :20].sum(1) > 3.5).long()


@pytest.mark.parametrize(
    ("make", "freeze", "mixed"),
    [
        (table_case, 0, 1),
        (words_case, 1, 1),
        (image_case, 1, 0),
        pytest.param(image_case, 1, 1, marks=pytest.mark.extra),
    ],
)
def test_kinds_of_inputs(
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...], Tensor]],
    freeze: int,
    mixed: int,
) -> None:
    torch.manual_seed(0)
    bottom, inputs, labels = make()
    classes = int(labels.max()) + 1
    fitted(bottom, inputs, labels)
    settings = replace(QUICK, labels=12, lambda_u=5.0, freeze_bottom=bool(freeze))
    settings = replace(settings, mix_inputs=bool(mixed), shift=0)
    result = settings.run(bottom, inputs, labels, classes)
    assert result.metric == ("f1" if classes == 2 else "accuracy")
    assert result.train["accuracy"] > 0.7


def test_metric_of_the_papers_table() -> None:
    assert QUICK._metric(2) == "f1"
    assert QUICK._metric(10) == "accuracy"
    assert QUICK._metric(100) == "top5"
    assert replace(QUICK, metric="auc")._metric(2) == "auc"
    with pytest.raises(ConfigError, match="metric for 4 classes 'auc'; known: acc"):
        replace(QUICK, metric="auc")._metric(4)


def test_a_frozen_bottom_model_does_not_change() -> None:
    bottom = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model = CompletedModel(bottom, 4, 2, hidden=(5,), freeze_bottom=True).train()
    assert model.head.training and not bottom.training
    assert [p for p in bottom.parameters() if p.requires_grad] == []
    kinds = [type(layer).__name__ for layer in model.head]
    assert kinds == ["BatchNorm1d", "ReLU", "Linear"] * 2
    assert model(torch.randn(6, 3)).shape == (6, 2)


def test_reinitialise() -> None:
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for value in trained.state_dict().values():
            value.fill_(7)
    fresh = reinitialise(trained).state_dict()
    assert float(fresh["0.weight"].abs().max()) < 1.0
    assert fresh["1.running_mean"].tolist() == [0.0] * 3
    assert float(trained[0].weight.detach().min()) == 7.0


class Bare(nn.Module):
    """Weights that no layer knows how to draw anew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COLUMNS, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_model_that_cannot_be_reinitialised_needs_a_fresh_one() -> None:
    x, y = four_scores()
    settings = replace(QUICK, steps=3)
    with pytest.raises(ConfigError, match=r"no reset_parameters.*fresh="):
        settings.run(Bare(), x, y, 4)
    assert settings.run(Bare(), x, y, 4, fresh=Bare).baseline_train_success > 0


def test_an_augmentation_of_ones_own_is_used() -> None:
    x, y = four_scores()
    sizes = []

    def augment(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sizes.append(len(batch[0]))
        return batch

    settings = replace(QUICK, steps=2, augmentations=3)
    settings.run(small_network(), x, y, 4, augment=augment)
    # the baseline, then labelled and three views in each step of the attack
    assert sizes == [8, 8] + [8, 16, 16, 16] * 2


def test_settings_and_data_that_cannot_work() -> None:
    x, y = four_scores()
    for wrong in ({"steps": 0}, {"ema": 1.0}, {"lr": 0.0}, {"alpha": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            replace(QUICK, **wrong)
    with pytest.raises(ConfigError, match="5 labels for 600 rows"):
        QUICK.run(small_network(), x, y[:5], 4)
    with pytest.raises(ConfigError, match="from 0 to 2"):
        QUICK.run(small_network(), x, y, 3)
    with pytest.raises(ConfigError, match="nothing to infer"):
        few = torch.arange(8) % 4
        QUICK.run(small_network(), x[:8], few, 4)
