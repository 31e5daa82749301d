"""Defenses at the strategy and at the label party: the same, and who trusts whom."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from records_cases import series_of
from torch import Tensor
from vertical_cases import rich_app, simple_parties

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.grids.in_process import InProcessGrid, in_process
from flower_vfl.protocol.messages import Verb, read
from flower_vfl.randomness import Noise, draw_secret
from flower_vfl.strategies import (
    DEFENSES,
    Compose,
    Defense,
    Iso,
    NoDefense,
    PerParty,
    Scheduled,
    VerticalResult,
    VerticalStrategy,
    build_defense,
)
from flower_vfl.transform import AUC_BOUND, Batch, Defender, GradientTransform

SEED = 12345


class Relay(InProcessGrid):
    """A grid that keeps what the label party replies with."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replies: list[Any] = []
        self.terms: list[dict[str, Any]] = []

    def send_and_receive(self, messages: Iterable[Any], **options: Any) -> Any:
        sent = list(messages)
        replies = list(super().send_and_receive(sent, **options))
        if sent[0].metadata.message_type == Verb.CONFIGURE:
            self.terms += [read(message).config for message in sent]
        if sent[0].metadata.message_type == Verb.TRAIN_STEP:
            self.replies += [read(reply) for reply in replies]
        return replies


def run(
    transforms: Any, placement: Any = "strategy", epochs: int = 2, **options: Any
) -> tuple[list[Tensor], VerticalResult]:
    """Train two linear parties; return all weights and the result."""
    given = {"trust_server": True, "build_defense": build_defense}
    label, passive = simple_parties(**{**given, **options})
    parties = [label, *passive]
    strategy = VerticalStrategy(
        batch_size=16,
        progress=False,
        defense=Defense(transforms, at=placement, noise_seed=SEED),
    )
    with in_process(parties) as grid:
        result = strategy.start(grid, num_rounds=epochs)
    modules = [label.objective, *(party.model for party in passive)]
    return [p.detach().clone() for m in modules for p in m.parameters()], result


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", DEFENSES)
def test_both_placements_train_bit_equal(name: str) -> None:
    here, at_strategy = run(name)
    there, at_label = run(name, "label")
    assert equal(here, there)
    assert series_of(at_label) == series_of(at_strategy)
    vanilla, _ = run("")
    changes_nothing = ("none", "geno")  # geno withholds only what is out of the order
    assert equal(here, vanilla) == (name in changes_nothing)


@pytest.mark.parametrize(
    "text",
    [
        "passive-1=iso:t=9; *=max-norm",
        "@1 none @2 iso",
        "iso | gc:keep=0.5",
        "passive-2=@2 marvell:s=1 | ng; *=sgsub",
    ],
)
def test_combinations_are_bit_equal_too(text: str) -> None:
    assert equal(run(text)[0], run(text, "label")[0])


def test_a_transform_object_is_told_to_the_label_party() -> None:
    transforms = [PerParty({"passive-1": Compose([Iso(2.0), NoDefense()])}, Iso(0.5))]
    assert equal(run(transforms)[0], run(transforms, "label")[0])
    assert equal(run(Iso(2.0))[0], run([Iso(2.0)])[0])


def test_a_schedule_begins_with_its_epoch() -> None:
    vanilla, _ = run("", epochs=1)
    assert equal(run("@2 iso", epochs=1)[0], vanilla)
    assert not equal(run("@2 iso")[0], run("")[0])


def test_the_label_party_itself_may_insist_on_a_defense() -> None:
    """What leaves is defended, so that a strategy of its own needs no trust."""
    options = {"defense": Iso(2.0), "trust_server": False}
    vanilla, _ = run("")
    assert not equal(run("", **options)[0], vanilla)
    run(Iso(1.0), **options)


@pytest.mark.parametrize("text", ["iso", "marvell:s=4"])
def test_an_untrusting_label_party_defends_for_itself(text: str) -> None:
    """And draws its own noise: a server that chose the seed could subtract it."""
    weights = [run(text, "label", trust_server=False)[0] for _ in range(2)]
    assert not equal(*weights)
    assert not equal(weights[0], run(text, "label")[0])


@pytest.mark.parametrize("text", ["iso", "marvell:s=4"])
def test_nothing_raw_leaves_an_untrusting_label_party(text: str) -> None:
    with pytest.raises(PartyError) as caught:
        run(text, trust_server=False)
    assert caught.value.party == "label" and caught.value.step is None
    for words in ("raw gradients", "trust-server=true", 'at="label"'):
        assert words in str(caught.value)


def relayed(placement: Any, **options: Any) -> Relay:
    nodes = [{"partition-id": i, "num-partitions": 3} for i in range(3)]
    app = rich_app(**options)
    grid = Relay(app, nodes)
    strategy = VerticalStrategy(
        batch_size=16, progress=False, defense=Defense("marvell:s=4", at=placement)
    )
    strategy.start(grid, num_rounds=1)
    grid.close()
    return grid


