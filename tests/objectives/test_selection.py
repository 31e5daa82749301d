"""Choosing Δ and γ on a part of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from flower_vfl import ConfigError
from flower_vfl.objectives import (
    GAFM,
    SubsetTraining,
    select_delta,
    select_gamma,
    selection,
)
from flower_vfl.objectives.selection import SubsetResult, train_on_subset

ROWS = 400


def bottoms() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, 1), nn.Sigmoid()) for _ in range(2)]


def small(**settings: object) -> SubsetTraining:
    stream = torch.Generator().manual_seed(0)
    features = [[torch.randn(ROWS, 3, generator=stream)] for _ in range(2)]
    labels = (features[0][0][:, 0] + features[1][0][:, 0] > 0).long()
    usual = {"epochs": 15, "batch_size": 20, "fraction": 0.25}
    adam = partial(torch.optim.Adam, lr=0.02)
    return SubsetTraining(
        features,
        labels,
        bottoms,
        optimizer=adam,
        **{**usual, **settings},  # type: ignore[arg-type]
    )


def objective(delta: float = 0.05, gamma: float = 1.0) -> GAFM:
    return GAFM(1, delta=delta, gamma=gamma)


def test_a_training_measures_what_it_says() -> None:
    trial = train_on_subset(small(), objective)
    assert set(trial.leak_auc) == {"norm", "mean:hard=true", "median:hard=true"}
    assert all(0.5 <= auc <= 1.0 for auc in trial.leak_auc.values())
    assert trial.train_auc > 0.7  # the orientation is right
    assert trial.magnitudes["gan"] >= abs(trial.averages["gan"])
    assert trial.magnitudes["ce"] >= abs(trial.averages["ce"])


def test_a_training_can_be_repeated_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    one, two = train_on_subset(small(), objective), train_on_subset(small(), objective)
    assert one == two
    assert one != train_on_subset(small(), objective, repeat=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_training_sees_a_part_of_the_rows_only() -> None:
    seen: list[Tensor] = []

    class Watching(GAFM):
        def step(self, embedding: Tensor, labels: Tensor):  # type: ignore[no-untyped-def]
            seen.append(labels)
            return super().step(embedding, labels)

    train_on_subset(small(epochs=2, fraction=0.1), partial(Watching, 1))
    assert sum(map(len, seen)) == 2 * ROWS // 10


def test_delta_has_the_smallest_mean_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    leaks = {0.05: (0.6, 0.7, 0.8), 0.1: (0.5, 0.5, 0.5), 0.5: (0.9, 0.9, 0.9)}
    utility = {0.05: 0.9, 0.1: 0.5, 0.5: 0.95}

    def fake(_: SubsetTraining, make: Callable[[], GAFM], repeat: int) -> SubsetResult:
        made = make()
        norm, mean, median = leaks[made.delta]
        shift = 0.01 * repeat
        known = {"norm": norm, "mean": mean + shift, "median": median}
        return SubsetResult(utility[made.delta], known, {}, {})

    monkeypatch.setattr(selection, "train_on_subset", fake)
    choice = select_delta(small(), objective, tuple(leaks), repeats=3)
    assert choice.delta == 0.05
    expected = (0.6 + 0.7 + 0.8 + 0.01) / 3 / 0.9
    assert choice.ratios[0.05] == pytest.approx(expected)
    assert choice.ratios[0.1] == pytest.approx((1.5 + 0.01) / 3 / 0.5)
    assert choice.train_aucs == pytest.approx(utility)
    assert choice.learned
    utility[0.05] = 0.59
    assert not select_delta(small(), objective, (0.05,), repeats=1).learned


@pytest.mark.parametrize(("literal", "expected"), [(False, 5.0), (True, 20.0)])
def test_gamma_balances_the_parts(
    literal: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gammas: list[float] = []

    def fake(_: SubsetTraining, make: Callable[[], GAFM], repeat: int) -> SubsetResult:
        made = make()
        gammas.append(made.gamma)
        sizes = {"gan": 0.1 + 0.02 * repeat, "ce": 0.5 + 0.1 * repeat}
        return SubsetResult(0.9, {}, sizes, {"gan": -0.04, "ce": 0.8})

    monkeypatch.setattr(selection, "train_on_subset", fake)
    make = partial(objective, 0.05)
    choice = select_gamma(small(), make, repeats=2, literal=literal)
    assert choice.gamma == pytest.approx(expected)
    assert gammas == [1.0, 1.0]


def test_a_chosen_gamma_makes_the_parts_equal() -> None:
    choice = select_gamma(small(epochs=3), partial(objective, 0.05))
    assert 0.5 < choice.gamma < 2.0  # both parts have length 1 to begin with
    assert choice.gamma == pytest.approx(choice.ce / choice.gan)


def test_several_classes_and_a_chosen_delta() -> None:
    stream = torch.Generator().manual_seed(0)
    features = torch.randn(120, 3, generator=stream)

    def three() -> Sequence[nn.Module]:
        return [nn.Linear(3, 3)]

    training = SubsetTraining(
        [[features]], features.argmax(dim=1), three, 0.5, 3, 30, seed=1
    )
    choice = select_delta(
        training, lambda d: GAFM(3, classes=3, delta=d), (0.1, 0.6), repeats=1
    )
    assert choice.delta in (0.1, 0.6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"fraction": 0.0}, "fraction"), ({"epochs": 0}, "epoch")],
)
def test_settings_out_of_range(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small(**settings)


def test_a_batch_may_lack_a_class() -> None:
    training = small()
    labels = torch.arange(ROWS) % 2
    labels[::25] = 2
    several = SubsetTraining(
        training.features,
        labels,
        lambda: [nn.Linear(3, 3) for _ in range(2)],
        epochs=1,
        batch_size=10,
    )
    trial = train_on_subset(several, lambda: GAFM(3, classes=3))
    assert set(trial.leak_auc) == {"norm", "mean", "median"}


def test_rows_of_one_class_are_refused() -> None:
    training = small()
    one = SubsetTraining(training.features, torch.ones(ROWS), bottoms, epochs=1)
    with pytest.raises(ConfigError, match="one class"):
        train_on_subset(one, objective)
