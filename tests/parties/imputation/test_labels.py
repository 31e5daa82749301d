"""Synthetic labels, against hand-worked numbers and known distributions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import Task
from flower_vfl.parties.imputation.labels import (
    LABEL_SYNTHESIZERS,
    LabelSynthesizer,
    UnlabelledBatch,
    class_counts,
    draw_predicted,
    minority_class,
    nearest_labels,
    vote,
)
from flower_vfl.randomness import Noise
from flower_vfl.specs import build_from_spec

OWN = torch.tensor([0.0, 0.0, 1.0, 0.0])


def unlabelled(
    labels: Tensor, absent: list[int], step: int = 1, **parts: Tensor
) -> UnlabelledBatch:
    return UnlabelledBatch(
        torch.arange(len(labels)),
        labels,
        torch.tensor(absent),
        lambda: parts["predicted"],
        lambda: parts["joined"],
        Noise(9, step),
    )


def fitted(
    text: str, own: Tensor = OWN, classes: int = 2, rows: int = 100
) -> LabelSynthesizer:
    synthesizer = build_from_spec("kind of synthetic labels", text, LABEL_SYNTHESIZERS)
    synthesizer.fit(own, classes, rows, Noise(4, "rows"))
    return synthesizer


def test_majority_and_minority_of_classes() -> None:
    counts = class_counts(torch.tensor([2, 0, 2, 1, 0, 2]), 4)
    assert counts.tolist() == [2, 1, 3, 0]
    assert minority_class(counts) == 1
    assert minority_class(torch.tensor([5, 0])) == 1  # nobody has it, there is no other
    assert minority_class(torch.tensor([0, 5])) == 0
    assert minority_class(torch.tensor([3, 3])) == 1
    own = torch.tensor([2, 0, 2, 1, 0, 2]), torch.tensor([1, 0, 0, 1])
    found = [fitted("majority", each, 3).class_shares(torch.ones(3)) for each in own]
    assert [int(each.argmax()) for each in found if each is not None] == [2, 0]


@pytest.mark.parametrize(("text", "expected"), [("majority", 0.0), ("minority", 1.0)])
def test_one_class_for_all(text: str, expected: float) -> None:
    batch = unlabelled(torch.tensor([1.0, 1.0, 0.0]), [0, 2])
    filled = fitted(text).synthesize(batch)
    assert filled.tolist() == [expected, expected]
    assert filled.dtype == batch.labels.dtype


def test_random_pos_has_the_positive_rate_and_keeps_a_rows_label() -> None:
    own = torch.cat([torch.ones(30), torch.zeros(70)])
    synthesizer = fitted("random_pos", own, rows=20000)
    batch = unlabelled(torch.zeros(20000), list(range(20000)))
    filled = synthesizer.synthesize(batch)
    assert float(filled.mean()) == pytest.approx(0.3, abs=4 * (0.21 / 20000) ** 0.5)
    later = unlabelled(torch.zeros(20000), list(range(20000)), step=2)
    assert torch.equal(synthesizer.synthesize(later), filled)
    fresh = fitted("random_pos:fixed=false", own, rows=20000)
    assert not torch.equal(fresh.synthesize(batch), fresh.synthesize(later))


def test_random_pos_of_a_regression_draws_own_labels() -> None:
    own = torch.tensor([1.5, -2.0, 7.0])
    filled = fitted("random_pos", own, 0).synthesize(
        unlabelled(torch.zeros(50), [3, 4, 5, 6])
    )
    assert set(filled.tolist()) <= {1.5, -2.0, 7.0}


@pytest.mark.parametrize("samples", [1, 4])
def test_predicted_labels_have_the_predicted_probability(samples: int) -> None:
    chances = torch.tensor([0.1, 0.8]).repeat(5000)
    shares = draw_predicted(chances, samples, Noise(1))
    assert set((shares * samples).tolist()) <= set(map(float, range(samples + 1)))
    for start, chance in ((0, 0.1), (1, 0.8)):
        error = 4 * (chance * (1 - chance) / samples / 5000) ** 0.5
        assert float(shares[start::2].mean()) == pytest.approx(chance, abs=error)
    many = torch.tensor([[0.2, 0.5, 0.3]]).repeat(5000, 1)
    drawn = draw_predicted(many, samples, Noise(1))
    assert drawn.sum(dim=1).tolist() == pytest.approx([1.0] * 5000)
    assert drawn.mean(dim=0).tolist() == pytest.approx([0.2, 0.5, 0.3], abs=0.03)


def test_random_pred_gives_labels_or_shares() -> None:
    predicted = torch.tensor([0.0, 1.0, 1.0, 0.0])
    batch = unlabelled(torch.zeros(4), [1, 3], predicted=predicted)
    assert fitted("random_pred").synthesize(batch).tolist() == [1.0, 0.0]
    several = fitted("random_pred:samples=3").synthesize(batch)
    assert several.tolist() == [1.0, 0.0]
    certain = torch.eye(3)[[2, 0, 1]]
    batch = unlabelled(torch.zeros(3, dtype=torch.int64), [0, 2], predicted=certain)
    own = torch.tensor([0, 1, 2])
    assert fitted("random_pred", own, 3).synthesize(batch).tolist() == [2, 1]
    shares = fitted("random_pred:samples=2", own, 3).synthesize(batch)
    assert shares.tolist() == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize("classes", [2, 3])
def test_an_averaged_label_has_the_averaged_gradient(classes: int) -> None:
    logits = torch.randn(6, classes if classes > 2 else 1, requires_grad=True)
    columns = logits if classes > 2 else logits[:, 0]
    draws = torch.randint(classes, (4, 6))
    gradients = []
    for draw in draws:
        loss = (
            cross_entropy(columns, draw)
            if classes > 2
            else binary_cross_entropy_with_logits(columns, draw.float())
        )
        gradients.append(torch.autograd.grad(loss, logits, retain_graph=True)[0])
    soft = torch.nn.functional.one_hot(draws, classes).float().mean(dim=0)
    loss = (
        cross_entropy(columns, soft)
        if classes > 2
        else binary_cross_entropy_with_logits(columns, soft[:, 1])
    )
    found = torch.autograd.grad(loss, logits)[0]
    assert torch.allclose(found, torch.stack(gradients).mean(dim=0), atol=1e-6)


def test_random_pred_changes_nothing_on_average() -> None:
    logits = torch.tensor([0.3, -1.2, 2.0]).repeat(20000).requires_grad_()
    chances = torch.sigmoid(logits.detach())
    labels = draw_predicted(chances, 1, Noise(6))
    loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    gradient = torch.autograd.grad(loss, logits)[0].reshape(-1, 3).mean(dim=0)
    assert gradient.abs().max() < 4 * 0.5 / 20000**0.5


def test_neighbors_by_cosine() -> None:
    joined = torch.tensor(
        [[1.0, 0.0], [9.0, 1.0], [0.0, 1.0], [0.1, 5.0], [0.2, 1.0], [2.0, 0.1]]
    )
    labels = torch.tensor([-9.0, 1.0, -9.0, 0.0, 0.0, 1.0])
    batch = unlabelled(labels, [0, 2], joined=joined)
    assert batch.known.tolist() == [1, 3, 4, 5]
    # Row 0 is nearest to rows 5 and 1 (labels 1), row 2 to rows 3 and 4 (labels 0).
    assert fitted("neighbors").synthesize(batch).tolist() == [1.0, 0.0]
    assert fitted("neighbors:k=1").synthesize(batch).tolist() == [1.0, 0.0]
    values = torch.tensor([0.0, 4.0, 0.0, -3.0, -1.0, 8.0])
    batch = unlabelled(values, [0, 2], joined=joined)
    # The third of row 0 is row 4, cosine 0.196; of row 2 it is row 1, cosine 0.11.
    filled = fitted("neighbors", values, 0).synthesize(batch)
    assert filled.tolist() == pytest.approx([11 / 3, 0.0])


def test_votes_and_ties() -> None:
    assert vote(torch.tensor([[2, 1, 1], [0, 2, 1], [2, 0, 1]]), 3).tolist() == [
        1,
        0,
        2,
    ]
    assert vote(torch.tensor([[1.0, 0.0]]), 2).tolist() == [1]
    few = nearest_labels(torch.ones(2, 3), torch.ones(1, 3), torch.tensor([4]), 3)
    assert few.tolist() == [[4], [4]]


def test_a_batch_without_any_label_gets_drawn_ones() -> None:
    batch = unlabelled(torch.zeros(40), list(range(40)), joined=torch.randn(40, 2))
    filled = fitted("neighbors", torch.tensor([1.0, 0.0])).synthesize(batch)
    assert set(filled.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("text", ["majority", "minority", "random_pred"])
def test_a_regression_refuses_what_needs_classes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"random_pos.*neighbors"):
        build_from_spec(
            "kind of synthetic labels", text, LABEL_SYNTHESIZERS
        ).check_task("regression")


@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_what_draws_from_labels_works_for_every_task(task: Task) -> None:
    build_from_spec(
        "kind of synthetic labels", "random_pos", LABEL_SYNTHESIZERS
    ).check_task(task)
    build_from_spec(
        "kind of synthetic labels", "neighbors", LABEL_SYNTHESIZERS
    ).check_task(task)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("most", "majority, minority"),
        ("random_pred:samples=0", "at least 1"),
        ("neighbors:k=0", "at least 1"),
    ],
)
def test_wrong_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_from_spec("kind of synthetic labels", text, LABEL_SYNTHESIZERS)
