"""Passive parties that compute as one: equal to one by one, or on their own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_vfl import CrossEntropy, LabelParty, Leakage, PassiveParty, in_process
from flower_vfl.errors import PartyError
from flower_vfl.grids.stacked import StackedGrid
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.parties.stacked import stack_parties
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.strategies import Checkpoints, Compression, Defense, VerticalStrategy

ROWS, COLUMNS, WIDTH, PARTIES = 90, 3, 2, 9
ADAM = partial(torch.optim.Adam, lr=0.02, weight_decay=0.01)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
Build = Callable[[], nn.Module]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 5), nn.Tanh(), nn.Linear(5, WIDTH))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 5), nn.BatchNorm1d(5), nn.Linear(5, WIDTH))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.Dropout(0.3))


class Factor(float):
    """A number that is not printed."""

    def __repr__(self) -> str:
        return "a factor"


class Scaled(nn.Module):
    """Differs from others of its kind in a number, and perhaps only for some rows."""

    def __init__(self, scale: float, limit: float = 9.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(COLUMNS, WIDTH), Factor(scale)
        self.limit = limit

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.linear(rows.clamp(max=self.limit)) * self.scale
        return found


def parties(
    builds: list[Build], optimizer: Any = ADAM, aggregation: str = "concat"
) -> tuple[LabelParty, list[PassiveParty]]:
    torch.manual_seed(5)
    features = [torch.randn(ROWS, COLUMNS) for _ in builds]
    labels = (sum(features)[:, 0] > 0).long()  # type: ignore[index]
    width = WIDTH * len(builds) if aggregation == "concat" else WIDTH
    objective = CrossEntropy(nn.Linear(width, 1))
    label = LabelParty(
        labels, objective, aggregation=aggregation, optimizer=optimizer, device="cpu"
    )
    passive = [
        PassiveParty(own, build(), optimizer=optimizer, device="cpu")
        for own, build in zip(features, builds, strict=True)
    ]
    return label, passive


def configured(builds: list[Build], optimizer: Any = ADAM) -> list[PassiveParty]:
    passive = parties(builds, optimizer)[1]
    for number, party in enumerate(passive):
        party.name = f"bank-{number}"
        party.configure(TrainingConfig(seed=1, batch_size=16))
    return passive


def train(
    builds: list[Build],
    stacked: bool,
    optimizer: Any = ADAM,
    aggregation: str = "concat",
    epochs: int = 2,
    **settings: Any,
) -> tuple[Any, LabelParty, list[PassiveParty], list[tuple[str, ...]]]:
    label, passive = parties(builds, optimizer, aggregation)
    label.trust_server = True
    settings = {"valid_fraction": 0.2, "batch_size": 16, **settings}
    strategy = VerticalStrategy(progress=False, **settings)
    groups = []
    with in_process([label, *passive], stacked=stacked) as grid:
        result = strategy.start(grid, num_rounds=epochs)
        if isinstance(grid, StackedGrid):
            groups = [group.members for group in grid.groups]
    return result, label, passive, groups


def assert_equal(one: Any, other: Any) -> None:
    for mine, theirs in zip(one[2], other[2], strict=True):
        own, same = mine.state_dict(), theirs.state_dict()
        assert own["step"] == same["step"] and own["waiting"] == same["waiting"]
        for key, value in own["model"].items():
            torch.testing.assert_close(value, same["model"][key], rtol=1e-5, atol=1e-5)
        states = [each["optimizer"][0]["state"] for each in (own, same)]
        torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own["random"], same["random"], rtol=0, atol=0)
    for epoch, metrics in one[0].evaluations.items():
        for split, values in metrics.items():
            assert other[0].evaluations[epoch][split] == pytest.approx(values, abs=1e-5)
    assert [m.name for m in one[0].records] == [m.name for m in other[0].records]
    values = [[m.value for m in each[0].records] for each in (one, other)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)


@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM], ids=["adam", "momentum"])
@pytest.mark.parametrize("build", [plain, normalised])
def test_stacked_parties_equal_parties_one_by_one(build: Build, optimizer: Any) -> None:
    given = [build] * PARTIES
    leakage = Leakage(coalitions=("all",))  # norm, cosine, mean and median
    runs = [train(given, s, optimizer, leakage=leakage) for s in (False, True)]
    assert runs[1][3] == [tuple(f"passive-{i + 1}" for i in range(PARTIES))]
    assert len({m.attack for m in runs[0][0].records}) == 4
    assert_equal(*runs)


def test_an_optimizer_of_some_weights() -> None:
    """Stacked biases have the dimensions of single matrices."""

    def matrices(weights: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([w for w in weights if w.dim() > 1], lr=0.05)

    runs = [train([plain] * 3, s, matrices) for s in (False, True)]
    assert len(runs[1][3]) == 1
    assert_equal(*runs)


@pytest.mark.parametrize("aggregation", ["mean", "max"])
def test_any_aggregation(aggregation: str) -> None:
    runs = [train([plain] * 3, s, aggregation=aggregation) for s in (False, True)]
    assert_equal(*runs)


def test_a_defense_sees_the_gradient_of_each_party() -> None:
    defense = Defense("gradient-compression:keep=0.5")  # draws nothing
    runs = [train([plain] * 3, s, defense=defense) for s in (False, True)]
    assert_equal(*runs)


def test_parties_that_cannot_be_stacked_go_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    builds = [plain, plain, dropping, dropping, normalised, *[partial(Scaled, 1.0)] * 2]
    builds.append(partial(Scaled, 2.0))
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="flwr"):
            runs = [train(builds, s) for s in (False, True)]
    finally:
        logger.removeHandler(caplog.handler)
    assert runs[1][3] == [("passive-1", "passive-2"), ("passive-6", "passive-7")]
    assert "stacked groups of parties: 2, 2; one by one: 4" in caplog.text
    assert (
        "passive-3 and 1 others (torch cannot stack its model: vmap: called random"
        in (caplog.text)
    )
    assert "passive-8 (its model differs from others" in caplog.text
    assert_equal(*runs)


def test_a_difference_that_the_first_rows_do_not_show() -> None:
    passive = configured([partial(Scaled, 1.0, limit) for limit in (3.0, 4.0, 3.0)])
    for party in passive:
        party.features[0][:2].clamp_(max=1.0)
    (group,), alone = stack_parties(passive)
    assert [member.name for member in group.members] == ["bank-0", "bank-2"]
    assert "no other party has its model" in alone["bank-1"]


def test_a_party_that_cannot_be_stacked_keeps_weights_of_its_own() -> None:
    """Its checkpoint would have the weights of all parties."""
    passive = configured([dropping] * 3)
    _, alone = stack_parties(passive)
    assert len(alone) == 3
    for party in passive:
        for weight in party.model.parameters():
            assert weight.untyped_storage().nbytes() == weight.nbytes


class Quiet(PassiveParty):
    """A party of the user's own class."""