def test_labels_stay_where_the_defense_is() -> None:
    there = relayed("label", build_defense=build_defense, trust_server=False)
    assert all(reply.labels is None for reply in there.replies)
    here = relayed("strategy")
    assert all(reply.labels is not None for reply in here.replies)


def test_passive_parties_are_not_told_about_the_defense() -> None:
    grid = relayed("label", build_defense=build_defense)
    told = [terms["defense"] for terms in grid.terms]
    assert sorted(told) == ["", "", "marvell"]


def test_a_label_party_that_cannot_build_one_says_so() -> None:
    with pytest.raises(
        PartyError, match=r"LabelParty\(build_defense=.*build_defense\)"
    ):
        run("iso", "label", build_defense=None)

    def refuse(text: str) -> GradientTransform:
        raise ConfigError(f"only marvell is allowed here, not {text}")

    with pytest.raises(PartyError, match="only marvell is allowed here, not iso"):
        run("iso", "label", build_defense=refuse)


def test_an_unknown_placement() -> None:
    with pytest.raises(ConfigError, match="unknown placement 'server'"):
        VerticalStrategy(defense=Defense(at="server"))  # type: ignore[arg-type]


def test_noise_is_secret_unless_a_seed_is_given() -> None:
    label, passive = simple_parties(trust_server=True)
    strategy = VerticalStrategy(seed=0, defense="iso")
    assert strategy.defense.noise_seed is None
    with in_process([label, *passive]) as grid:
        seeds = {strategy.connect(grid).defender.seed for _ in range(3)}
    assert len(seeds) == 3 and min(seeds) > 2**64
    assert len({draw_secret() for _ in range(100)}) == 100


def test_noise_depends_on_all_bits_of_its_seed() -> None:
    def numbers(*parts: int | str) -> Tensor:
        return Noise(*parts).normal((64,))

    first = numbers(5, "passive-1", 1)
    assert torch.equal(first, numbers(5, "passive-1", 1))
    others = [numbers(5 + 2**32, "passive-1", 1), numbers(5 + 2**100, "passive-1", 1)]
    others += [numbers(5, "passive-2", 1), numbers(5, "passive-1", 2)]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 0.4
    many = Noise(1).normal((200_000,))
    assert abs(float(many.mean())) < 0.01 and abs(float(many.std()) - 1) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([many[:-1], many[1:]]))[0, 1])) < 0.01


class Bounded(NoDefense):
    """Reports a bound, as Marvell does."""

    requires_labels = True

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        batch.metrics[AUC_BOUND] = 0.6
        return gradient


class Nosy(NoDefense):
    """Sees labels and promises nothing."""

    requires_labels = True


@pytest.mark.parametrize(
    ("transforms", "bounded"),
    [
        ([Bounded()], True),
        ([Bounded(), Iso()], True),  # what sees no labels adds no news of them
        ([Iso(), Bounded(), NoDefense()], True),
        ([Bounded(), Nosy()], False),
        ([Nosy(), Bounded()], True),
        ([Compose([Bounded(), Nosy()])], False),
        ([Compose([Bounded()]), Compose([Iso()])], True),
        ([Scheduled({1: Bounded()}), PerParty({}, Iso())], True),
    ],
)
def test_a_bound_outlives_what_sees_no_labels(
    transforms: list[GradientTransform], bounded: bool
) -> None:
    defender = Defender(transforms, seed=0)
    labels = torch.tensor([0.0, 1.0])
    _, measured = defender.defend({"p": torch.ones(2, 3)}, labels, 1, 1)
    assert (AUC_BOUND in [each.metric for each in measured]) == bounded


def test_what_a_defense_reports_is_kept_by_step() -> None:
    _, result = run("marvell:s=4")
    for party in ("passive-1", "passive-2"):
        series = series_of(result)[f"{AUC_BOUND}/{party}"]
        assert series["steps"] == [1, 2, 3, 4, 5, 6]
        assert all(0.5 < value <= 1.0 for value in series["values"])
        epoch = result.train_metrics_clientapp[2][f"{AUC_BOUND}/{party}"]
        assert min(series["values"][3:]) <= float(epoch) <= max(series["values"][3:])  # type: ignore[arg-type]


def test_a_withheld_gradient_leaves_the_party_as_it_is() -> None:
    class Withhold(NoDefense):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
            batch.metrics["withheld"] = float(batch.party == "passive-1")
            return None if batch.party == "passive-1" else gradient

    before = [
        p.clone() for party in simple_parties()[1] for p in party.model.parameters()
    ]
    for options in ({"transforms": [Withhold()]}, {"transforms": ""}):
        own = Withhold() if options["transforms"] == "" else None
        weights, result = run(options["transforms"], defense=own)
        after = weights[-4:]
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert moved == [False, False, True, True]
        assert set(series_of(result)["withheld/passive-1"]["values"]) == {1.0}
