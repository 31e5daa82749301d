"""LADistill and KDk: soft labels, the loss, and what the teacher is trained on."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flower_vfl import ConfigError
from flower_vfl.objectives import KDk, LADistill, train_teacher
from flower_vfl.objectives.ladistill import (
    anonymous_labels,
    top_classes,
    true_and_top_classes,
)

SGD = partial(torch.optim.SGD, lr=0.1)
ROWS, WIDTH = 40, 5


def data(classes: int) -> tuple[Tensor, Tensor]:
    """Embeddings (or features) that a linear teacher can tell apart."""
    stream = torch.Generator().manual_seed(1)
    labels = torch.arange(ROWS) % classes
    means = torch.eye(classes, WIDTH)[labels] * 6
    return means + torch.randn(ROWS, WIDTH, generator=stream), labels


def made(kind: type[LADistill], classes: int, **options: object) -> LADistill:
    torch.manual_seed(0)
    top = nn.Linear(WIDTH, 1 if classes == 2 else classes)
    return kind(top, nn.Linear(WIDTH, classes), classes, **options)  # type: ignore[arg-type]


def test_a_soft_label_by_hand() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.0, -1.0], [5.0, 4.0, 1.0, 2.0]])
    ranked = top_classes(logits, 3)
    assert ranked.tolist() == [[1, 2, 0], [0, 1, 3]]
    soft = anonymous_labels(ranked, 4, 0.3)
    expected = [[0.15, 0.7, 0.15, 0.0], [0.7, 0.15, 0.0, 0.15]]
    torch.testing.assert_close(soft, torch.tensor(expected))


def test_a_soft_label_with_the_true_class_outside_the_top_k() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.0, -1.0], [0.1, 3.0, 2.0, -1.0]])
    ranked = true_and_top_classes(logits, torch.tensor([3, 1]), 2)
    assert ranked.tolist() == [[3, 1], [1, 2]]
    soft = anonymous_labels(ranked, 4, 0.4)
    expected = [[0.0, 0.4, 0.0, 0.6], [0.0, 0.6, 0.4, 0.0]]
    torch.testing.assert_close(soft, torch.tensor(expected))


@settings(max_examples=60, deadline=None)
@given(
    classes=st.integers(2, 8),
    share=st.floats(0.0, 1.0),
    eps=st.floats(0.0, 0.99),
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
)
def test_rows_of_soft_labels_sum_to_one(
    classes: int, share: float, eps: float, seed: int, ties: bool
) -> None:
    k = 2 + round(share * (classes - 2))
    stream = torch.Generator().manual_seed(seed)
    logits = torch.randn(20, classes, generator=stream) * 10
    logits = logits.sign() if ties else logits
    labels = torch.randint(0, classes, (20,), generator=stream)
    for ranked in (
        top_classes(logits, k),
        true_and_top_classes(logits, labels, k),
    ):
        assert all(len(set(row)) == k for row in ranked.tolist())
        soft = anonymous_labels(ranked, classes, eps)
        torch.testing.assert_close(soft.sum(dim=1), torch.ones(20))
        assert ((soft > 0).sum(dim=1) <= k).all()
        torch.testing.assert_close(
            soft.gather(1, ranked[:, :1])[:, 0], torch.full((20,), 1 - eps)
        )
    own = anonymous_labels(true_and_top_classes(logits, labels, k), classes, eps)
    torch.testing.assert_close(own[range(20), labels], torch.full((20,), 1 - eps))


@pytest.mark.parametrize("kind", [LADistill, KDk])
@pytest.mark.parametrize(("classes", "k"), [(2, 2), (4, 2), (4, 3)])
def test_a_step_is_cross_entropy_against_the_soft_labels(
    kind: type[LADistill], classes: int, k: int
) -> None:
    objective = made(kind, classes, k=k, eps=0.2)
    features, labels = data(classes)
    encoded = objective.encode(labels)
    objective.configure(SGD)
    training = torch.arange(0, ROWS, 2)
    objective.prepare((features,), encoded, training)
    rows = training[torch.tensor([3, 1, 5, 8])]
    top = copy.deepcopy(objective.top)
    assert isinstance(top, nn.Linear)
    teacher = copy.deepcopy(objective.teacher)
    embedding = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))

    objective.rows = rows
    torch.manual_seed(7)
    outcome = objective.step(embedding.clone().requires_grad_(), encoded[rows])

    torch.manual_seed(7)
    train_teacher(teacher, [features[training]], labels[training])
    logits = teacher(features[rows])
    if kind is KDk:
        logits = logits.scatter(1, labels[rows].unsqueeze(1), 1e9)
    soft = torch.zeros(4, classes)
    for i, row in enumerate(logits.argsort(dim=1, descending=True).tolist()):
        soft[i, row[0]] = 0.8
        for other in row[1:k]:
            soft[i, other] = 0.2 / (k - 1)
    leaf = embedding.clone().requires_grad_()
    output = top(leaf)
    if classes == 2:
        output = torch.cat([torch.zeros(4, 1), output], dim=1)
    loss = -(soft * torch.log_softmax(output, dim=1)).sum(dim=1).mean()
    loss.backward()
    assert leaf.grad is not None and top.weight.grad is not None
    torch.testing.assert_close(outcome.loss, loss.detach())
    torch.testing.assert_close(outcome.gradient, leaf.grad)
    expected = top.weight - 0.1 * top.weight.grad
    torch.testing.assert_close(objective.top.weight, expected)  # type: ignore[union-attr,arg-type]
    right = float((soft.argmax(dim=1) == labels[rows]).float().mean())
    assert outcome.metrics["teacher_agreement"] == pytest.approx(right)


def epochs(objective: LADistill, labels: Tensor, count: int) -> list[list[Tensor]]:
    """Train with embeddings in place of features; return the gradients by epoch."""
    embedding, _ = data(objective.classes)
    encoded = objective.encode(labels)
    objective.configure(SGD)
    objective.prepare((), encoded, torch.arange(ROWS))
    gradients = []
    for epoch in range(count):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        gradients.append([])
        for rows in order.split(16):
            objective.rows = rows
            leaf = embedding[rows].clone().requires_grad_()
            gradients[-1].append(objective.step(leaf, encoded[rows]).gradient)
    return gradients


@pytest.mark.parametrize("first_epoch", ["vanilla", "silent"])
def test_without_features_the_first_epoch_is_vanilla_or_silent(
    first_epoch: str,
) -> None:
    _, labels = data(3)
    objective = made(LADistill, 3, first_epoch=first_epoch, teacher_lr=0.1)
    twin = copy.deepcopy(objective.top)
    first, second = epochs(objective, labels, 2)
    if first_epoch == "silent":
        assert all(not gradient.any() for gradient in first)
    else:
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:16]
        leaf = data(3)[0][rows].requires_grad_()
        F.cross_entropy(twin(leaf), labels[rows]).backward()
        assert leaf.grad is not None
        torch.testing.assert_close(first[0], leaf.grad)
    assert all(gradient.any() for gradient in second)
    ranked = objective.get_extra_state()["ranked"]
    assert (ranked[:, 0] == labels).float().mean() > 0.9  # it has learned something
    assert objective.get_extra_state()["seen"] == []


def test_the_teacher_learns_from_the_embeddings_of_the_first_epoch() -> None:
    """Labels that the embeddings say nothing about are not what the teacher says."""
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (ROWS,))
    objective = made(LADistill, 3, teacher_epochs=1)
    epochs(objective, labels, 2)
    ranked = objective.get_extra_state()["ranked"]
    assert (ranked[:, 0] == labels).float().mean() < 0.8
    own = made(KDk, 3, teacher_epochs=1)
    epochs(own, labels, 2)
    assert torch.equal(own.get_extra_state()["ranked"][:, 0], labels.int())


def test_the_teacher_is_trained_once_and_not_by_the_optimizer() -> None:
    _, labels = data(2)
    objective = made(LADistill, 2)
    before = copy.deepcopy(objective.teacher.state_dict())
    epochs(objective, labels, 1)
    for name, value in objective.teacher.state_dict().items():
        assert torch.equal(value, before[name])
    held = {
        id(p) for o in objective.optimizers for g in o.param_groups for p in g["params"]
    }
    assert held == {id(p) for p in objective.top.parameters()}


def test_a_frozen_teacher_is_used_as_it_is() -> None:
    features, labels = data(2)
    objective = made(LADistill, 2)
    objective.teacher.requires_grad_(False)
    before = copy.deepcopy(objective.teacher.state_dict())
    objective.prepare((features,), objective.encode(labels), torch.arange(ROWS))
    objective.rows = torch.arange(4)
    objective.step(features[:4].clone().requires_grad_(), objective.encode(labels)[:4])
    for name, value in objective.teacher.state_dict().items():
        assert torch.equal(value, before[name])
    ranked = objective.get_extra_state()["ranked"]
    assert torch.equal(ranked[:, 0].long(), objective.teacher(features).argmax(dim=1))


@pytest.mark.parametrize(("balanced", "share"), [(False, 0.0), (True, 0.5)])
def test_a_rare_class_is_likeliest_where_its_share_counts(
    balanced: bool, share: float
) -> None:
    labels = (torch.arange(ROWS) % 10 == 0).long()
    features = torch.zeros(ROWS, WIDTH)
    features[::2, 0] = 1.0  # half of the rows are twice as likely to be positive
    objective = made(LADistill, 2, balanced=balanced)
    objective.teacher.requires_grad_(False)
    objective.teacher.weight.copy_(torch.eye(2, WIDTH)[[1, 0]])  # type: ignore[union-attr,operator]
    objective.teacher.bias.copy_(torch.tensor([2.0, -0.5]))  # type: ignore[union-attr,operator]
    objective.prepare((features,), objective.encode(labels), torch.arange(ROWS))
    objective.rows = torch.arange(4)
    objective.step(features[:4].clone().requires_grad_(), objective.encode(labels)[:4])
    ranked = objective.get_extra_state()["ranked"]
    assert ranked[:, 0].float().mean() == share


def test_a_teacher_on_embeddings_waits_although_there_are_features() -> None:
    features, labels = data(2)
    objective = made(LADistill, 2, first_epoch="silent", on_embeddings=True)
    objective.configure(SGD)
    objective.prepare((features,), objective.encode(labels), torch.arange(ROWS))
    objective.rows = torch.arange(ROWS)
    silent = objective.step(features.clone().requires_grad_(), labels.float())
    assert not silent.gradient.any()
    assert objective.step(
        features.clone().requires_grad_(), labels.float()
    ).gradient.any()


def test_rows_that_are_not_for_training_teach_nothing() -> None:
    features, labels = data(2)
    results = []
    for wrong in (False, True):
        objective = made(LADistill, 2)
        given = labels.clone()
        if wrong:
            given[20:] = 1 - given[20:]
        encoded = objective.encode(given)
        objective.prepare((features,), encoded, torch.arange(20))
        objective.rows = torch.arange(4)
        torch.manual_seed(1)
        objective.step(features[:4].clone().requires_grad_(), encoded[:4])
        results.append(objective.teacher.weight.detach())  # type: ignore[union-attr]
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 1}, "k must be from 2"),
        ({"k": 4}, "number of classes, 3"),
        ({"eps": 1.0}, "eps"),
        ({"eps": -0.1}, "eps"),
        ({"first_epoch": "loud"}, "silent"),
        ({"teacher_epochs": 0}, "1 epoch"),
        ({"teacher_lr": 0.0}, "learning"),
    ],
)
def test_settings_out_of_range(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(LADistill, 3, **options)


def test_a_teacher_of_another_width_is_refused() -> None:
    features, labels = data(3)
    objective = LADistill(nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 4), 3)
    objective.prepare((features,), labels, torch.arange(ROWS))
    objective.rows = torch.arange(4)
    with pytest.raises(ConfigError, match="teacher for 3 classes"):
        objective.step(features[:4].requires_grad_(), labels[:4])


def test_a_step_without_rows_is_refused() -> None:
    objective = made(LADistill, 2)
    with pytest.raises(ConfigError, match="which rows"):
        objective.step(torch.zeros(2, WIDTH, requires_grad=True), torch.ones(2))
