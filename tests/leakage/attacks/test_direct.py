"""The direct attack on summed logits, and how many labels it gets right."""

from __future__ import annotations

import math

import pytest
import torch
from records_cases import by_name
from sklearn.metrics import accuracy_score, f1_score

from flower_vfl.leakage.attacks.direct import direct_attack, direct_success
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor


def test_labels_are_read_off_the_gradient() -> None:
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn(50, requires_grad=True, generator=stream)
    labels = torch.randint(0, 2, (50,), generator=stream)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
    (gradient,) = torch.autograd.grad(loss, logits)
    assert direct_attack(gradient).tolist() == labels.tolist()
    assert torch.equal(direct_attack(gradient, hard=False), -gradient.double())
    logits = torch.randn(50, 6, requires_grad=True, generator=stream)
    labels = torch.randint(0, 6, (50,), generator=stream)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert direct_attack(gradient).tolist() == labels.tolist()


@pytest.mark.parametrize("columns", [1, 2, 10])
def test_it_is_f1_of_two_classes_and_accuracy_of_more(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    classes = max(columns, 2)
    labels = torch.randint(classes, (200,), generator=generator)
    gradient = torch.randn(200, columns, generator=generator)
    guessed = gradient.argmin(dim=1) if columns > 1 else (gradient[:, 0] < 0).long()
    reference = f1_score if classes == 2 else accuracy_score
    assert direct_success(gradient, labels) == pytest.approx(
        reference(labels.numpy(), guessed.numpy())
    )


def test_a_batch_without_class_1_has_nothing_to_find() -> None:
    gradient = torch.tensor([[0.2], [0.1]])
    assert math.isnan(direct_success(gradient, torch.zeros(2)))


def test_a_batch_where_nothing_is_found_counts_as_zero() -> None:
    assert direct_success(torch.tensor([[0.2], [0.1]]), torch.tensor([1.0, 0.0])) == 0.0


def test_it_is_measured_with_the_direct_attack_only() -> None:
    gradient = torch.tensor([[-0.5], [0.3], [0.2], [-0.1]])
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0])
    for attack, expected in (("direct", 0.5), ("norm", None)):
        watch = LeakageMonitor(Leakage(attacks=(attack,)), "binary")
        found = by_name(watch.measure({"a": gradient}, {"a": gradient}, labels, 1))
        assert found.get("success_direct/a") == expected


def test_a_limit_does_not_look_at_it() -> None:
    # leak AUC 0.5, success 2/3: only the first counts
    gradient = torch.tensor([[-0.5], [-0.3], [-0.2], [-0.1]])
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0])
    watch = LeakageMonitor(Leakage(attacks=("direct",), limit=0.6, window=1), "binary")
    found = by_name(watch.measure({"a": gradient}, {"a": gradient}, labels, 1))
    assert found["success_direct/a"] == pytest.approx(2 / 3)
    assert "leak_limit/a" not in found
