"""Attacks on what many epochs show, in real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leak_cases import deep_parties, run
from records_cases import series_of
from sklearn.metrics import roc_auc_score
from vertical_cases import labels, losses, rich_app

from flower_vfl import InProcessGrid
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.strategies import Checkpoints, Defense, VerticalStrategy, build_defense

STALE = "stale:score=mean,held_out=true"
LATEST = ("similarity", "similarity:on=embedding,known=false", "embedding")
ALL = "passive-1+passive-2"


def test_epochs_tell_more_than_a_step() -> None:
    leakage = Leakage(("cosine", "stale"), coalitions=("all",))
    parties = deep_parties(labels(400))
    settings = {"batch_size": 100}
    result = run(leakage, "marvell:s=4", epochs=30, parties=parties, settings=settings)
    found = result.leakage()
    for party in ("passive-1", "passive-2", ALL):
        steps, epochs = found[party]["cosine"], found[party]["stale"]
        assert (steps["batches"], epochs["batches"]) == (120, 30)
        assert epochs["last"] > steps["mean"] + 0.1
    assert found[ALL]["stale"]["last"] > found["passive-1"]["stale"]["last"]


@pytest.mark.parametrize("defense", ["iso:t=2", "geno", "marvell:s=4"])
def test_both_places_add_up_the_same(defense: str) -> None:
    given = (STALE, "norm", *LATEST, "exploit:steps=3")
    leakage = Leakage(given, coalitions=("all",), baseline=True, every=2)
    here, there = (run(leakage, defense, place) for place in ("strategy", "label"))
    assert series_of(here) == series_of(there)
    for attack in (STALE, *LATEST):
        assert series_of(here)[f"leak_{attack}/{ALL}"]["steps"] == [3, 6]


@pytest.mark.parametrize(("transforms", "every"), [("", 2), ("iso:t=0.5", 5)])
def test_a_resumed_run_adds_up_the_same(
    transforms: str, every: int, tmp_path: Path
) -> None:
    def start(folder: Path, epochs: int, resume: bool = False) -> Any:
        strategy = VerticalStrategy(
            batch_size=16,
            leakage=Leakage((STALE, "norm", *LATEST), coalitions=("all",)),
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
    assert losses(parts) == losses(whole)
    assert parts.evaluations[4]["train"] == whole.evaluations[4]["train"]


@pytest.mark.parametrize("split", [{}, {"test_fraction": 0.25}])
def test_beside_it_stands_what_the_model_tells(split: dict[str, float]) -> None:
    parties = deep_parties(labels(200))
    result = run(Leakage(("stale",)), parties=parties, settings=split)
    assert list(result.evaluations[2])[-1] == "train"
    train = result.evaluations[2]["train"]
    assert train["model_leak"] == train["auc"] > 0.5
    assert "train" not in run(Leakage(("norm",)), settings=split).evaluations.get(2, {})


def test_what_is_added_up_is_what_left() -> None:
    """The norm of a row's sum, beside a sum by hand of what the passive party got."""
    parties = deep_parties(labels(120), passive=1)
    got: list[np.ndarray[Any, Any]] = []
    backward = parties[1].backward  # type: ignore[attr-defined]

    def keep(step: int, gradient: Any) -> Any:
        got.append(gradient.double().numpy())
        return backward(step, gradient)

    parties[1].backward = keep  # type: ignore[attr-defined]
    result = run(Leakage(("stale:score=norm",)), "iso:t=1", epochs=3, parties=parties)
    schedule = parties[0].configured()
    sums = np.zeros((120, got[0].shape[1]))
    steps = [rows for epoch in (1, 2, 3) for rows in schedule.training_batches(epoch)]
    for rows, gradient in zip(steps, got, strict=True):
        scale = np.sqrt(np.square(np.linalg.norm(gradient, axis=1)).mean())
        sums[rows] += gradient / scale
    seen = schedule.rows("train")
    truth = labels(120)[seen]
    auc = roc_auc_score(truth, np.linalg.norm(sums[seen], axis=1))
    last = result.leakage()["passive-1"]["stale:score=norm"]["last"]
    assert last == pytest.approx(auc, abs=2e-3)