def hooked(party: PassiveParty) -> None:
    party.model.register_forward_hook(lambda *given: None)


def clipped(party: PassiveParty) -> None:
    next(party.model.parameters()).register_hook(lambda found: found.clamp(-1e-3, 1e-3))


def other_optimizer(party: PassiveParty) -> None:
    party.optimizer = torch.optim.LBFGS(party.model.parameters())


def hooked_optimizer(party: PassiveParty) -> None:
    party.optimizer = torch.optim.SGD(party.model.parameters(), lr=0.1)
    party.optimizer.register_step_post_hook(lambda *given: None)


def aligned(party: PassiveParty) -> None:
    party.place(RowIndex(torch.arange(ROWS)))


def own_class(party: PassiveParty) -> None:
    party.__class__ = Quiet


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "its model has hooks"),
        (clipped, "its model has hooks"),
        (other_optimizer, "its optimizer is LBFGS"),
        (hooked_optimizer, "its optimizer has hooks"),
        (aligned, "its ids were aligned"),
        (own_class, "it is a Quiet"),
    ],
)
def test_what_keeps_a_party_alone(change: Any, reason: str) -> None:
    passive = configured([plain] * 3)
    change(passive[1])
    groups, alone = stack_parties(passive)
    assert [[m.name for m in group.members] for group in groups] == [
        ["bank-0", "bank-2"]
    ]
    assert [*alone] == ["bank-1"] and reason in alone["bank-1"]


