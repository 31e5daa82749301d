"""Leak AUC as a training metric: the same everywhere, and right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from leak_cases import (
    Record,
    batches_of,
    deep_parties,
    flower_warnings,
    mean_auc,
    norm_auc,
    run,
)
from records_cases import series_of
from vertical_cases import features, labels, losses, rich_app, simple_parties

from flower_vfl import InProcessGrid, PartyError
from flower_vfl.errors import ConfigError
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.protocol.messages import Verb, to_tensor
from flower_vfl.strategies import (
    Checkpoints,
    Defense,
    PerParty,
    VerticalStrategy,
    build_defense,
)
from flower_vfl.strategies.defenses.geno import Geno

FOUR = ("norm", "cosine", "mean", "median")
STEPS = 6  # of two epochs of 48 rows


@pytest.mark.parametrize("defense", ["none", "iso:t=2", "marvell:s=4", "geno"])
def test_both_places_measure_the_same_to_the_last_bit(defense: str) -> None:
    leakage = Leakage(
        FOUR, limit=0.6, window=2, coalitions=("all",), baseline=True, layers=True
    )
    here = run(leakage, defense)
    there = run(leakage, defense, "label")
    assert series_of(here) == series_of(there)
    assert here.leakage() == there.leakage()
    names = ("mean/passive-1", "mean/passive-1+passive-2", "random_mean/passive-2")
    for name in names:
        steps = series_of(here)[f"leak_{name}"]["steps"]
        assert steps == list(range(1, STEPS + 1))


def test_a_measurement_changes_nothing() -> None:
    leakage = Leakage(coalitions=("all",), baseline=True, layers=True)
    watched, plain = run(leakage, "marvell:s=4"), run(None, "marvell:s=4")
    assert losses(watched) == losses(plain)
    bound = "auc_bound/passive-1"
    assert series_of(watched)[bound] == series_of(plain)[bound]
    assert plain.leakage() == {}


def test_without_a_defense_no_label_leaves_the_label_party() -> None:
    record = Record()
    leakage = Leakage(FOUR, limit=0.6, window=2, coalitions=("all",), baseline=True)
    result = run(leakage, record=record, trust_server=False)
    assert set(result.leakage()) >= {"passive-1", "passive-2", "passive-1+passive-2"}
    everything = record.sent + record.replies
    assert all(content.labels is None for _, content in everything)
    assert not any(content.config.get("labels") for _, content in everything)
    for reply in record.label_replies():
        assert set(reply.arrays) == {"passive-1", "passive-2"}
        assert all(isinstance(value, float) for value in reply.metrics.values())
    told = [c.config["leakage"] for verb, c in record.sent if verb == Verb.CONFIGURE]
    assert sorted(map(bool, told)) == [False, False, True]  # the label party only


def test_series_are_those_of_scikit_learn() -> None:
    """Of the gradients that the passive parties were sent, and their true labels."""
    parties, record = deep_parties(labels(200)), Record()
    result = run(Leakage(("norm", "mean")), parties=parties, record=record)
    truth = batches_of(parties, 2)
    replies = record.label_replies()
    assert len(replies) == len(truth) == 20
    for attack, auc in (("norm", norm_auc), ("mean", mean_auc)):
        for party in ("passive-1", "passive-2"):
            expected = np.array(
                [
                    auc(to_tensor(reply.arrays[party]), y)
                    for reply, y in zip(replies, truth, strict=True)
                ]
            )
            series = series_of(result)[f"leak_{attack}/{party}"]
            assert series["steps"] == list(range(1, 21))
            np.testing.assert_allclose(series["values"], expected, atol=1e-9)
            found = result.leakage()[party][attack]
            assert found["mean"] == pytest.approx(expected.mean())
            assert found["last"] == pytest.approx(expected[-1])
            assert found["max"] == pytest.approx(expected.max())
            assert found["q95"] == pytest.approx(np.quantile(expected, 0.95))
            flipped = np.maximum(expected, 1 - expected)
            assert found["flipped_mean"] == pytest.approx(flipped.mean())
            assert found["flipped_max"] == pytest.approx(flipped.max())
            assert found["batches"] == 20
            epoch = result.train_metrics_clientapp[2][f"leak_{attack}/{party}"]
            assert epoch == pytest.approx(expected[10:].mean())
    assert result.leakage()["passive-1"]["mean"]["mean"] > 0.8


@pytest.mark.parametrize("placement", ["strategy", "label"])
def test_what_is_measured_is_what_a_party_gets(placement: str) -> None:
    parties, record = deep_parties(labels(200)), Record()
    result = run(
        Leakage(("norm",)), "iso:t=1", placement, parties=parties, record=record
    )
    truth = batches_of(parties, 2)
    got = [c for _, c in record.sent if "gradient" in c.arrays]
    assert len(got) == 2 * len(truth)
    values = [
        norm_auc(to_tensor(content.arrays["gradient"]), truth[step - 1])
        for content in got
        if (step := content.gradient_step)
    ]
    series = (series_of(result)[f"leak_norm/passive-{i}"]["values"] for i in (1, 2))
    expected = [value for pair in zip(*series, strict=True) for value in pair]
    np.testing.assert_allclose(values, expected, atol=1e-9)


@pytest.mark.parametrize("defense", ["", "iso:t=3"])
def test_a_coalition_finds_what_its_members_find(defense: str) -> None:
    """And more where each got noise of its own; without, all find everything."""
    parties = deep_parties(labels(600), passive=3)
    leakage = Leakage(("cosine", "mean"), coalitions=("passive-1+passive-3", "all"))
    found = run(leakage, defense, epochs=2, parties=parties).leakage()
    if defense:
        everyone = found["passive-1+passive-2+passive-3"]["cosine"]["mean"]
        best = max(found[f"passive-{i}"]["cosine"]["mean"] for i in (1, 2, 3))
        assert best + 0.02 < everyone < 0.98
    for coalition in ("passive-1+passive-3", "passive-1+passive-2+passive-3"):
        for attack in ("cosine", "mean"):
            together = found[coalition][attack]["mean"]
            for member in coalition.split("+"):
                assert together >= found[member][attack]["mean"] - 0.02
    assert min(found[p]["mean"]["mean"] for p in found) > 0.6


def test_random_gradients_tell_nothing() -> None:
    parties = deep_parties(labels(400))
    found = run(Leakage(FOUR, baseline=True), epochs=3, parties=parties).leakage()
    for party in ("passive-1/random", "passive-2/random"):
        for attack in ("norm", "cosine"):
            assert found[party][attack]["mean"] == pytest.approx(0.5, abs=0.04)


def test_a_regression() -> None:
    values = features(1, 200)[:, 0] + 0.3 * features(2, 200)[:, 1]
    parties, record = deep_parties(values, "regression"), Record()
    leakage = Leakage(coalitions=("all",))
    result = run(leakage, parties=parties, record=record)
    assert list(result.leakage()["passive-1"]) == ["norm", "direct", "spectral"]
    for reply, y, value in zip(
        record.label_replies(),
        batches_of(parties, 2),
        series_of(result)["leak_flipped_direct/passive-2"]["values"],
        strict=True,
    ):
        gradient = to_tensor(reply.arrays["passive-2"]).double().numpy()
        rho = [abs(np.corrcoef(column, y)[0, 1]) for column in gradient.T]
        assert value == pytest.approx(np.nanmax(rho), abs=1e-6)
    together = result.leakage()["passive-1+passive-2"]["direct"]
    assert together["flipped_mean"] > 0.5


def test_several_classes() -> None:
    classes = torch.bucketize(features(1, 300)[:, 0], torch.tensor([-0.5, 0.5]))
    parties, record = deep_parties(classes, "multiclass"), Record()
    result = run(Leakage(), "none", parties=parties, record=record)
    assert list(result.leakage()["passive-2"]) == list(FOUR)
    for reply, y, value in zip(
        record.label_replies(),
        batches_of(parties, 2),
        series_of(result)["leak_flipped_norm/passive-1"]["values"],
        strict=True,
    ):
        gradient = to_tensor(reply.arrays["passive-1"])
        each = [norm_auc(gradient, y == c) for c in np.unique(y)]
        flipped = np.mean([max(auc, 1 - auc) for auc in each])
        assert value == pytest.approx(flipped, abs=1e-9)
    assert result.leakage()["passive-1"]["mean"]["mean"] > 0.7


def test_batches_of_one_class_are_skipped() -> None:
    rare = torch.zeros(200)
    rare[::25] = 1.0
    parties = deep_parties(rare)
    leakage = Leakage(("norm",), limit=0.6, window=3, baseline=True)
    result = run(leakage, epochs=3, parties=parties)
    both = [i for i, y in enumerate(batches_of(parties, 3), 1) if 0 < y.sum() < len(y)]
    assert 0 < len(both) < 30
    for name in ("norm/passive-1", "random_norm/passive-2"):
        assert series_of(result)[f"leak_{name}"]["steps"] == both
    assert result.leakage()["passive-1"]["norm"]["batches"] == len(both)


@pytest.mark.parametrize("placement", ["strategy", "label"])
def test_withheld_gradients_are_not_measured(placement: str) -> None:
    leakage = Leakage(
        FOUR, limit=0.6, window=2, coalitions=("all",), baseline=True, layers=True
    )
    one = PerParty({"passive-1": Geno(lambda_=1e-9)})
    result = run(leakage, [one], placement)
    assert set(series_of(result)["withheld/passive-1"]["values"]) == {1.0}
    assert set(result.leakage()) == {"passive-2", "passive-2/random"}
    assert not any("passive-1" in n for n in series_of(result) if n.startswith("leak"))
    nobody = run(leakage, [Geno(lambda_=1e-9)], placement)
    assert nobody.leakage() == {}


@pytest.mark.parametrize(
    ("transforms", "placement"),
    [("", "strategy"), ("none", "strategy"), ("none", "label")],
)
@pytest.mark.parametrize(
    "settings", [{}, {"evaluate_every": 0}, {"evaluate_every": 0, "keep_final": True}]
)
def test_every_layer_at_every_step(
    transforms: str, placement: str, settings: dict[str, Any]
) -> None:
    """The last gradient arrives with an evaluation, alone, or with a checkpoint."""
    parties = deep_parties(labels(100))
    leakage = Leakage(("norm", "mean"), layers=True, baseline=True)
    result = run(leakage, transforms, placement, parties=parties, settings=settings)
    for name in ("0", "2"):
        for party in ("passive-1", "passive-2"):
            for kind in ("leak", "leak_flipped"):
                series = series_of(result)[f"{kind}_norm@{name}/{party}"]
                assert series["steps"] == list(range(1, 11))
    for party in ("passive-1", "passive-2"):
        cut, last = (series_of(result)[f"leak_{a}/{party}"] for a in ("norm", "norm@2"))
        assert cut == last  # the last layer's output is the cut layer
        first = series_of(result)[f"leak_norm@0/{party}"]
        assert first["values"] != last["values"]
        assert {"norm@0", "norm@2", "mean@0"} < set(result.leakage()[party])
    assert not any("random" in name for name in series_of(result) if "@" in name)


def test_the_first_layer_by_hand() -> None:
    """Gradients of the first step, from weights that no step has changed yet."""
    parties, record = deep_parties(labels(100)), Record()
    model = parties[1].model
    assert model is not None
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    result = run(
        Leakage(("norm",), layers=True), epochs=1, parties=parties, record=record
    )
    rows = parties[1].configured().training_batches(1)[0]
    before = features(1, 100)[rows] @ weights["0.weight"].T + weights["0.bias"]
    gradient = to_tensor(record.label_replies()[0].arrays["passive-1"])
    at_first = (gradient @ weights["2.weight"]) * (before > 0)
    expected = norm_auc(at_first, batches_of(parties, 1)[0])
    assert series_of(result)["leak_norm@0/passive-1"]["values"][0] == pytest.approx(
        expected
    )


@pytest.mark.parametrize("placement", ["strategy", "label"])
def test_layers_show_labels_and_need_trust(placement: str) -> None:
    leakage = Leakage(("norm",), layers=True)
    for transforms in ("", "none") if placement == "label" else ("",):
        with pytest.raises(PartyError, match="measuring every layer") as caught:
            run(leakage, transforms, placement, trust_server=False)
        assert caught.value.party == "label"
    record = Record()
    run(leakage, record=record)
    passive = [c for verb, c in record.sent if verb == Verb.FORWARD and c.labels]
    assert passive  # which is why it is for simulations


def test_a_coalition_with_a_stranger_is_refused_before_training() -> None:
    record = Record()
    with pytest.raises(ConfigError, match="unknown party of a coalition 'passive-9'"):
        run(Leakage(coalitions=("passive-1+passive-9",)), record=record)
    assert not record.label_replies()


def test_an_attack_that_does_not_fit_the_task_is_refused_before_training() -> None:
    parties, record = deep_parties(features(1)[:, 0], "regression"), Record()
    with pytest.raises(PartyError, match="'cosine' needs classes"):
        run(Leakage(("cosine",)), parties=parties, record=record)
    parties = deep_parties(features(1)[:, 0], "regression")
    with pytest.raises(ConfigError, match="'cosine' needs classes"):
        run(Leakage(("cosine",)), "none", parties=parties)
    assert not record.label_replies()


def test_a_warning_for_each_window() -> None:
    with flower_warnings() as told:
        result = run(Leakage(("mean",), limit=0.6, window=2), epochs=2)
    warned = [line for line in told if "the limit is 0.600" in line]
    assert [line.partition(":")[0] for line in warned] == [
        f"step {step}" for step in (2, 2, 4, 4, 6, 6)
    ]
    for party in ("passive-1", "passive-2"):
        assert f"'{party}'" in "".join(warned)
        assert series_of(result)[f"leak_limit/{party}"]["steps"] == [2, 4, 6]
    assert result.stopped == ""
    assert list(result.leakage()["passive-1"]) == ["mean"]  # the limit is no attack


@pytest.mark.parametrize(("transforms", "every"), [("", 2), ("iso:t=0.1", 3)])
def test_a_resumed_run_keeps_its_series(
    transforms: str, every: int, tmp_path: Path
) -> None:
    def start(folder: Path, epochs: int, resume: bool = False) -> Any:
        strategy = VerticalStrategy(
            batch_size=16,
            leakage=Leakage(
                ("norm", "mean"), limit=0.55, window=4, coalitions=("all",), layers=True
            ),
            progress=False,
            defense=Defense(transforms, noise_seed=3),
            checkpoints=Checkpoints(every=every, folder=folder),
        )
        app = rich_app(build_defense=build_defense)
        with InProcessGrid(app, 3, {"state-dir": str(folder)}) as grid:
            return strategy.start(grid, num_rounds=epochs, resume=resume)

    whole = start(tmp_path / "whole", 4)
    start(tmp_path / "parts", 2)
    parts = start(tmp_path / "parts", 4, resume=True)
    assert series_of(parts) == series_of(whole)
    assert parts.leakage() == whole.leakage()
    assert losses(parts) == losses(whole)
    assert any(name.startswith("leak_limit/") for name in series_of(whole))


def test_a_label_party_with_a_defense_of_its_own_measures_what_it_lets_out() -> None:
    """What the strategy adds is measured at the strategy."""
    own = build_defense("iso:t=9")
    label, passive = simple_parties(rows=400, defense=own)
    noisy = run(Leakage(("mean",)), parties=[label, *passive]).leakage()
    clean = run(Leakage(("mean",)), rows=400).leakage()
    for party in ("passive-1", "passive-2"):
        assert noisy[party]["mean"]["mean"] < clean[party]["mean"]["mean"] - 0.1
