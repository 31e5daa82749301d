"""Private labels: losses against values worked by hand, and predictions."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from vertical_cases import WIDTH, train

from flower_vfl import (
    CrossEntropy,
    LabelParty,
    LabelPrivacy,
    MeanSquaredError,
    Objective,
    PassiveParty,
)
from flower_vfl.metrics import adaptive_calibration_error
from flower_vfl.objectives import GAFM
from flower_vfl.parties.imputation.label_imputer import BatchLabels
from flower_vfl.privacy.label_privacy import Mechanism
from flower_vfl.privacy.private_labels import PrivateLabels

THREE = math.log(3.0)  # keeps a binary label with probability 3/4
NEAR = {"rtol": 0.0, "atol": 0.04}  # five standard deviations of 4000 rows


class Identity(nn.Module):
    """A top model whose output is the embedding."""

    def forward(self, embedding: Tensor) -> Tensor:
        return embedding


def private(objective: Objective, known: Tensor, text: str) -> PrivateLabels:
    """Return the drawn labels of a party without gaps, with a loss that was chosen."""
    privacy = LabelPrivacy.from_text(text)
    found = PrivateLabels(
        privacy, objective, objective.encode(known), range(len(known))
    )
    found.draw(7, torch.arange(len(known)), torch.arange(len(known)))
    found.choose(privacy.loss, gaps=False)
    return found


def taken(found: PrivateLabels) -> Tensor:
    """Return what the loss gets of all rows."""
    batch = found.batch(
        BatchLabels(found.used, found.used), torch.arange(len(found.true))
    )
    return batch.used


# Losses, against values worked by hand.

LOGITS = [-1.2, 0.4, 0.0, 2.5, -0.3, 0.8, 1.1, -2.0]
BINARY = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])


def hand(loss: str, logit: float, answer: float) -> float:
    """Return the loss of one answer, kept with probability 3/4."""
    p = 1.0 / (1.0 + math.exp(-logit))
    q = 1.0 - p
    if loss == "forward":
        return -math.log(0.75 * p + 0.25 * q if answer else 0.25 * p + 0.75 * q)
    if loss == "plain":
        return -math.log(p if answer else q)
    # The inverse of ((3/4, 1/4), (1/4, 3/4)) is ((3/2, -1/2), (-1/2, 3/2)).
    share = 1.5 if answer else -0.5
    return -(share * math.log(p) + (1.0 - share) * math.log(q))


@pytest.mark.parametrize("loss", ["plain", "unbiased", "forward"])
def test_losses_of_a_binary_answer(loss: str) -> None:
    objective = CrossEntropy(Identity())
    found = private(objective, BINARY, f"epsilon={THREE!r},loss={loss}")
    assert 0 < int((found.used != BINARY).sum()) < 8  # some were changed
    value = objective.loss(torch.tensor(LOGITS), taken(found))
    expected = map(partial(hand, loss), LOGITS, found.used.tolist())
    assert float(value) == pytest.approx(sum(expected) / 8, rel=1e-5)


@pytest.mark.parametrize("loss", ["plain", "unbiased", "forward"])
def test_losses_of_three_classes(loss: str) -> None:
    """ε = ln 2 keeps a class with probability 1/2, and draws each other with 1/4."""
    objective = CrossEntropy(Identity(), 3)
    known = torch.arange(12) % 3
    found = private(objective, known, f"epsilon={math.log(2.0)!r},loss={loss}")
    logits = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    value = objective.loss(logits, taken(found))
    expected = 0.0
    for row, answer in zip(
        logits.softmax(dim=1).tolist(), found.used.tolist(), strict=True
    ):
        if loss == "forward":
            expected -= math.log(0.25 + 0.25 * row[answer])
        elif loss == "plain":
            expected -= math.log(row[answer])
        else:  # 4·(answer) − (1, 1, 1) has the mean of the class
            shares = [3.0 if k == answer else -1.0 for k in range(3)]
            expected -= sum(s * math.log(p) for s, p in zip(shares, row, strict=True))
    assert float(value) == pytest.approx(expected / 12, rel=1e-5)


@pytest.mark.parametrize("label", [0, 1])
def test_a_run_with_canaries_adds_nothing_to_one_without(label: int) -> None:
    """With shared draws, the answers 1 and 0 would be 9 times as likely for a 1."""
    objective, known = CrossEntropy(Identity()), torch.full((8000,), label)
    first = private(objective, known, f"epsilon={THREE!r}")
    audit = private(objective, known, f"epsilon={THREE!r},canaries=4000")
    assert audit.canaries is not None
    pairs = 2 * first.used + audit.used
    counts = pairs[audit.canaries.rows].long().bincount(minlength=4) / 4000
    kept = torch.tensor([0.75, 0.75, 0.25, 0.25]) / 2  # the coin of a canary is fair
    torch.testing.assert_close(counts, kept if label == 0 else kept.flip(0), **NEAR)
    others = torch.ones(8000, dtype=torch.bool)
    others[audit.canaries.rows] = False
    assert torch.equal(first.used[others], audit.used[others])


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_the_unbiased_loss_is_that_of_true_labels_in_the_mean(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean is taken over the mechanism's own probabilities, not over draws."""
    answers = torch.arange(classes)
    monkeypatch.setattr(Mechanism, "randomise", lambda *given: answers)
    objective = CrossEntropy(Identity(), classes)
    found = private(objective, answers, "epsilon=0.7,loss=unbiased")
    channel = found.mechanism.channel  # type: ignore[union-attr]
    width = 1 if classes == 2 else classes
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(1))
    by_answer = [objective.loss(logits, taken(found)[a : a + 1]) for a in answers]
    clean = CrossEntropy(Identity(), classes)
    for label in answers:
        mean = sum(float(channel[label, a] * by_answer[a]) for a in answers)
        truth = clean.loss(logits, clean.encode(label.reshape(1)))
        assert mean == pytest.approx(float(truth), rel=1e-5)


