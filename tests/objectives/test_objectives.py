"""Losses, predictions, labels and metrics against torch, scikit-learn and scipy."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    log_loss,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)
from torch import Tensor, nn

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    MeanSquaredError,
    Objective,
    PartyError,
)
from flower_vfl.metrics import (
    MAIN_METRIC,
    METRICS,
    Evaluation,
    binary_metrics,
    multiclass_metrics,
    regression_metrics,
)

STREAM = np.random.default_rng(0)


def case(task: str) -> tuple[Objective, Tensor, Tensor]:
    """Return an objective, an embedding and labels."""
    stream = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    embedding = torch.randn(20, 5, generator=stream)
    if task == "binary":
        labels = torch.randint(0, 2, (20,), generator=stream)
        return CrossEntropy(nn.Linear(5, 1)), embedding, labels
    if task == "multiclass":
        labels = torch.randint(0, 4, (20,), generator=stream)
        return CrossEntropy(nn.Linear(5, 4), classes=4), embedding, labels
    objective = MeanSquaredError(nn.Linear(5, 1), center=150.0, scale=70.0)
    return objective, embedding, torch.randn(20, generator=stream) * 70 + 150


def reference_loss(task: str, output: Tensor, labels: Tensor) -> Tensor:
    if task == "binary":
        return F.binary_cross_entropy(torch.sigmoid(output[:, 0]), labels.float())
    if task == "multiclass":
        return F.nll_loss(F.log_softmax(output, dim=1), labels)
    return (((labels - 150) / 70 - output[:, 0]) ** 2).mean()


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_a_step_is_one_of_plain_torch(task: str) -> None:
    objective, embedding, labels = case(task)
    top = copy.deepcopy(objective.top)
    assert isinstance(top, nn.Linear)
    objective.configure(partial(torch.optim.SGD, lr=0.1))
    leaf = embedding.clone().requires_grad_()
    outcome = objective.step(leaf, objective.encode(labels))

    plain = embedding.clone().requires_grad_()
    loss = reference_loss(task, top(plain), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    assert plain.grad is not None and top.weight.grad is not None
    torch.testing.assert_close(outcome.loss, loss.detach())
    torch.testing.assert_close(outcome.gradient, plain.grad)
    expected = top.weight.detach() - 0.1 * top.weight.grad
    torch.testing.assert_close(objective.top.weight.detach(), expected)  # type: ignore[union-attr,operator]
    assert not outcome.loss.requires_grad


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_predictions(task: str) -> None:
    objective, embedding, _ = case(task)
    found = objective.predict(embedding).detach()
    output = objective.top(embedding).detach()  # type: ignore[operator]
    expected = {
        "binary": 1 / (1 + torch.exp(-output[:, 0])),
        "multiclass": torch.exp(output) / torch.exp(output).sum(1, keepdim=True),
        "regression": output[:, 0] * 70 + 150,
    }[task]
    torch.testing.assert_close(found, expected)


def test_a_frozen_top_model_still_gives_a_gradient() -> None:
    objective, embedding, labels = case("binary")
    objective.requires_grad_(False)
    objective.configure(partial(torch.optim.SGD, lr=0.1))
    assert objective.optimizers == []
    before = copy.deepcopy(objective.state_dict())
    outcome = objective.step(embedding.requires_grad_(), objective.encode(labels))
    assert outcome.gradient.abs().sum() > 0
    for name, value in objective.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_top_model_that_ignores_the_embedding_gives_zeros() -> None:
    class Deaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.bias.expand(len(x), 1)

    objective = CrossEntropy(Deaf())
    leaf = torch.randn(4, 3, requires_grad=True)
    outcome = objective.step(leaf, torch.ones(4))
    assert torch.equal(outcome.gradient, torch.zeros(4, 3))


def test_one_column_or_none() -> None:
    for top in (nn.Linear(5, 1), nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))):
        assert CrossEntropy(top).predict(torch.zeros(3, 5)).shape == (3,)
        assert MeanSquaredError(top).predict(torch.zeros(3, 5)).shape == (3,)


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (CrossEntropy(nn.Linear(5, 2)), "binary task must have one output column"),
        (MeanSquaredError(nn.Linear(5, 3)), "regression task must have one output"),
        (CrossEntropy(nn.Linear(5, 3), classes=4), "4 classes must have as many"),
        (CrossEntropy(nn.Linear(5, 1), classes=3), "3 classes must have as many"),
    ],
)
def test_wrong_output_widths(objective: Objective, words: str) -> None:
    embedding = torch.zeros(3, 5, requires_grad=True)
    with pytest.raises(ConfigError, match=words):
        objective.predict(embedding)
    with pytest.raises(ConfigError, match=words):
        objective.step(embedding, torch.zeros(3))


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="at least 2 classes"):
        CrossEntropy(nn.Linear(1, 1), classes=1)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="scale must be positive"):
            MeanSquaredError(nn.Linear(1, 1), scale=scale)


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([0, 1, 1]),
        torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64),
        torch.tensor([False, True, True]),
        torch.tensor([0, 1, 1], dtype=torch.uint8),
    ],
)
def test_labels_of_any_type_are_encoded(given: Tensor) -> None:
    binary = CrossEntropy(nn.Linear(1, 1)).encode(given)
    assert binary.dtype == torch.float32 and binary.tolist() == [0.0, 1.0, 1.0]
    many = CrossEntropy(nn.Linear(1, 3), classes=3).encode(given)
    assert many.dtype == torch.int64 and many.tolist() == [0, 1, 1]
    value = MeanSquaredError(nn.Linear(1, 1)).encode(given)
    assert value.dtype == torch.float32 and value.tolist() == [0.0, 1.0, 1.0]


def calibration_error(scores: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    parts = np.array_split(np.argsort(scores), bins)
    return float(np.mean([abs(scores[p].mean() - labels[p].mean()) for p in parts]))


def test_binary_metrics_are_those_of_scikit_learn() -> None:
    labels = STREAM.integers(0, 2, 200).astype(float)
    scores = np.clip(labels * 0.2 + STREAM.random(200) * 0.8, 0.01, 0.99)
    found = binary_metrics(scores, labels)
    assert found == pytest.approx(
        {
            "accuracy": accuracy_score(labels, scores > 0.5),
            "f1": f1_score(labels, scores > 0.5),
            "loss": log_loss(labels, scores),
            "auc": roc_auc_score(labels, scores),
            "ace": calibration_error(scores, labels),
        }
    )
    assert 0.5 < found["auc"] < 1.0
    scores = scores.round(1)  # has ties
    scores[0] = 1.0 - labels[0]  # has no likelihood
    found = binary_metrics(scores, labels)
    assert found["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert found["loss"] == pytest.approx(log_loss(labels, scores), abs=1e-12)


def test_predictions_that_are_not_finite_are_refused() -> None:
    evaluation = Evaluation([torch.tensor([0.2, float("nan")])])
    with pytest.raises(PartyError, match=r"'label'.*prediction"):
        evaluation.finish(1, torch.tensor([0.0, 1.0]), None, "binary", "label")


def test_the_auc_of_one_class_is_left_out() -> None:
    found = binary_metrics(np.array([0.2, 0.9]), np.array([1.0, 1.0]))
    assert set(found) == {"accuracy", "f1", "loss", "ace"}
    assert found["ace"] == pytest.approx((0.8 + 0.1) / 2)  # each row is a bin
    assert found["accuracy"] == 0.5
    assert found["loss"] == pytest.approx(-(np.log(0.2) + np.log(0.9)) / 2)


def test_multiclass_metrics_are_those_of_scikit_learn() -> None:
    labels = STREAM.integers(0, 4, 100).astype(float)
    scores = STREAM.dirichlet(np.ones(4), 100)
    found = multiclass_metrics(scores, labels)
    assert found["accuracy"] == accuracy_score(labels, scores.argmax(1))
    assert found["loss"] == pytest.approx(log_loss(labels, scores, labels=range(4)))
    assert "top5_accuracy" not in found
    few = multiclass_metrics(scores[:2], np.zeros(2))  # classes may be missing
    assert few["loss"] == pytest.approx(-np.log(scores[:2, 0]).mean())
    scores, labels = STREAM.dirichlet(np.ones(8), 100), STREAM.integers(0, 8, 100)
    found = multiclass_metrics(scores, labels.astype(float))
    best = np.argsort(scores, axis=1)[:, -5:]
    assert found["top5_accuracy"] == np.mean((best == labels[:, None]).any(axis=1))


def test_regression_metrics_are_those_of_scikit_learn_and_scipy() -> None:
    labels = STREAM.normal(150, 70, 100)
    values = labels + STREAM.normal(0, 30, 100)
    found = regression_metrics(values, labels)
    error = mean_squared_error(labels, values)
    assert found == pytest.approx(
        {
            "pearson": pearsonr(values, labels).statistic,
            "rmse": error**0.5,
            "r2": r2_score(labels, values),
            "loss": error,
        }
    )


@pytest.mark.parametrize("constant", ["predictions", "labels", "one row"])
def test_regression_metrics_are_finite_where_nothing_varies(constant: str) -> None:
    values, labels = STREAM.normal(size=5), STREAM.normal(size=5)
    if constant == "predictions":
        values[:] = 1.0
    elif constant == "labels":
        labels[:] = 1.0
    else:
        values, labels = values[:1], labels[:1]
    found = regression_metrics(values, labels)
    assert all(np.isfinite(value) for value in found.values())
    assert found["pearson"] == 0.0


def test_every_task_has_a_main_metric_that_is_measured() -> None:
    labels = np.array([0.0, 1.0, 1.0])
    scores = {
        "binary": np.array([0.2, 0.7, 0.4]),
        "multiclass": np.full((3, 2), 0.5),
        "regression": np.array([0.1, 0.7, 0.4]),
    }
    assert set(METRICS) == set(MAIN_METRIC) == set(scores)
    for task, metric in MAIN_METRIC.items():
        assert metric in METRICS[task](scores[task], labels)