@pytest.mark.parametrize(
    "setting",
    [{"pipeline": 1}, {"compression": Compression(embeddings="float16")}],
    ids=["pipeline", "compression"],
)
def test_settings_that_concern_each_party_are_not_stacked(setting: Any) -> None:
    runs = [train([plain] * 2, s, epochs=1, **setting) for s in (False, True)]
    assert runs[1][3] == []
    assert_equal(*runs)


def test_layers_are_measured_one_by_one() -> None:
    leakage = Leakage(attacks=("norm",), layers=True)
    runs = [train([plain] * 2, s, leakage=leakage, epochs=1) for s in (False, True)]
    assert any(m.layer for m in runs[0][0].records)
    assert_equal(*runs)


class Withholding:
    """Withholds the gradient of one party at one step."""

    requires_labels = False

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, gradient: Tensor, batch: Any) -> Tensor | None:
        mine = (batch.party, batch.step) == ("passive-2", self.step)
        return None if mine else gradient

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM], ids=["adam", "momentum"])
@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (2, {}),
        (5, {"valid_fraction": 0.0}),  # the last one before an evaluation in one part
        (1, {"valid_fraction": 0.0, "batch_size": 0}),  # one party has no momentum yet
    ],
    ids=["in mid-epoch", "before an evaluation", "in the first epoch"],
)
def test_a_withheld_gradient_trains_only_the_others(
    step: int, settings: Any, optimizer: Any
) -> None:
    defense, given = Defense(Withholding(step)), [normalised] * 3
    runs = [
        train(given, s, optimizer, defense=defense, epochs=3, **settings)
        for s in (False, True)
    ]
    assert_equal(*runs)


def test_the_party_whose_gradient_is_wrong_is_named() -> None:
    (group,), alone = stack_parties(configured([normalised] * 3))
    assert group.name == "bank-0 and 2 others" and not alone
    embeddings = group.forward(1, 1, 0)
    assert embeddings.shape == (3, 16, WIDTH)
    gradients = torch.ones_like(embeddings)
    gradients[1, 0, 0] = torch.inf
    with pytest.raises(PartyError, match=r"bank-1.*infinite"):
        group.backward(1, gradients)


@pytest.mark.parametrize("first", [False, True])
def test_a_run_resumes_on_the_other_engine(first: bool, tmp_path: Path) -> None:
    """Checkpoints are those of single parties."""
    given: dict[str, Any] = {"batch_size": 16, "progress": False}

    def run(stacked: bool, epochs: int, name: str, **start: Any) -> Any:
        label, passive = parties([normalised] * 3)
        kept = Checkpoints(every=2, folder=tmp_path / name / "strategy")
        strategy = VerticalStrategy(checkpoints=kept, **given)
        with in_process([label, *passive], stacked=stacked) as grid:
            for context in grid._contexts.values():
                context.node_config["state-dir"] = str(tmp_path / name / "parties")
            result = strategy.start(grid, num_rounds=epochs, **start)
        return result, label, passive

    whole = run(False, 2, "whole")
    run(first, 1, "parts")
    resumed = run(not first, 2, "parts", resume=True)
    assert_equal(whole, resumed)
    sizes = [path.stat().st_size for path in (tmp_path / "parts").rglob("step-*")]
    assert max(sizes) < 30_000  # a view would be saved with the weights of all parties
