"""Training with one call: what it returns, shows and refuses."""

from __future__ import annotations

import json
import logging
import re
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import flower_vfl
from flower_vfl import (
    ConfigError,
    CrossEntropy,
    LabelParty,
    LabelPrivacy,
    Leakage,
    MeanSquaredError,
    PartyError,
    PassiveParty,
    in_process,
)
from flower_vfl.simulations import results
from flower_vfl.simulations.studies.run_metrics import leaks
from flower_vfl.strategies import Defense, VerticalResult, VerticalStrategy, fitting

X = torch.randn(240, 6, generator=torch.Generator().manual_seed(3))
Y = (X.sum(1) > 0).long()


def make(
    labels: Tensor = Y, objective: Any = None, own: bool = False, **label: Any
) -> list[Any]:
    torch.manual_seed(0)
    objective = objective or CrossEntropy(nn.Linear(8 + 4 * own, 1))
    if own:
        label |= {"features": X[:, :2], "model": nn.Linear(2, 4)}
    return [
        LabelParty(labels, objective, name="bank", **label),
        PassiveParty(X[:, :3], nn.Linear(3, 4), name="shop"),
        PassiveParty(X[:, 3:], nn.Linear(3, 4), name="clinic"),
    ]


def fit(parties: list[Any], **settings: Any) -> VerticalResult:
    usual = {"epochs": 3, "learning_rate": 0.05, "progress": False}
    return flower_vfl.fit(parties, **usual | settings)


def test_the_same_as_the_strategy() -> None:
    parties, again = make(), make()
    result = fit(parties, batch_size=32)
    strategy = VerticalStrategy(batch_size=32, learning_rate=0.05, progress=False)
    with in_process(again) as grid:
        plain = strategy.start(grid, num_rounds=3)
        predicted = strategy.predict()
    assert result.evaluations == plain.evaluations
    assert (result.predict() == predicted).all() and len(predicted) == 48
    last = plain.evaluate_metrics_clientapp[3]
    assert {k: v for k, v in result.metrics.items() if k != "loss"} == dict(last)
    assert result.metrics["test_auc"] > 0.9
    assert list(result.history.index) == [1, 2, 3]


