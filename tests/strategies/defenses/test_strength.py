"""Defenses that can be made stronger while they work, alone and inside of others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor
from flower_vfl.strategies import (
    DEFENSES,
    Compose,
    Iso,
    Marvell,
    MaxNorm,
    NoDefense,
    NoisyGradients,
    PerParty,
    Scheduled,
    build_defense,
    defense_spec,
)
from flower_vfl.transform import (
    AUC_BOUND,
    Batch,
    Defender,
    GradientTransform,
    Strengthened,
)

ROWS = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
LABELS = (torch.arange(400) % 3 == 0).float()
CLASSED = ROWS + 2.0 * LABELS[:, None]


def apply(transform: GradientTransform, rows: Tensor = ROWS, **where: Any) -> Tensor:
    batch = Batch(**{"party": "a", "step": 1, "seed": 0, "labels": LABELS, **where})
    found = transform(rows, batch)
    assert found is not None
    return found


def power(transform: GradientTransform, **where: Any) -> float:
    """Return the mean square of what a transform adds to a row."""
    added = apply(transform, CLASSED, **where) - CLASSED
    return float(added.double().square().sum(dim=1).mean())


def test_who_has_a_strength() -> None:
    strong = {n for n in DEFENSES if isinstance(build_defense(n), Strengthened)}
    assert {"iso", "marvell"} <= strong
    assert strong & {"none", "max-norm", "gc", "geno", "sgsub"} == set()
    for name in strong:
        assert build_defense(name).state_dict()["raised"] == 1.0


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (lambda: Iso(0.5), lambda: Iso(2.0)),
        (lambda: NoisyGradients(0.01), lambda: NoisyGradients(0.04)),
        (lambda: Marvell(s=1.0), lambda: Marvell(s=4.0)),
        (lambda: Marvell(auc=0.9), lambda: Marvell(auc=0.6)),
    ],
)
def test_four_times_as_strong_is_what_it_says(make: Any, same: Any) -> None:
    raised = make()
    plain = apply(make(), CLASSED)
    told = raised.strengthen(2.0)
    assert told == f"{type(raised).__name__} is now 2 times as strong as its setting"
    assert "is now 4 times" in raised.strengthen(2.0)
    assert torch.equal(apply(raised, CLASSED), apply(same(), CLASSED))
    assert not torch.equal(apply(raised, CLASSED), plain)
    assert torch.equal(apply(make(), CLASSED), plain)  # others stay as they were


def test_more_power_and_a_smaller_bound() -> None:
    iso, marvell = Iso(1.0), Marvell(s=1.0)
    largest = float(CLASSED.norm(dim=1).max()) ** 2
    assert power(iso) == pytest.approx(largest, rel=0.1)
    iso.strengthen(9.0)
    assert power(iso) == pytest.approx(9 * largest, rel=0.1)
    bounds = []
    for _ in range(3):
        batch = Batch("a", 1, 0, LABELS)
        marvell(CLASSED, batch)
        bounds.append(batch.metrics[AUC_BOUND])
        marvell.strengthen(4.0)
    assert 0.5 < bounds[2] < bounds[1] < bounds[0]


def test_a_bound_that_is_asked_for_never_reaches_one_half() -> None:
    marvell = Marvell(auc=0.6)
    for _ in range(12):
        marvell.strengthen(2.0)
    batch = Batch("a", 1, 0, LABELS)
    found = marvell(CLASSED, batch)
    assert found is not None and bool(found.isfinite().all())
    assert 0.5 < batch.metrics[AUC_BOUND] < 0.5001


@pytest.mark.parametrize("make", [Iso, NoisyGradients, Marvell])
def test_the_state_is_what_it_was_raised_by(make: Any) -> None:
    old = make()
    old.strengthen(3.0)
    new = make()
    new.load_state_dict(old.state_dict())
    assert new.raised == 3.0
    assert torch.equal(apply(new, CLASSED), apply(old, CLASSED))
    with pytest.raises(ConfigError, match="is not the state of"):
        make().load_state_dict({"calls": 3})


def test_a_resumed_run_may_be_set_to_another_strength() -> None:
    old = Iso(1.0)
    old.strengthen(3.0)
    new = Iso(2.0)
    new.load_state_dict(old.state_dict())
    assert torch.equal(apply(new), apply(Iso(6.0)))


def test_the_config_string_is_that_of_the_setting() -> None:
    """What was raised is state, which travels with checkpoints."""
    iso = Iso(2.0)
    before = defense_spec(iso)
    iso.strengthen(3.0)
    assert defense_spec(iso) == before


def strengths(parts: list[Any]) -> list[float]:
    return [part.raised for part in parts]


def test_every_part_of_a_chain() -> None:
    first, last = Iso(), NoisyGradients()
    told = Compose([first, MaxNorm(), last]).strengthen(2.0)
    assert strengths([first, last]) == [2.0, 2.0]
    assert told == (
        "Iso is now 2 times as strong as its setting, "
        "NoisyGradients is now 2 times as strong as its setting"
    )


def test_every_partys_defense_and_every_epochs() -> None:
    own, others, late = Iso(), Iso(), Marvell()
    PerParty({"a": own}, Scheduled({1: others, 5: late})).strengthen(3.0)
    assert strengths([own, others, late]) == [3.0, 3.0, 3.0]


def test_one_that_is_used_twice_is_raised_once() -> None:
    shared = Iso()
    PerParty({"a": shared, "b": shared}, shared).strengthen(2.0)
    assert shared.raised == 2.0
    shared = Iso()
    Compose([shared, shared]).strengthen(2.0)
    assert shared.raised == 2.0
    shared = Iso(1e-9)
    settings = Leakage(("mean",), limit=0.6, action="raise", window=1, factor=2.0)
    defender = Defender([shared, shared], 0, LeakageMonitor(settings, "binary"))
    defender.defend({"a": CLASSED}, LABELS, 1, 1)
    assert shared.raised == 2.0


@pytest.mark.parametrize(
    "transform",
    [Compose([MaxNorm()]), PerParty({"a": NoDefense()}), Scheduled({2: MaxNorm()})],
)
def test_nothing_to_raise(transform: Any) -> None:
    assert transform.strengthen(2.0) == ""
    settings = Leakage(limit=0.6, action="raise")
    with pytest.raises(ConfigError, match="needs a defense that has a strength"):
        Defender([transform], 0, LeakageMonitor(settings, "binary"))
    Defender([transform], 0, LeakageMonitor(Leakage(limit=0.6), "binary"))


@pytest.mark.parametrize(
    "text",
    ["iso | max-norm", "a=marvell:s=2; *=ng", "@1 none @2 iso:t=3", "b=@3 iso; *=gc"],
)
def test_strengths_inside_of_others_survive(text: str) -> None:
    old, new = build_defense(text), build_defense(text)
    assert isinstance(old, Strengthened)
    old.strengthen(5.0)
    new.load_state_dict(old.state_dict())
    assert new.state_dict() == old.state_dict() != build_defense(text).state_dict()
    for party in "ab":
        for epoch in (1, 2, 3):
            where = {"party": party, "epoch": epoch, "rows": CLASSED}
            assert torch.equal(apply(new, **where), apply(old, **where))


def test_a_defender_raises_and_keeps_it() -> None:
    def make() -> Defender:
        settings = Leakage(("mean",), limit=0.7, action="raise", window=2, factor=10.0)
        return Defender([Iso(0.001)], 1, LeakageMonitor(settings, "binary"))

    one, other = make(), make()
    for step in (1, 2, 3):
        one.defend({"a": CLASSED}, LABELS, step, 1)
    assert one.state_dict()["transforms"] == [{"raised": 10.0}]
    other.load_state_dict(one.state_dict())
    for step in (4, 5, 6):
        found, expected = (
            each.defend({"a": CLASSED}, LABELS, step, 1) for each in (other, one)
        )
        assert found[1] == expected[1]
        assert torch.equal(found[0]["a"], expected[0]["a"])


def test_a_warning_raises_nothing() -> None:
    iso = Iso(1e-6)
    settings = Leakage(("mean",), limit=0.6, window=1)
    defender = Defender([iso], 1, LeakageMonitor(settings, "binary"))
    _, measured = defender.defend({"a": CLASSED}, LABELS, 1, 1)
    assert "leak_limit" in [each.metric for each in measured]
    assert iso.raised == 1.0


def test_strength_without_end_stays_finite() -> None:
    for transform in (Iso(), NoisyGradients(), Marvell()):
        for _ in range(300):
            transform.strengthen(10.0)
        assert math.isfinite(transform.raised)
        assert bool(apply(transform, CLASSED).isfinite().all())
