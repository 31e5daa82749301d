"""Calibration, against data whose truth is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import Linear
from torch.nn.functional import nll_loss, softmax

from flower_vfl import CrossEntropy
from flower_vfl.errors import ConfigError
from flower_vfl.parties.imputation import RowIndex
from flower_vfl.parties.imputation.label_imputer import Calibration, complete_share
from flower_vfl.parties.imputation.labels import LABEL_SYNTHESIZERS
from flower_vfl.randomness import Noise
from flower_vfl.specs import build_from_spec

TRUTH = np.array([[0.9, 0.08, 0.02], [0.4, 0.5, 0.1], [0.1, 0.2, 0.7], [0.8, 0.1, 0.1]])


def observed(
    classes: int,
    kind: str,
    alpha: float,
    beta: float,
    rows: int = 400_000,
    union: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return truth, frequencies of classes, and what a model would see at each x."""
    stream = np.random.default_rng(1)
    truth = TRUTH[:, :classes] / TRUTH[:, :classes].sum(axis=1, keepdims=True)
    x = stream.integers(0, 4, rows)
    chances = truth[x].cumsum(axis=1)
    y = (stream.random((rows, 1)) > chances).sum(axis=1)
    frequencies = np.bincount(y, minlength=classes) / rows
    lacks_features, lacks_label = (stream.random(rows) < r for r in (alpha, beta))
    if union:  # somebody holds every row
        where = stream.random(rows)
        lacks_features, lacks_label = where < alpha, where > 1.0 - beta
    seen = np.where(lacks_features, stream.permutation(x), x)
    if kind == "majority":
        drawn = np.full(rows, frequencies.argmax())
    elif kind == "minority":
        drawn = np.full(rows, frequencies.argmin())
    else:
        drawn = stream.choice(classes, rows, p=frequencies)
    labels = np.where(lacks_label, drawn, y)
    found = np.array(
        [np.bincount(labels[seen == i], minlength=classes) for i in range(4)]
    )
    return truth, frequencies, found / found.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("kind", ["majority", "minority", "random_pos"])
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.5), (0.6, 0.0), (0.3, 0.4)])
def test_the_formula_is_what_synthetic_data_does(
    classes: int, kind: str, alpha: float, beta: float
) -> None:
    truth, frequencies, found = observed(classes, kind, alpha, beta)
    pi = torch.from_numpy(frequencies)
    synthesizer = build_from_spec("kind of synthetic labels", kind, LABEL_SYNTHESIZERS)
    own = torch.from_numpy(
        np.repeat(np.arange(classes), (1000 * frequencies).astype(int))
    )
    synthesizer.fit(own, classes, 1, Noise(1))
    labelled = 1.0 - beta
    complete = labelled * (1.0 - alpha)
    calibration = Calibration.of(
        "te", labelled, complete, pi, synthesizer.class_shares(pi)
    )
    mixture = replace(calibration, when="tr").to_mixture(torch.from_numpy(truth))
    assert mixture.numpy() == pytest.approx(found, abs=0.006)
    undone = calibration.to_real(torch.from_numpy(found))
    assert undone.numpy() == pytest.approx(truth, abs=0.02)


def test_a_union_of_two_has_no_row_that_nobody_holds() -> None:
    truth, frequencies, found = observed(2, "majority", 0.3, 0.4, union=True)
    row_index = RowIndex(
        torch.tensor([0]), {"label": 0.6, "passive-1": 0.7}, common=0.3
    )
    complete = complete_share(row_index, ["passive-1"], 0.6)
    pi, rare = torch.from_numpy(frequencies), torch.tensor([1.0, 0.0])
    right = Calibration.of("te", 0.6, complete, pi, rare)
    undone = right.to_real(torch.from_numpy(found)).numpy()
    assert undone == pytest.approx(truth, abs=0.02)
    independent = complete_share(
        RowIndex(torch.tensor([0]), row_index.shares), ["passive-1"], 0.6
    )
    assert independent == pytest.approx(0.6 * 0.7)
    wrong = Calibration.of("te", 0.6, independent, pi, rare)
    assert abs(wrong.to_real(torch.from_numpy(found)).numpy() - truth).max() > 0.05


