"""What averaging an example's gradients over epochs does to defenses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from meter_cases import leaks_of
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from flower_vfl import Batch, GradientTransform
from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks import LeakageMeter, StaleGradients, mean_attack
from flower_vfl.strategies.defenses.iso import Iso
from flower_vfl.strategies.defenses.marvell.transform import Marvell
from flower_vfl.strategies.defenses.max_norm import MaxNorm

ROWS, WIDTH = 400, 16


DEFENSES: dict[str, Callable[[], GradientTransform]] = {
    "iso": lambda: Iso(t=25.0),
    "max_norm": MaxNorm,
    "marvell": lambda: Marvell(s=4.0),
}
# The attack that each of them is made to stop.
ATTACK = {"iso": "norm", "max_norm": "norm", "marvell": "cosine"}


def imbalanced() -> tuple[Tensor, Tensor]:
    """Return clean gradients of a rare class, (p − y)·w with a little of their own."""
    stream = torch.Generator().manual_seed(0)
    labels = (torch.rand(ROWS, generator=stream) < 0.25).long()
    share = 0.1 + 0.3 * torch.rand(ROWS, 1, generator=stream)
    direction = torch.ones(WIDTH) + 0.1 * torch.randn(ROWS, WIDTH, generator=stream)
    return (share - labels.unsqueeze(1)) * direction, labels


def sent(defense: GradientTransform, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what a party gets while its model stands still: rows and gradients."""
    gradient, labels = imbalanced()
    step = 0
    for epoch in range(1, epochs + 1):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(100):
            step += 1
            batch = Batch("a", step, 0, labels[rows], epoch)
            changed = defense(gradient[rows], batch)
            assert changed is not None
            yield rows, changed


@pytest.mark.parametrize("name", DEFENSES)
def test_averages_undo_fresh_noise(name: str) -> None:
    defense, attack = DEFENSES[name](), ATTACK[name]
    _, labels = imbalanced()
    stale, meter, found = StaleGradients(ROWS), LeakageMeter((attack,)), []
    for step, (rows, gradient) in enumerate(sent(defense, 100)):
        found.append(leaks_of(meter, gradient, labels[rows], step, flipped=True))
        stale.add(rows, gradient)
    assert int(stale.counts.min()) == int(stale.counts.max()) == 100
    each = np.mean([leak[attack] for leak in found])
    averaged = stale.leak((attack,), labels, flipped=True)[attack]
    assert each < 0.75
    assert averaged > 0.95


def test_the_bottom_line_on_real_data() -> None:
    """A real model learns meanwhile: old gradients are stale, and still add up."""
    table = load_breast_cancer()
    features = torch.from_numpy(StandardScaler().fit_transform(table.data)).float()
    labels = torch.from_numpy(1 - table.target)  # 1 is malignant, the rarer class
    torch.manual_seed(0)
    bottom, top = nn.Linear(30, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*bottom.parameters(), *top.parameters()], lr=0.05)
    stale = StaleGradients(len(labels), normalize=True)
    name, defense, step, found = "mean:held_out=true", Iso(t=25.0), 0, []
    meter = LeakageMeter((name,))
    for epoch in range(1, 41):
        for rows in torch.randperm(len(labels)).split(128):
            step += 1
            cut = bottom(features[rows])
            received = cut.detach().requires_grad_()
            target = labels[rows].float()
            loss = nn.functional.binary_cross_entropy_with_logits(
                top(received)[:, 0], target
            )
            optimizer.zero_grad()
            loss.backward()
            assert received.grad is not None
            gradient = defense(received.grad, Batch("a", step, 0, target, epoch))
            assert gradient is not None
            cut.backward(gradient)
            optimizer.step()
            found.append(leaks_of(meter, gradient, labels[rows], step)[name])
            stale.add(rows, gradient)
    averaged = stale.leak((name,), labels)[name]
    assert averaged > np.mean(found) + 0.1


def test_means_of_what_was_seen() -> None:
    stale = StaleGradients(5)
    stale.add(torch.tensor([3, 0]), torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    stale.add(
        torch.tensor([3, 1, 3]), torch.tensor([[4.0, 3.0], [5.0, 5.0], [0.0, 0.0]])
    )
    assert stale.counts.tolist() == [1, 1, 0, 3, 0]
    seen, means = stale.means()
    assert seen.tolist() == [0, 1, 3]
    assert means.tolist() == [[1.0, 1.0], [5.0, 5.0], [2.0, 1.0]]


def test_every_batch_weighs_the_same_if_asked() -> None:
    stale = StaleGradients(2, normalize=True)
    rows = torch.tensor([0, 1])
    stale.add(rows, torch.tensor([[3.0], [4.0]]))
    stale.add(rows, torch.tensor([[-4e-9], [3e-9]]))
    scale = np.sqrt(12.5)
    expected = [[(3 - 4) / scale / 2], [(4 + 3) / scale / 2]]
    np.testing.assert_allclose(stale.means()[1], expected, rtol=1e-6)
    stale.add(rows, torch.zeros(2, 1))
    assert stale.counts.tolist() == [3, 3]


def test_the_leak_is_that_of_the_attack() -> None:
    gradient, labels = imbalanced()
    stale = StaleGradients(ROWS)
    stale.add(torch.arange(0, ROWS, 2), gradient[::2])
    expected = mean_attack(gradient[::2], labels[::2])
    assert stale.means()[0].tolist() == list(range(0, ROWS, 2))
    auc = roc_auc_score(labels[::2], expected)
    assert stale.leak(("mean",), labels) == {"mean": pytest.approx(auc)}


def test_what_does_not_fit_is_refused() -> None:
    gradient, labels = imbalanced()
    stale = StaleGradients(ROWS)
    with pytest.raises(ConfigError, match="no gradient was collected"):
        stale.means()
    stale.add(torch.arange(ROWS), gradient)
    with pytest.raises(ConfigError, match="3 columns, before it were 16"):
        stale.add(torch.arange(ROWS), gradient[:, :3])
    with pytest.raises(ConfigError, match="9 row numbers for 400 rows"):
        stale.add(torch.arange(9), gradient)
    with pytest.raises(ConfigError, match="9 labels for 400 examples"):
        stale.leak(("norm",), labels[:9])
    assert np.isnan(stale.leak(("norm",), torch.ones(ROWS))["norm"])
    with pytest.raises(ConfigError, match="rows must be"):
        StaleGradients(0)


def test_attacks_do_not_know_the_defenses() -> None:
    folder = Path(str(import_module("flower_vfl.leakage.attacks").__file__)).parent
    for path in folder.glob("*.py"):
        assert "strategies" not in path.read_text(encoding="utf-8"), path.name