@pytest.mark.parametrize("own", [False, True])
def test_new_rows_are_predicted_as_rows_of_the_run(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_ROWS", 100)  # several parts
    parties = make(own=own)
    result = fit(parties)
    new = {"shop": X[:, :3].numpy(), "clinic": X[:, 3:]} | (
        {"bank": X[:, :2]} if own else {}
    )
    held = [party.features for party in parties]
    predicted = result.predict(new)
    for split in ("train", "test"):
        rows = parties[0].schedule.rows(split)
        np.testing.assert_allclose(predicted[rows], result.predict(split), rtol=1e-5)
    assert [party.features for party in parties] == held
    with pytest.raises(ConfigError, match=r"needed of .*shop, clinic; got shop"):
        result.predict({"shop": X[:, :3]})
    with pytest.raises(ConfigError, match=r"differ in number: .*'clinic': 5"):
        result.predict(new | {"clinic": X[:5, 3:]})
    assert [party.features for party in parties] == held


@pytest.mark.parametrize("task", ["binary", "regression"])
def test_leaks_are_those_of_the_studies(task: str) -> None:
    parties = make()
    if task == "regression":
        parties = make(X.sum(1), MeanSquaredError(nn.Linear(8, 1)))
    audit = Leakage(coalitions=("all",), baseline=True)
    result = fit(parties, audit=audit)
    shown = leaks(results._records(result, {}).assign(**{results.RUN: "run"}))
    shown = shown[~shown["random"]].pivot(
        index="party", columns="attack", values="leak"
    )
    pd.testing.assert_frame_equal(result.leaks.sort_index().sort_index(axis=1), shown)
    assert set(result.leaks.index) == {"clinic", "shop", "clinic+shop"}
    assert result.leaks.to_numpy().min() >= (0.0 if task == "regression" else 0.5)
    assert result.task == task


def test_some_attacks_or_none() -> None:
    found = fit(make(), audit="norm, mean:held_out=true,hard=true").leaks
    assert list(found.columns) == ["norm", "mean:held_out=true,hard=true"]
    nothing = fit(make())
    assert nothing.leaks.empty and "leak" not in repr(nothing).lower()


# --- trust, noise, privacy ---------------------------------------------------------


def test_no_trust_is_asked_for() -> None:
    with in_process(make()) as grid, pytest.raises(PartyError, match="trust"):
        VerticalStrategy(defense="marvell:s=4").start(grid)
    parties = make()
    result = fit(parties, defense="marvell:s=4", audit=Leakage(layers=True))
    assert not parties[0].trust_server  # elsewhere it is as careful as before
    assert len(result.predict()) == 48
    assert result.leaks.loc["shop", "cosine"] < 0.9
    assert fit(make(), audit=True).leaks.loc["shop", "cosine"] > 0.95


def test_a_seed_repeats_noise_and_none_does_not() -> None:
    def last(seed: int | None) -> float:
        return fit(make(), defense="iso", seed=seed).metrics["loss"]

    assert last(0) == last(0)
    assert last(None) != last(None)
    own = Defense("iso", noise_seed=1)
    assert fit(make(), defense=own).metrics == fit(make(), defense=own).metrics


def test_private_labels_with_a_defense_and_an_audit() -> None:
    parties = make(label_privacy=LabelPrivacy(auc=0.8))
    result = fit(parties, defense="iso", audit="norm", seed=1)
    assert "no attack can distinguish two possible labels" in repr(result)
    assert list(result.leaks.columns) == ["norm"]


# --- how it shows itself -----------------------------------------------------------


class Tags(HTMLParser):
    """Collects what a page loads, and whether its tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_whole_escaped_and_loads_nothing() -> None:
    parties = make()
    parties[1].name = "<script>alert(1)</script>"
    result = fit(parties, audit=True, epochs=30)
    shown = result._repr_html_()
    tags = Tags()
    tags.feed(shown)
    assert not tags.open and tags.seen == {"p", "table", "thead", "tbody", "tr"} | {
        "th",
        "td",
    }
    assert "color" not in shown and "&lt;script&gt;" in shown
    assert f"{result.metrics['test_auc']:.4f}" in shown
    assert f"{result.leaks.to_numpy().max():.4f}" in shown
    assert "Labels: no bound for the whole training" in shown
    assert shown.count("<tr") < 20  # of 30 epochs some are left out


def test_text_is_short_and_names_the_largest_leak() -> None:
    result = fit(make(), audit=True)
    lines = repr(result).splitlines()
    assert lines[0] == "VerticalResult" and len(lines) == 5
    assert lines[1].startswith("  3 epochs: loss ")
    worst = re.search(r"Largest leak: ([\d.]+) \((\w+) at (\w+)\)", lines[2])
    assert worst is not None
    assert float(worst[1]) == round(result.leaks.to_numpy().max(), 3)
    assert f"{result.leaks.loc[worst[3], worst[2]]:.3f}" == worst[1]
    assert repr(VerticalResult()).startswith("VerticalResult")
    assert VerticalResult()._repr_html_()


def test_a_stopped_run_says_why() -> None:
    limit = Leakage(attacks=("norm",), limit=0.1, action="stop", window=1)
    assert "Stopped: the leak limit was exceeded" in repr(fit(make(), audit=limit))


def test_only_the_result_of_fit_predicts() -> None:
    with pytest.raises(ConfigError, match="call predict of the strategy"):
        VerticalResult().predict()


def test_flowers_log_is_quiet_and_then_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = logging.getLogger("flwr").level
    with pytest.raises(ConfigError, match="batch_size"):
        fit(make(), batch_size=-1)
    fit(make())
    assert logging.getLogger("flwr").level == before
    assert not [each for each in caplog.records if each.levelno < logging.WARNING]


def test_a_notebook_has_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)
    display = SimpleNamespace(HTML=lambda text="": text, display=lambda *a, **k: handle)
    monkeypatch.setattr(fitting, "import_module", lambda name: display)
    monkeypatch.setattr(fitting, "Console", lambda: SimpleNamespace(is_jupyter=True))
    fit(make(), progress=None)
    assert shown[0].startswith('<progress value="0" max="3">')
    assert any("epoch 2/3" in text and "test_auc 0." in text for text in shown)
    assert shown[-1] == ""
    shown.clear()
    fit(make(), progress=False)
    assert not shown


# --- mistakes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "counts"),
    [
        ([0], "got LabelParty$"),
        ([1, 2], "got PassiveParty, PassiveParty$"),
        ([0, 0, 1], "got LabelParty, LabelParty, PassiveParty$"),
        ([0, 1, None], "got LabelParty, PassiveParty, Tensor$"),
    ],
)
def test_parties_that_are_missing_or_too_many(chosen: list[Any], counts: str) -> None:
    parties = make()
    given = [X if index is None else parties[index] for index in chosen]
    with pytest.raises(ConfigError, match=counts) as caught:
        fit(given)
    assert "one LabelParty(labels, objective)" in str(caught.value)


def test_pictures_of_bytes() -> None:
    pictures = torch.zeros(240, 1, 8, 8, dtype=torch.uint8)
    parties = make()
    parties[1] = PassiveParty(
        pictures, nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()), name="shop"
    )
    with pytest.raises(PartyError, match=r"uint8 \(1, 8, 8\)") as caught:
        fit(parties)
    assert 'features.astype("float32") / 255' in str(caught.value)
    parties[1] = PassiveParty(X[:, :3].long(), nn.Linear(3, 4), name="shop")
    with pytest.raises(PartyError, match=r'astype\("float32"\)$'):
        fit(parties)


def test_a_bottom_model_of_the_wrong_width() -> None:
    parties = make()
    parties[1] = PassiveParty(X[:, :3], nn.Linear(5, 4), name="shop")
    with pytest.raises(PartyError, match=r"float32 \(3,\). Give the model's first lay"):
        fit(parties)


def test_forgotten_classes() -> None:
    labels = torch.arange(240) % 10
    with pytest.raises(PartyError, match="Give classes=10 to CrossEntropy"):
        fit(make(labels))
    # Values of the table stay in the node: 7000 says what the largest label is.
    with pytest.raises(PartyError) as caught:
        fit(make(labels * 1000))
    assert "000" not in json.dumps(str(caught.value))


def test_a_top_model_of_the_wrong_width() -> None:
    with pytest.raises(PartyError, match="the joined embedding, 8 columns"):
        fit(make(objective=CrossEntropy(nn.Linear(5, 1))))