def test_labels_drawn_by_the_model_settle_where_the_formula_says() -> None:
    alpha, beta, steps = 0.3, 0.5, 60
    truth, frequencies, _ = observed(2, "random_pos", 0.0, 0.0, rows=200_000)
    pi = torch.from_numpy(frequencies)
    believed = np.full(4, 0.5)
    for _ in range(steps):  # fits the mean of real and drawn labels again and again
        real = (1 - alpha) * truth[:, 1] + alpha * frequencies[1]
        believed = (1 - beta) * real + beta * believed
    calibration = Calibration.of("te", 0.5, 0.35, pi, None)
    undone = calibration.to_real(torch.from_numpy(believed))
    assert undone.numpy() == pytest.approx(truth[:, 1], abs=1e-9)


def test_equations_of_the_paper() -> None:
    pi, rare = torch.tensor([0.8, 0.2]), torch.tensor([1.0, 0.0])
    both = Calibration.of("te", 0.5, 0.5 * 0.4, pi, rare)  # equation 3
    d = torch.tensor([0.3])
    mixture = 0.5 * 0.4 * d + 0.5 * 0.6 * 0.2
    assert both.to_real(mixture).item() == pytest.approx(0.3)
    labels = Calibration.of("te", 0.5, 0.5, pi, rare)  # equation 1
    assert labels.to_real(torch.tensor([0.2])).item() == pytest.approx(0.4)
    features = Calibration.of("te", 1.0, 0.4, pi, rare)  # equation 2
    assert features.to_real(0.4 * d + 0.6 * 0.2).item() == pytest.approx(0.3)


def test_predictions_outside_of_the_mixture_stay_in_order() -> None:
    offset = torch.tensor([0.5, 0.1])
    values = torch.linspace(0.0, 1.0, 501, dtype=torch.float64)
    both = torch.stack([1.0 - values, values], dim=1)
    found = Calibration("te", 0.4, offset).to_real(both)[:, 1]
    assert (found.diff() > 0).all() and found[0] > 0.0 and found[-1] < 1.0
    inside = (values > 0.11) & (values < 0.49)
    expected = (values[inside] - 0.1) / 0.4
    assert torch.allclose(found[inside], expected)


@pytest.mark.parametrize("classes", [2, 4])
def test_the_loss_in_training_is_that_of_the_mixture(classes: int) -> None:
    torch.manual_seed(0)
    objective = CrossEntropy(Linear(3, 1 if classes == 2 else classes), classes)
    embedding = torch.randn(8, 3)
    labels = objective.encode(torch.arange(8) % classes)
    pi = softmax(torch.randn(classes), dim=0)
    rare = torch.eye(classes)[0]
    objective.calibration = Calibration.of("tr", 0.6, 0.3, pi, rare)
    output = objective.top(embedding)
    plain = torch.cat([torch.zeros_like(output), output], 1) if classes == 2 else output
    d = softmax(plain, dim=1)
    mixture = 0.3 * d + 0.3 * pi + 0.4 * rare
    expected = nll_loss(mixture.log(), labels.long())
    assert objective.loss(output, labels).item() == pytest.approx(expected.item())
    shown, believed = objective.predict(embedding), objective.expect(embedding)
    one = d[:, 1] if classes == 2 else d
    assert torch.allclose(shown, one)
    assert torch.allclose(believed, mixture[:, 1] if classes == 2 else mixture)


def test_the_loss_in_training_is_finite_where_a_class_cannot_be_synthetic() -> None:
    calibration = Calibration.of(
        "tr", 0.5, 0.5, torch.tensor([0.9, 0.1]), torch.tensor([1.0, 0.0])
    )
    logits = torch.tensor([-200.0, 200.0], requires_grad=True)
    logs = torch.nn.functional.logsigmoid(torch.stack([-logits, logits], dim=1))
    loss = calibration.loss(logs, torch.tensor([1.0, 0.0]))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


def test_what_cannot_be_undone_is_refused() -> None:
    pi = torch.tensor([0.5, 0.5])
    with pytest.raises(ConfigError, match="no row is held by all"):
        Calibration.of("te", 0.5, 0.0, pi, pi)
    with pytest.raises(ConfigError, match="te, tr"):
        Calibration("et", 0.5, pi)  # type: ignore[arg-type]
