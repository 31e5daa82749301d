"""Defenses made of defenses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.strategies import Compose, Iso, NoDefense, PerParty, Scheduled
from flower_vfl.strategies.defenses.geno import Geno
from flower_vfl.transform import AUC_BOUND, Batch, GradientTransform

ROWS = torch.arange(6.0).reshape(3, 2)


class Affine:
    """Multiplies and adds; keeps count of its calls as its state."""

    def __init__(
        self,
        factor: float = 1.0,
        summand: float = 0.0,
        requires_labels: bool = False,
        bound: float | None = None,
    ) -> None:
        self.factor, self.summand, self.bound = factor, summand, bound
        self.requires_labels = requires_labels
        self.calls = 0

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        self.calls += 1
        if self.bound is not None:
            batch.metrics[AUC_BOUND] = self.bound
        return gradient * self.factor + self.summand

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Withhold(Affine):
    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        super().__call__(gradient, batch)
        return None


def batch(party: str = "passive-1", epoch: int = 1) -> Batch:
    return Batch(party, 1, 0, epoch=epoch)


def apply(transform: GradientTransform, **where: Any) -> Tensor | None:
    return transform(ROWS, batch(**where))


def test_all_are_gradient_transforms() -> None:
    for transform in (Compose([]), PerParty({}), Scheduled({})):
        assert isinstance(transform, GradientTransform)
        found = apply(transform)
        assert found is not None and found.equal(ROWS)
        assert not transform.requires_labels


def test_in_order() -> None:
    found = apply(Compose([Affine(2.0), Affine(summand=1.0), Affine(10.0)]))
    assert found is not None and found.equal((ROWS * 2 + 1) * 10)
    nested = apply(Compose([Compose([Affine(2.0)]), Compose([Affine(summand=1.0)])]))
    assert nested is not None and nested.equal(ROWS * 2 + 1)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (Tensor.double, r"torch.float64 \(3, 2\)"),
        (Tensor.ravel, r"torch.float32 \(6,\)"),
    ],
)
def test_another_dtype_or_shape_is_refused(
    change: Callable[[Tensor], Tensor], found: str
) -> None:
    class Changed(Affine):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            return change(gradient)

    wanted = r"and not torch.float32 \(3, 2\)"
    with pytest.raises(PartyError, match=f"what Changed made.* {found} {wanted}"):
        apply(Compose([Affine(), Changed()]))


def test_what_is_withheld_stays_withheld() -> None:
    first, last = Affine(), Affine()
    assert apply(Compose([first, Withhold(), last])) is None
    assert (first.calls, last.calls) == (1, 0)


def test_geno_in_a_chain_reports_once() -> None:
    where = batch()
    assert Compose([Geno(lambda_=1.0), Geno(lambda_=100.0)])(ROWS, where) is None
    assert where.metrics == {"withheld": 1.0}
    where = batch()
    assert Compose([Geno(lambda_=100.0), Iso()])(ROWS, where) is not None
    assert where.metrics == {"withheld": 0.0}


def test_a_bound_outlives_what_sees_no_labels() -> None:
    guarantee = Affine(requires_labels=True, bound=0.6)
    for later, expected in (
        ([], 0.6),
        ([Affine(2.0), Iso()], 0.6),
        ([Affine(requires_labels=True)], None),
        ([Affine(requires_labels=True, bound=0.7)], 0.7),
        ([Compose([Affine(requires_labels=True)])], None),
        ([Compose([Affine()])], 0.6),
    ):
        where = batch()
        Compose([guarantee, *later])(ROWS, where)
        assert where.metrics.get(AUC_BOUND) == expected


def test_parts_of_a_chain_draw_noise_of_their_own() -> None:
    """Twice the same noise has four times its power and can be taken off by halves."""
    rows = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    rows[0] *= 100  # so that both have nearly the same scale
    once = Iso(0.01)(rows, batch())
    twice = Compose([Iso(0.01), Iso(0.01)])(rows, batch())
    assert once is not None and twice is not None
    ratio = (twice - rows).square().mean() / (once - rows).square().mean()
    assert float(ratio) == pytest.approx(2.0, rel=0.1)


def test_per_party() -> None:
    transform = PerParty({"passive-2": Affine(2.0)}, default=Affine(3.0))
    for party, factor in (("passive-1", 3.0), ("passive-2", 2.0), ("*", 3.0)):
        found = apply(transform, party=party)
        assert found is not None and found.equal(ROWS * factor)
    found = apply(PerParty({"passive-2": Affine(2.0)}))
    assert found is not None and found.equal(ROWS)


def test_by_epoch() -> None:
    transform = Scheduled({5: Affine(5.0), 2: Affine(2.0)})
    for epoch, factor in ((1, 1.0), (2, 2.0), (4, 2.0), (5, 5.0), (90, 5.0)):
        found = apply(transform, epoch=epoch)
        assert found is not None and found.equal(ROWS * factor)


def test_labels_are_required_if_any_part_requires_them() -> None:
    needs, plain = Affine(requires_labels=True), Affine()
    assert Compose([plain, needs]).requires_labels
    assert PerParty({"a": plain}, needs).requires_labels
    assert Scheduled({1: plain, 2: needs}).requires_labels
    assert not Scheduled({1: plain}).requires_labels


@pytest.mark.parametrize(
    "make",
    [
        lambda parts: Compose(parts),
        lambda parts: PerParty({"passive-1": parts[0]}, parts[1]),
        lambda parts: Scheduled({1: parts[0], 3: parts[1]}),
    ],
)
def test_every_part_keeps_its_state(make: Any) -> None:
    parts = [Affine(), Affine()]
    old = make(parts)
    parts[0].calls, parts[1].calls = 4, 7
    again = [Affine(), Affine()]
    make(again).load_state_dict(old.state_dict())
    assert [part.calls for part in again] == [4, 7]
    with pytest.raises(ConfigError, match="saved state is of the defenses"):
        Compose([Affine(), Affine(), Affine()]).load_state_dict(old.state_dict())


def test_a_history_survives_inside_of_others() -> None:
    def make() -> tuple[Geno, GradientTransform]:
        geno = Geno(warmup=2)
        return geno, Compose([PerParty({"a": geno}), NoDefense()])

    _, old = make()
    for step in range(1, 6):
        old(ROWS * step, Batch("a", step, 0))
    inner, new = make()
    new.load_state_dict(old.state_dict())
    assert len(inner.history["a"]) == 5
    assert new.state_dict() == old.state_dict()


def test_schedules_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="count from 1"):
        Scheduled({0: Affine()})
    same = Affine()
    with pytest.raises(ConfigError, match="its own transform"):
        Scheduled({1: same, 2: same})
