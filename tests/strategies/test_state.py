"""What a run states about its labels, epoch by epoch and at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from leak_cases import run
from resume_cases import EPOCHS, PowerCutError, cut_at, rich_grid, strategy
from vertical_cases import simple_parties

from flower_vfl import LabelPrivacy, PartyError
from flower_vfl.privacy.accountant import Guarantee, composed_auc
from flower_vfl.protocol.messages import Verb
from flower_vfl.strategies import (
    Compose,
    Geno,
    Marvell,
    PerParty,
    Scheduled,
    VerticalResult,
    build_defense,
)

BOUND = "run_auc_bound"
MARVELL = "marvell:auc=0.6"


def bounds(result: VerticalResult) -> list[Any]:
    return [metrics.get(BOUND) for metrics in result.train_metrics_clientapp.values()]


@pytest.mark.parametrize("defense", ["", "iso:t=2", "geno"])
def test_without_a_bound_nothing_is_stated(defense: str) -> None:
    result = run(None, defense)
    assert bounds(result) == [None, None]
    assert Guarantee.from_dict(result.label_privacy) == Guarantee("none")
    assert result.label_privacy["auc_bound"] == 1.0


@pytest.mark.parametrize("place", ["strategy", "label"])
def test_marvell_adds_up_the_worst_step_of_each_epoch(place: str) -> None:
    result = run(None, "passive-1=marvell:s=64; *=marvell:s=32", place, epochs=3)
    found = result.table().query("metric == 'sum_kl'")
    epochs = (found["step"] - 1) // 3
    largest = found.groupby(["party", epochs])["value"].max()
    sums = largest.groupby("party").cumsum().groupby("step").max()
    assert bounds(result) == pytest.approx([composed_auc([each]) for each in sums])
    assert 0.5 < bounds(result)[0] < bounds(result)[1] < bounds(result)[2] < 1.0
    assert result.label_privacy["mechanism"] == "marvell"
    assert result.label_privacy["auc_bound"] == bounds(result)[2]
    step = result.table().query("metric == 'auc_bound'")["value"].max()
    assert bounds(result)[2] > step


def test_a_bound_that_is_used_up_is_no_bound() -> None:
    result = run(None, "marvell:s=1", epochs=5)
    assert bounds(result)[-1] == 1.0
    assert result.label_privacy["mechanism"] == "none"
    [other] = Guarantee.from_dict(result.label_privacy).others
    assert (other.mechanism, other.auc_bound) == ("marvell", 1.0)


@pytest.mark.parametrize(
    "defense",
    [
        PerParty({"passive-1": Marvell(auc=0.6)}),
        Scheduled({2: Marvell(auc=0.6)}),
        Scheduled({1: Marvell(auc=0.6), 2: Geno()}),
        Compose([Marvell(auc=0.6), Marvell(s=0.0)]),
    ],
    ids=["a party without", "epochs before", "epochs after", "undone"],
)
def test_one_gradient_without_a_bound_is_enough(defense: Any) -> None:
    result = run(None, defense)
    assert bounds(result)[-1] == 1.0
    assert result.label_privacy["auc_bound"] == 1.0
    assert result.label_privacy["mechanism"] == "none"


def test_what_uses_labels_after_marvell_drops_its_bound() -> None:
    class Signed(Marvell):
        def perturb(self, rows: Any, batch: Any) -> Any:
            return rows * (2.0 * batch.labels.reshape(-1, 1) - 1.0)

    result = run(None, Compose([Marvell(auc=0.6), Signed()]))
    assert result.table().query("metric == 'sum_kl'").shape[0]  # still reported
    assert result.label_privacy["auc_bound"] == 1.0


def test_over_run_keeps_its_word_and_ends_with_it() -> None:
    spec = "marvell:auc=0.7,over=run,epochs=3"
    result = run(None, spec, epochs=3)
    assert result.label_privacy["auc_bound"] == pytest.approx(0.7, abs=1e-6)
    with pytest.raises(PartyError, match=r"step 10: .*for 3 epochs"):
        run(None, spec, epochs=4)


def test_private_labels_have_the_same_bound_in_every_epoch() -> None:
    privacy = LabelPrivacy(auc=0.65, loss="plain")
    result = run(None, MARVELL, "label", epochs=3, label_privacy=privacy)
    assert bounds(result) == pytest.approx([0.65] * 3)
    stated = Guarantee.from_dict(result.label_privacy)
    assert stated.mechanism == "randomised-response"
    assert stated.epsilon == pytest.approx(0.619, abs=1e-3)
    [marvell] = stated.others
    assert marvell.mechanism == "marvell"
    assert 0.6 < marvell.auc_bound < 1.0


def test_a_malformed_statement_names_the_label_party() -> None:
    label, passive = simple_parties()
    describe = label.describe

    def lying(key: bytes) -> Any:
        told = describe(key)
        object.__setattr__(told, "privacy", '{"mechanism": 1}')
        return told

    label.describe = lying  # type: ignore[method-assign]
    with pytest.raises(PartyError, match=r"party 'label'.*label privacy"):
        run(None, parties=[label, *passive])


def test_trackers_get_it() -> None:
    told: dict[int, Mapping[str, float]] = {}

    class Tracker:
        def begin(self, settings: Any, step: int) -> None: ...
        def step(self, step: int, metrics: Any) -> None: ...
        def end(self, reason: str) -> None: ...
        def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
            told[epoch] = {**told.get(epoch, {}), **metrics}

    result = run(None, MARVELL, settings={"trackers": [Tracker()]})
    assert [metrics[BOUND] for metrics in told.values()] == bounds(result)


@pytest.mark.parametrize("count", [5, 7], ids=["within an epoch", "after one"])
def test_a_resumed_run_states_the_same(tmp_path: Path, count: int) -> None:
    def start(name: str, cut: bool = False, resume: bool = False) -> VerticalResult:
        folder = tmp_path / name
        plan = strategy(folder, 1, defense=build_defense("marvell:s=64"))
        with rich_grid(folder) as grid:
            used = cut_at(grid, Verb.TRAIN_STEP, count) if cut else grid
            return plan.start(used, num_rounds=EPOCHS, resume=resume)

    whole = start("whole")
    with pytest.raises(PowerCutError):
        start("cut", cut=True)
    again = start("cut", resume=True)
    assert again.label_privacy == whole.label_privacy
    assert bounds(again) == bounds(whole)
    assert whole.label_privacy["mechanism"] == "marvell"
