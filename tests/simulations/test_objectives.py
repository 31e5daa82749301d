"""Objectives and presets by name, and settings of GAFM that are chosen for a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flower_vfl import ConfigError, CrossEntropy, MeanSquaredError
from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.objectives import (
    GAFM,
    GAFMOriginal,
    KDk,
    LADistill,
    Objective,
    select_delta,
    select_gamma,
)
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.cli.select import subset_training
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.datasets.types import InputSpec, PartyData
from flower_vfl.simulations.objectives import OBJECTIVES, objective_for, preset
from flower_vfl.simulations.parties import PartyRows
from flower_vfl.simulations.studies.methods import parse_method
from flower_vfl.strategies import DEFENSES, Compose, Geno, SGSub, build_defense


def build(text: str, task: str = "binary", own: int = 0, **settings: Any) -> Objective:
    classes = {"binary": ("no", "yes"), "multiclass": ("a", "b", "c", "d")}
    data = PartyData((), None, ())
    if own:
        inputs = (np.zeros((6, own), dtype=np.float32),)
        data = PartyData(inputs, InputSpec(numeric=own), tuple("abcdefgh"[:own]))
    rows = PartyRows(
        data,
        np.arange(6),
        np.array([0, 0, 0, 0, 2, 2], dtype=np.int8),
        np.array([1.0, 3.0, 5.0, 7.0, 100.0, 200.0]),
        task,  # type: ignore[arg-type]
        classes.get(task, ()),
    )
    config = RunConfig(**{"width": 4, "objective": text, **settings})
    return objective_for(config, rows)


@pytest.mark.parametrize(
    ("text", "task", "kind"),
    [
        ("auto", "binary", CrossEntropy),
        ("auto", "multiclass", CrossEntropy),
        ("auto", "regression", MeanSquaredError),
        ("gafm", "binary", GAFM),
        ("gafm:delta=0.1", "multiclass", GAFM),
        ("gafm-original", "binary", GAFMOriginal),
        ("gafm-original", "regression", GAFMOriginal),
        ("ladistill", "binary", LADistill),
        ("ladistill:k=3", "multiclass", LADistill),
        ("kdk:k=3,eps=0.4", "multiclass", KDk),
    ],
)
def test_a_name_builds_its_objective(text: str, task: str, kind: type) -> None:
    objective = build(text, task)
    assert type(objective) is kind
    assert objective.task == task


def test_parameters_arrive() -> None:
    gafm = build("gafm:delta=0.2,gamma=20,sigma=0.5,clip=0.3,hidden=8,parts=ce")
    assert isinstance(gafm, GAFM)
    assert (gafm.delta, gafm.gamma, gafm.sigma, gafm.clip) == (0.2, 20.0, 0.5, 0.3)
    assert (gafm.hidden, gafm.parts, gafm.width) == (8, "ce", 8)
    first = build("gafm-original:gamma=30,sigma=3,literal=true")
    assert isinstance(first, GAFMOriginal)
    assert (first.gamma, first.sigma, first.literal) == (30.0, 3.0, True)
    text = "ladistill:k=3,eps=0.1,teacher=mlp:hidden=5,first_epoch=silent,epochs=7"
    soft = build(text, "multiclass")
    assert isinstance(soft, LADistill)
    assert (soft.k, soft.eps, soft.first_epoch) == (3, 0.1, "silent")
    assert soft.teacher_epochs == 7
    assert soft.teacher(torch.zeros(2, 8)).shape == (2, 4)


def test_a_regression_is_centred_on_its_training_labels() -> None:
    for name in ("mean-squared-error", "gafm-original"):
        objective = build(name, "regression")
        assert float(objective.center) == pytest.approx(4.0)  # type: ignore[arg-type]
        assert float(objective.scale) == pytest.approx(5**0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bottom", "text", "squashed"),
    [
        ("gafm-spambase", "gafm", True),
        ("gafm-imdb", "gafm", True),
        ("mlp:hidden=8,final=sigmoid", "gafm", True),
        ("gafm-spambase:final=none", "gafm", False),
        ("auto", "gafm", False),
        ("auto", "gafm:squashed=yes", True),
        ("gafm-spambase", "gafm:squashed=no", False),
    ],
)
def test_whether_there_is_a_sigmoid(bottom: str, text: str, squashed: bool) -> None:
    objective = build(text, bottom=bottom)
    assert isinstance(objective, GAFM)
    assert objective.squashed is squashed


def test_the_width_is_that_of_the_joined_embedding() -> None:
    for aggregation, own, width in (
        ("concat", 0, 8),
        ("mean", 0, 4),
        ("concat", 2, 12),
    ):
        gafm = build("gafm", own=own, aggregation=aggregation)
        assert isinstance(gafm, GAFM)
        assert gafm.width == width


def test_the_teacher_takes_own_features_or_embeddings() -> None:
    own = build("ladistill:teacher=mlp:hidden=3", own=5)
    assert isinstance(own, LADistill)
    assert own.teacher(torch.zeros(2, 5)).shape == (2, 2)
    none = build("ladistill:teacher=mlp:hidden=3")
    assert isinstance(none, LADistill)
    assert none.teacher(torch.zeros(2, 8)).shape == (2, 2)


@pytest.mark.parametrize(
    ("text", "task", "words"),
    [
        ("nope", "binary", "auto, coae, cross-entropy"),
        ("gafm", "regression", "not for a regression task; use mean-squared-error"),
        ("gafm-original", "multiclass", "not for a multiclass task; use cross"),
        ("mean-squared-error", "binary", "ladistill"),
        ("gafm:delta=0.6", "binary", "delta must be from 0 to 0.5"),
        ("gafm:gama=1", "binary", "unknown parameter 'gama'.*gamma=1.0"),
        ("gafm:parts=none", "binary", "one of both, gan, ce"),
        ("kdk:k=5", "multiclass", "k must be from 2"),
        ("ladistill:teacher=nope", "binary", "bottom model"),
    ],
)
def test_what_cannot_be_built_says_why(text: str, task: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(text, task)


def test_every_objective_has_a_task() -> None:
    for name, (_, tasks) in OBJECTIVES.items():
        for task in tasks:
            assert isinstance(build(name, task), nn.Module)


SOFT = "ladistill:k=2,eps=0.3,teacher=auto,epochs=10"
OURS = "balanced=true,on_embeddings=true"


@pytest.mark.parametrize(
    ("text", "objective", "defense"),
    [
        ("ladsg", f"{SOFT},first_epoch=silent,{OURS}", "sgsub:draw=entries | geno"),
        ("ladsg:distill=false", "auto", "sgsub:draw=entries | geno"),
        ("ladsg:first_epoch=vanilla,balanced=false", SOFT, "sgsub | geno"),
        ("ladsg:substitute=false", f"{SOFT},first_epoch=silent,{OURS}", "geno"),
        ("ladsg:detect=false,first_epoch=vanilla,balanced=false", SOFT, "sgsub"),
        ("ladsg:detect=false,substitute=false,distill=false", "auto", ""),
    ],
)
def test_ladsg_and_its_parts(text: str, objective: str, defense: str) -> None:
    assert preset(text) == {"objective": objective, "defense": defense}
    RunConfig(**preset(text))
    if "distill" not in text:
        assert isinstance(build(objective, "multiclass"), LADistill)
    if " | " in defense:
        both = build_defense(defense)
        assert isinstance(both, Compose)
        kinds = [type(part) for part in both.parts.values()]
        assert kinds == [SGSub, Geno]
    elif defense:
        assert type(build_defense(defense)) is DEFENSES[defense]


def test_gafm_is_a_preset_with_its_cut_layer() -> None:
    settings = preset("gafm:delta=0.2")
    assert settings["objective"].startswith("gafm:delta=0.2,gamma=0.7,")
    config = parse_method("preset=gafm:delta=0.2").over(RunConfig(), {})
    assert config == RunConfig(**settings)
    assert (config.width, config.aggregation) == (1, "mean")
    wide = parse_method("preset=gafm + width=3").over(RunConfig(), {})
    assert (wide.width, wide.aggregation) == (3, "mean")


def test_an_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="ladsg"):
        preset("nope")


SMALL = RunConfig(
    objective="gafm:gamma=1",
    bottom="gafm-spambase",
    width=1,
    aggregation="mean",
    epochs=2,
    batch_size=64,
    device="cpu",
)


def test_settings_of_gafm_are_chosen_for_a_run() -> None:
    choice = select_delta(*subset_training(SMALL, 0.5, "delta"), (0.1, 0.5), 1)
    assert choice.delta in choice.ratios
    assert choice.ratios[choice.delta] == min(choice.ratios.values())
    balance = select_gamma(*subset_training(SMALL, 0.5, "gamma"))
    assert balance.gamma == pytest.approx(balance.ce / balance.gan)
    wrong = replace(SMALL, objective="gafm-original")
    with pytest.raises(ConfigError, match="objective 'gafm'"):
        select_gamma(*subset_training(wrong, 0.1, "gamma"))
    with pytest.raises(ConfigError, match="label-share"):
        subset_training(replace(SMALL, label_share="0.2"), 0.1, "gamma")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"defense": "marvell:s=4"},
        {"objective": "gafm-original"},
        {"objective": "kdk", "bottom": "auto", "width": 4},
        {**preset("ladsg"), "bottom": "auto", "width": 4, "label_share": "0.3"},
    ],
)
def test_a_run_by_name(settings: dict[str, Any]) -> None:
    config = replace(SMALL, **settings)
    with InProcessGrid(client_app, 3, config.to_run_config()) as grid:
        found = train(grid, config, "in-process", progress=False)
    assert 0.0 <= found["final"]["test_auc"] <= 1.0
