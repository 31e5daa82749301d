"""What averaging an example's gradients over epochs does to defenses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meter_cases import leaks_of
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from flower_vfl import Batch, GradientTransform
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.attacks import LeakageMeter, StaleGradients, mean_attack
from flower_vfl.leakage.attacks.registry import build_attack
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor
from flower_vfl.parties.checkpoints import from_bytes, to_bytes
from flower_vfl.records import Measurement
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
    stale, meter, found = StaleGradients(), LeakageMeter((attack,)), []
    for step, (rows, gradient) in enumerate(sent(defense, 100)):
        found.append(leaks_of(meter, gradient, labels[rows], step, flipped=True))
        stale.add(rows, gradient)
    assert int(stale.counts.min()) == int(stale.counts.max()) == 100
    each = np.mean([leak[attack] for leak in found])
    index, means = stale.means()
    averaged = leaks_of(meter, means, labels[index], 1, flipped=True)[attack]
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
    stale = StaleGradients(normalize=True)
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
    index, means = stale.means()
    averaged = leaks_of(meter, means, labels[index], step)[name]
    assert averaged > np.mean(found) + 0.1


def test_means_of_what_was_seen() -> None:
    stale = StaleGradients()
    stale.add(torch.tensor([3, 0]), torch.tensor([[2.0, 0.0], [1.0, 1.0]]))
    stale.add(
        torch.tensor([3, 1, 3]), torch.tensor([[4.0, 3.0], [5.0, 5.0], [0.0, 0.0]])
    )
    assert stale.counts.tolist() == [1, 1, 0, 3]
    seen, means = stale.means()
    assert seen.tolist() == [0, 1, 3]
    assert means.tolist() == [[1.0, 1.0], [5.0, 5.0], [2.0, 1.0]]


def test_every_batch_weighs_the_same_if_asked() -> None:
    stale = StaleGradients(normalize=True)
    rows = torch.tensor([0, 1])
    stale.add(rows, torch.tensor([[3.0], [4.0]]))
    stale.add(rows, torch.tensor([[-4e-9], [3e-9]]))
    scale = np.sqrt(12.5)
    expected = [[(3 - 4) / scale / 2], [(4 + 3) / scale / 2]]
    np.testing.assert_allclose(stale.means()[1], expected, rtol=1e-6)
    stale.add(rows, torch.zeros(2, 1))
    assert stale.counts.tolist() == [3, 3]


def test_what_does_not_fit_is_refused() -> None:
    gradient, _ = imbalanced()
    stale = StaleGradients()
    with pytest.raises(ConfigError, match="no gradient was collected"):
        stale.means()
    stale.add(torch.arange(ROWS), gradient)
    with pytest.raises(ConfigError, match="3 columns, expected 16"):
        stale.add(torch.arange(ROWS), gradient[:, :3])
    with pytest.raises(ConfigError, match="9 row numbers for 400 rows"):
        stale.add(torch.arange(9), gradient)


def batches(epochs: int) -> Iterator[tuple[int, bool, Tensor]]:
    """Yield step, whether it ends its epoch, and rows, of which some never come."""
    for step in range(1, 4 * epochs + 1):
        epoch = (step - 1) // 4
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        yield step, step % 4 == 0, 5 + 2 * order.split(100)[(step - 1) % 4]


def watch(
    monitor: LeakageMonitor, epochs: range, late: bool = False
) -> list[Measurement]:
    """Measure two parties that get the gradients of both halves in noise."""
    gradient, labels = imbalanced()
    found = []
    for step, last, rows in batches(epochs.stop):
        if (step - 1) // 4 not in epochs:
            continue
        noise = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(step))
        seen = gradient[(rows - 5) // 2] + 3.0 * noise
        given = {"a": seen[:, :8], "b": seen[:, 8:]}
        used = {"rows": rows, "last": last, "late": late}
        truth = labels[(rows - 5) // 2]
        found += monitor.measure(given, given, truth, step, **used)
    return found


def monitor(*attacks: str, **settings: Any) -> LeakageMonitor:
    given = Leakage(attacks, coalitions=("all",), **settings)
    return LeakageMonitor(given, "binary")


def test_a_monitor_measures_means_at_the_end_of_each_epoch() -> None:
    attacks = ("stale", "stale:score=norm", "stale:score=mean,hard=true")
    found = watch(monitor(*attacks), range(6))
    assert {each.step for each in found} == {4, 8, 12, 16, 20, 24}
    assert {each.attack for each in found} == {*attacks}
    assert {each.metric for each in found} == {"leak", "leak_flipped"}
    # beside the same means, made in one go
    gradient, labels = imbalanced()
    sums, counts = np.zeros((2, ROWS, 8)), 0
    for step, last, rows in batches(6):
        noise = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(step))
        numbers = ((rows - 5) // 2).numpy()
        seen = (gradient[numbers] + 3.0 * noise).double().numpy()
        for half, own in enumerate((seen[:, :8], seen[:, 8:])):
            scale = np.sqrt(np.square(np.linalg.norm(own, axis=1)).mean())
            sums[half][numbers] += own / scale
        counts += last
    for party, means in [("a", sums[0]), ("b", sums[1]), ("a+b", np.hstack(sums))]:
        expected = {"stale:score=norm": np.linalg.norm(means, axis=1)}
        score = mean_attack(torch.from_numpy(means / counts), labels, hard=True)
        expected["stale:score=mean,hard=true"] = score.numpy()
        for attack, scores in expected.items():
            (value,) = [
                each.value
                for each in found
                if (each.metric, each.party, each.attack, each.step)
                == ("leak", party, attack, 24)
            ]
            assert value == pytest.approx(roc_auc_score(labels, scores), abs=1e-3)
    by_party = {e.party: e.value for e in found if e.attack == "stale" and e.step == 24}
    assert by_party["a+b"] > max(by_party["a"], by_party["b"]) > 0.65


def test_a_pooled_attack_has_one_auc_of_all_batches_of_an_epoch() -> None:
    hard, norm = "pooled:score=mean,hard=true", "pooled"
    found = watch(monitor(norm, hard), range(2))
    assert {(each.step, each.party) for each in found} == {
        (step, party) for step in (4, 8) for party in ("a", "b")
    }
    gradient, labels = imbalanced()
    truth, scores = [], {norm: [], hard: []}
    for step, _, rows in list(batches(2))[4:]:
        noise = torch.randn(100, WIDTH, generator=torch.Generator().manual_seed(step))
        numbers = (rows - 5) // 2
        seen = (gradient[numbers] + 3.0 * noise)[:, :8].double()
        truth.append(labels[numbers])
        scores[norm].append(seen.norm(dim=1))
        scores[hard].append(mean_attack(seen, labels[numbers], hard=True))
    for attack, parts in scores.items():
        auc = roc_auc_score(torch.cat(truth), torch.cat(parts))
        own = [e.value for e in found if (e.attack, e.party) == (attack, "a")][2:]
        assert own == pytest.approx([auc, max(auc, 1.0 - auc)], abs=1e-6)
    with pytest.raises(ConfigError, match="needs two classes"):
        build_attack(norm, "multiclass")


def test_epochs_add_up_however_often_steps_are_measured() -> None:
    alone = watch(monitor("stale"), range(3))
    beside = watch(monitor("norm", "stale", every=5), range(3), late=True)
    assert [each for each in beside if each.attack == "stale"] == alone
    assert {each.step for each in beside if each.attack == "norm"} == {5, 10}


@pytest.mark.parametrize("late", [False, True])
def test_a_resumed_monitor_equals_one_that_went_on(late: bool) -> None:
    attacks = ("norm", "stale", "stale:over=best,score=norm", "pooled")
    expected = watch(monitor(*attacks), range(6), late)
    first, second = monitor(*attacks), monitor(*attacks)
    found = watch(first, range(2), late)
    second.load_state_dict(from_bytes(to_bytes(first.state_dict())))
    assert found + watch(second, range(2, 6), late) == expected
    assert found + watch(monitor(*attacks), range(2, 6), late) != expected


def test_the_best_epoch_so_far() -> None:
    plain = watch(monitor("stale:score=norm"), range(8))
    best = watch(monitor("stale:score=norm,over=best"), range(8))
    for party in ("a", "b", "a+b"):
        values, largest = (
            [e.value for e in found if e.party == party and e.metric == "leak"]
            for found in (plain, best)
        )
        assert largest == np.maximum.accumulate(values).tolist()


def test_parties_and_rows_that_are_missing() -> None:
    """A withheld gradient leaves holes; a coalition has the rows of all members."""
    gradient, labels = imbalanced()
    own, rows = monitor("stale:score=norm"), torch.arange(ROWS)
    for step, given in enumerate(({"a": gradient}, {"b": gradient}, {}), 1):
        told = {"rows": rows, "last": step == 3, "real": rows % (2 + step) > 0}
        found = own.measure(given, given, labels, step, **told)
        assert bool(found) == (step == 3)
    seen = [rows % 3 > 0, rows % 4 > 0]
    expected = {"a": seen[0], "b": seen[1], "a+b": seen[0] & seen[1]}
    leaks = {each.party: each.value for each in found if each.metric == "leak"}
    assert leaks == {
        party: pytest.approx(roc_auc_score(labels[real], gradient[real].norm(dim=1)))
        for party, real in expected.items()
    }


def test_what_a_stale_attack_is() -> None:
    assert build_attack("stale", "binary") == build_attack(
        "mean:held_out=true", "multiclass"
    )
    hard = build_attack("stale:hard=true", "binary")
    assert hard == build_attack("mean:held_out=true,hard=true", "binary")
    assert build_attack("stale:over=best", "regression") == build_attack(
        "direct", "regression"
    )
    assert build_attack("stale:score=median,sample=none", "binary") == build_attack(
        "median:sample=none", "binary"
    )
    for text, problem in {
        "stale:over=most": "'most'.*all, best",
        "stale:score=nrom": "nrom",
        "stale:score=norm,hard=true": "unknown parameter 'hard'",
        "stale:depth=2": "unknown parameter 'depth'",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            build_attack(text, "binary")


def test_a_limit_looks_at_steps() -> None:
    found = watch(monitor("stale", limit=0.51, window=2), range(2))
    limits = {each.attack for each in found if each.metric == "leak_limit"}
    assert limits and limits <= {"norm", "cosine", "mean:held_out=true"}


def test_a_stale_attack_names_the_party_and_needs_row_numbers() -> None:
    gradient, labels = imbalanced()
    with pytest.raises(ConfigError, match="numbers of the rows"):
        monitor("stale").measure({"a": gradient}, {}, labels, 1)
    with pytest.raises(PartyError, match=r"'a'.*missing or infinite"):
        monitor("stale").measure(
            {"a": gradient / 0.0}, {}, labels, 1, rows=torch.arange(ROWS)
        )


def test_attacks_do_not_know_the_defenses() -> None:
    folder = Path(str(import_module("flower_vfl.leakage.attacks").__file__)).parent
    for path in folder.glob("*.py"):
        assert "strategies" not in path.read_text(encoding="utf-8"), path.name