def gradient(objective: CrossEntropy, logits: Tensor, answers: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    objective.loss(leaf, answers).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def test_plain_loss_of_gaussian_noise_is_linear() -> None:
    objective, logits = CrossEntropy(Identity()), torch.tensor(LOGITS)
    found = private(objective, BINARY, "auc=0.8,mechanism=gaussian,loss=plain")
    answers = taken(found)
    assert not set(answers.tolist()) & {0.0, 1.0}
    expected = (torch.sigmoid(logits) - answers) / 8
    torch.testing.assert_close(gradient(objective, logits, answers), expected)


@pytest.mark.parametrize("classes", [2, 4])
def test_forward_loss_of_gaussian_noise_is_its_likelihood(classes: int) -> None:
    objective = CrossEntropy(Identity(), classes)
    known = torch.arange(8) % classes
    found = private(objective, known, "auc=0.8,mechanism=gaussian,loss=forward")
    answers, sigma = taken(found), found.mechanism.sigma  # type: ignore[union-attr]
    logits = torch.randn(8, classes, generator=torch.Generator().manual_seed(1))
    leaf = logits.clone().requires_grad_()
    if classes == 2:
        likelihood = Normal(torch.tensor([0.0, 1.0]), sigma).log_prob(answers[:, None])
    else:
        normal = Normal(torch.eye(classes), sigma)
        likelihood = normal.log_prob(answers[:, None, :]).sum(dim=2)
    (-(leaf.log_softmax(dim=1) + likelihood).logsumexp(dim=1).mean()).backward()
    assert leaf.grad is not None
    given = logits[:, 1] - logits[:, 0] if classes == 2 else logits
    expected = leaf.grad[:, 1] if classes == 2 else leaf.grad
    torch.testing.assert_close(gradient(objective, given, answers), expected)


@pytest.mark.parametrize("loss", ["plain", "forward"])
def test_losses_of_laplace_noise(loss: str) -> None:
    objective = MeanSquaredError(Identity(), center=10.0, scale=5.0)
    found = private(
        objective, torch.tensor([3.0, 12.0, 25.0]), f"auc=0.8,low=0,high=20,loss={loss}"
    )
    noisy, outputs = found.used.tolist(), [0.5, -0.2, 0.1]
    errors = [o - (y - 10.0) / 5.0 for o, y in zip(outputs, noisy, strict=True)]
    power = 1 if loss == "forward" else 2
    expected = sum(abs(e) ** power for e in errors) / 3
    value = objective.loss(torch.tensor(outputs), taken(found))
    assert float(value) == pytest.approx(expected, rel=1e-5)


def test_other_objectives_learn_answers_as_they_are() -> None:
    found = private(GAFM(WIDTH), BINARY, "auc=0.8,mechanism=gaussian")
    assert found.losses == ["plain"] and found.loss == "plain"
    assert set(taken(found).tolist()) == {0.0, 1.0}


# Predictions are probabilities of true labels.

SLOW = partial(torch.optim.Adam, lr=0.005)


def probabilities(text: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictions, the same without conversion, and the true probabilities."""
    rows, stream = 6000, torch.Generator().manual_seed(3)
    x = torch.randn(rows, 4, generator=stream)
    truth = torch.sigmoid(1.2 * x[:, 0] - 0.8 * x[:, 3] - 0.7)
    known = (torch.rand(rows, generator=stream) < truth).long()
    torch.manual_seed(0)
    privacy = LabelPrivacy.from_text(text) if text else None
    bent = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    objective = CrossEntropy(bent)
    label = LabelParty(
        known, objective, optimizer=SLOW, label_privacy=privacy, device="cpu"
    )
    parts = [x[:, :2], x[:, 2:]]
    passive = [
        PassiveParty(p, nn.Linear(2, 1), optimizer=SLOW, device="cpu") for p in parts
    ]
    train([label, *passive], epochs=8, batch_size=256, seed=1)
    with torch.no_grad():
        joined = torch.cat(
            [p.model(part) for p, part in zip(passive, parts, strict=True)], 1
        )  # type: ignore[misc]
        found = objective.predict(joined)
        objective.calibration = None
        return found, objective.predict(joined), truth


@pytest.mark.parametrize(
    ("text", "converted"),
    [
        ("auc=0.8,loss=plain", True),
        ("auc=0.8,loss=unbiased", False),
        ("auc=0.8,loss=forward", False),
        ("auc=0.8,mechanism=gaussian,loss=plain", False),
        ("auc=0.8,mechanism=gaussian,loss=forward", False),
    ],
)
def test_predictions_are_probabilities_of_true_labels(
    text: str, converted: bool
) -> None:
    found, raw, truth = probabilities(f"{text},key=3")
    labels_of_it = (
        torch.rand(6000, generator=torch.Generator().manual_seed(9)) < truth
    ).long()
    error = adaptive_calibration_error(found, labels_of_it)
    assert error < 0.035  # without privacy 0.024
    assert float((found - truth).abs().mean()) < 0.05
    if converted:
        assert adaptive_calibration_error(raw, labels_of_it) > 3.0 * error
    else:
        assert torch.equal(found, raw)
