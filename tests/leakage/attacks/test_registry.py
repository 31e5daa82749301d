"""Attacks by name, and a user's own attack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from meter_cases import case, leaks_of
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.attacks import SCORE_ATTACKS, Known, LeakageMeter, norm_attack
from flower_vfl.leakage.attacks.registry import (
    fits,
)


@pytest.fixture
def register() -> Iterator[Callable[[Any], None]]:
    """Register an attack as ``own`` for one test."""

    def add(attack: Any) -> None:
        SCORE_ATTACKS["own"] = attack

    yield add
    SCORE_ATTACKS.pop("own", None)


def largest_entry(gradient: Tensor, known: Known, power: float = 1.0) -> Tensor:
    return gradient.abs().amax(dim=1) ** power


def test_an_own_attack_is_a_function(register: Callable[[Any], None]) -> None:
    register(largest_entry)
    gradient, labels = case()
    meter = LeakageMeter(("own", "own:power=-1", "norm"))
    found = leaks_of(meter, gradient, labels, 1)
    score = gradient.abs().amax(dim=1)
    assert found["own"] == pytest.approx(roc_auc_score(labels, score))
    assert found["own:power=-1"] == pytest.approx(1.0 - found["own"])
    assert found["norm"] == roc_auc_score(labels, norm_attack(gradient))
    with pytest.raises(ConfigError, match=r"unknown parameter 'factor'.*power=1"):
        LeakageMeter(("own:factor=2",))


def test_an_own_attack_has_a_column_per_class(register: Callable[[Any], None]) -> None:
    def second_moment(gradient: Tensor, known: Known) -> Tensor:
        rows = [gradient[torch.from_numpy(group)] for group in known.groups]
        return torch.stack([gradient @ part.mean(dim=0) for part in rows], dim=1)

    register(second_moment)
    gradient, labels = case(classes=3)
    labels = labels * 2 + 1  # 1, 3 and 5
    gradient = gradient.double()
    found = leaks_of(LeakageMeter(("own",), "multiclass"), gradient, labels, 1)
    aucs = [
        roc_auc_score(labels == c, gradient @ gradient[labels == c].mean(dim=0))
        for c in (1, 3, 5)
    ]
    assert found["own"] == pytest.approx(np.mean(aucs))


def test_an_own_attack_may_be_a_class(register: Callable[[Any], None]) -> None:
    @dataclass(frozen=True)
    class Column:
        number: int
        tasks: ClassVar[tuple[str, ...]] = ("binary",)
        knows_examples: ClassVar[bool] = True

        def __call__(self, gradient: Tensor, known: Known) -> Tensor:
            return gradient[:, self.number]

    register(Column)
    gradient, labels = case()
    found = leaks_of(LeakageMeter(("own:number=2",)), gradient, labels, 1)
    rest = np.delete(np.arange(200), int(labels.nonzero()[0, 0]))
    expected = roc_auc_score(labels[rest], gradient[rest, 2])
    assert found["own:number=2"] == pytest.approx(expected)
    assert fits("own:number=2", "binary") and not fits("own", "binary")
    with pytest.raises(ConfigError, match="needs classes, the task is regression"):
        LeakageMeter(("own:number=2",), "regression")


@pytest.mark.parametrize(
    "scores, message",
    [
        (torch.zeros(199), r"shape \(199,\) for 200 rows"),
        (torch.zeros(200, 3), "of 2 classes; return one score per row"),
        (torch.tensor(0.0), "one score per row"),
        (torch.full((200,), torch.nan), "missing or infinite"),
    ],
)
def test_scores_that_cannot_be_ranked(
    scores: Tensor, message: str, register: Callable[[Any], None]
) -> None:
    register(lambda gradient, known: scores)
    gradient, labels = case()
    with pytest.raises(PartyError, match=f"party 'a', step 4.*{message}"):
        leaks_of(LeakageMeter(("own",)), gradient, labels, 4)


def test_the_party_whose_scores_cannot_be_ranked_is_named(
    register: Callable[[Any], None],
) -> None:
    register(lambda gradient, known: gradient[:, 0].log())
    gradient, labels = case()
    given = {"a": gradient.abs(), "b": -gradient.abs(), "c": gradient.abs()}
    with pytest.raises(PartyError, match="party 'b', step 4"):
        LeakageMeter(("own",)).measure(given, labels, 4)


def test_other_types_of_scores(register: Callable[[Any], None]) -> None:
    gradient, labels = case()
    chosen = gradient[:, 0] > 0
    expected = roc_auc_score(labels, chosen)
    for dtype in (torch.bool, torch.long, torch.float16, torch.bfloat16):
        register(lambda gradient, known, dtype=dtype: chosen.to(dtype))
        found = leaks_of(LeakageMeter(("own", "norm")), gradient, labels, 1)
        assert found["own"] == pytest.approx(expected)
