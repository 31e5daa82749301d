"""``flower-vfl sweep``: the grid, the trade-off, and methods of one's own in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cli_cases import call
from hypothesis import given
from hypothesis import strategies as st
from study_cases import document_of

from flower_vfl.errors import ConfigError
from flower_vfl.simulations import plugins
from flower_vfl.simulations.cli.compare import methods_of
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.studies import trials as trials_module
from flower_vfl.simulations.studies.methods import (
    parse_method,
    parse_values,
    sweep_trials,
)
from flower_vfl.simulations.studies.study import Study, run_study
from flower_vfl.simulations.studies.tradeoff import (
    area,
    privacy,
    staircase,
    tradeoff,
    usefulness,
)
from flower_vfl.simulations.studies.trials import Trial

TINY = ("--limit", "120", "--epochs", "1", "--attack", "norm")


def grid(defenses: list[str], *values: str, **settings: Any) -> list[Trial]:
    methods = [parse_method(text) for text in defenses]
    config = RunConfig(**settings)
    return sweep_trials(config, methods, parse_values(values), "in-process")


# --- the grid -----------------------------------------------------------------------


def test_every_combination_is_run() -> None:
    trials = grid(["marvell"], "defense.s=0.1,4", "seed=0,1", "width=8,16")
    found = {(t.config.defense, t.config.seed, t.config.width) for t in trials}
    texts = ("marvell:s=0.1", "marvell:s=4")
    assert found == {(d, s, w) for d in texts for s in (0, 1) for w in (8, 16)}
    first = {"defense": "marvell", "defense.s": "0.1", "seed": "0", "width": "8"}
    assert len(trials) == 8 and trials[0].labels == first


def test_each_defense_has_its_own_values() -> None:
    defenses = ["none", "marvell", "iso | gc:keep=0.5"]
    trials = grid(defenses, "marvell.s=1,4", "gc.keep=0.1,0.2", "seed=0")
    assert [t.config.defense for t in trials] == [
        "",
        "marvell:s=1",
        "marvell:s=4",
        "iso | gc:keep=0.1",
        "iso | gc:keep=0.2",
    ]
    assert "marvell.s" not in trials[-1].labels


@pytest.mark.parametrize(
    ("defense", "value", "setting", "text"),
    [
        ("passive-1=iso; *=marvell:s=2", "marvell.s=9", "defense", "*=marvell:s=9"),
        ("@1 none @5 marvell", "marvell.s=9", "defense", "@1 none @5 marvell:s=9"),
        ("gradient-compression", "gc.keep=0.3", "defense", ":keep=0.3"),
        ("objective=kdk", "objective.eps=0.2", "objective", "kdk:eps=0.2"),
        ("objective=gafm:gamma=2", "gafm.delta=1", "objective", "gamma=2,delta=1"),
        ("preset=ladsg", "ladsg.eps=0.1", "objective", "eps=0.1"),
        ("none", "objective.delta=0.2", "objective", "gafm:delta=0.2"),
        ("none", "optimizer.lr=0.1", "optimizer", "adam:lr=0.1,weight_decay=0.001"),
        ("none", "mean.hard=true", "attack", "norm,mean:hard=true"),
        ("none", "optimizer=sgd:lr=1,momentum=0.5", "optimizer", "momentum=0.5"),
        ("none", "learning-rate=label=0.1,passive-1=0.2;", "learning_rate", "-1=0.2"),
        ("none", "model=mlp:hidden=4+2", "bottom", "mlp:hidden=4+2"),
    ],
)
def test_a_parameter_is_found_wherever_it_is(
    defense: str, value: str, setting: str, text: str
) -> None:
    (trial,) = grid([defense], value, attack="norm,mean", objective="gafm")
    assert text in getattr(trial.config, setting)


@pytest.mark.parametrize(
    ("defenses", "value", "problem"),
    [
        (
            ["none"],
            "nothing=1",
            "unknown setting 'nothing'; known: .*batch-size.*width",
        ),
        (["none"], "nothing.s=1", "unknown method 'nothing'; known: .*marvell"),
        (["none"], "seed", "is not name=value"),
        (["none"], "seed=,", "is not name=value"),
        (["none"], "seed=x", "seed must be an integer, got 'x'"),
        (["none"], "marvell.s=1", "concerns none of the methods: none"),
        (["none"], "defense.s=1", "concerns none of the methods: none"),
        (["iso | gc"], "defense.t=1", "several methods; write <method>.t"),
        (["iso"], "iso.=1", "does not name a parameter"),
        (["iso"], "out=a", "unknown setting 'out'"),
    ],
)
def test_a_wrong_value_is_refused(
    defenses: list[str], value: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        grid(defenses, value)
    with pytest.raises(ConfigError, match="set twice"):
        grid(["none"], "seed=0", "seed=1")


# --- the trade-off ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1.0, 1.0)], 1.0),
        ([(0.0, 1.0), (1.0, 0.0)], 0.0),  # it leaks all, or it guesses
        ([(0.5, 0.8)], 0.4),
        ([(0.5, 1.0), (1.0, 0.5)], 0.75),
        ([(0.2, 0.9), (0.6, 0.7), (0.8, 0.4)], 0.54),  # 0.18 + 0.28 + 0.08
        ([(0.2, 0.9), (0.1, 0.8), (0.6, 0.7), (0.8, 0.4)], 0.54),  # one is beaten
        ([(0.6, 0.7), (0.6, 0.2), (0.6, 0.7)], 0.42),
        ([], 0.0),
    ],
)
def test_the_area_under_the_curve(
    points: list[tuple[float, float]], expected: float
) -> None:
    assert area(points) == pytest.approx(expected)


unit = st.floats(0.0, 1.0)
some_points = st.lists(st.tuples(unit, unit), max_size=8)


@given(some_points, st.tuples(unit, unit))
def test_the_area_is_what_the_points_dominate(
    points: list[tuple[float, float]], more: tuple[float, float]
) -> None:
    assert area([*points, more]) >= area(points) - 1e-12
    steps = staircase(points)
    assert steps == sorted(steps) and set(steps) <= set(points)
    # the same by counting the cells of a grid that some point dominates
    edges = [sorted({0.0, *(p[axis] for p in points)}) for axis in (0, 1)]
    cells = [
        (right - left) * (top - bottom)
        for left, right in zip(edges[0], edges[0][1:], strict=False)
        for bottom, top in zip(edges[1], edges[1][1:], strict=False)
        if any(x >= right and y >= top for x, y in points)
    ]
    assert area(points) == pytest.approx(sum(cells))


def test_what_privacy_and_utility_mean() -> None:
    assert privacy({"norm": 0.5, "mean": 0.75}) == 0.5
    assert (privacy({"norm": 1.0}), privacy({"norm": 0.5})) == (0.0, 1.0)
    assert privacy({"norm": 0.25}, regression=True) == 0.75
    assert usefulness("auc", 0.75) == 0.5
    assert (usefulness("auc", 0.3), usefulness("pearson", -0.3)) == (0, 0)
    assert usefulness("accuracy", 0.9) == 0.9


def test_the_trade_off_of_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(config: RunConfig, engine: str) -> Any:
        strength = float(config.defense.partition("=")[2] or 0)
        # the attack that finds most of the means is not the one of each seed
        first = 0.9 - 0.1 * strength + 0.1 * config.seed
        leaks = {"norm": first, "mean": 0.9 - 0.1 * strength - 0.1 * config.seed}
        return document_of(config, 0.95 - 0.05 * strength, leaks), {}

    monkeypatch.setattr(trials_module, "run_trial", pretend)
    trials = grid(["none", "iso"], "iso.t=1,2", "seed=0,1")
    found = tradeoff(run_study(tmp_path, "sweep", "t", trials))
    assert found["metric"] == "test_auc"
    assert list(found["curves"]) == ["iso", "none"]  # the better one first
    curve = found["curves"]["iso"]
    assert [point["labels"] for point in curve["points"]] == [
        {"iso.t": "1"},
        {"iso.t": "2"},
    ]
    assert [point["seeds"] for point in curve["points"]] == [2, 2]
    assert [point["x"] for point in curve["points"]] == pytest.approx([0.3, 0.5])
    assert [point["y"] for point in curve["points"]] == pytest.approx([0.8, 0.7])
    assert curve["area"] == pytest.approx(0.3 * 0.8 + 0.2 * 0.7)
    assert found["curves"]["none"]["area"] == pytest.approx(0.1 * 0.9)


# --- the command --------------------------------------------------------------------


def test_the_command_sweeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["sweep", *TINY, "--defense", "marvell", "--set", "marvell.s=1,4"]
    arguments += ["--set", "seed=0,1", "--out", str(tmp_path), "--format", "parquet"]
    arguments += ["--attack", "norm,stale"]
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert code == 0, err
    *_, table, report = out.splitlines()
    assert "area under the curve" in out and Path(report).is_file()
    frame = pd.read_parquet(table)
    assert sorted(zip(frame["marvell.s"], frame["seed"], strict=True)) == [
        (1, 0),
        (1, 1),
        (4, 0),
        (4, 1),
    ]
    assert len(pd.read_csv(tmp_path / "results.csv")) == 4
    code, out, _ = call(capsys, monkeypatch, *arguments, "--json")
    found = json.loads(out)
    kept = Study.load(tmp_path).extra["tradeoff"]["curves"]
    assert found["curves"] == kept and set(kept) == {"marvell"}
    assert len(kept["marvell"]["points"]) == 2
    point = kept["marvell"]["points"][0]
    own = frame[frame["marvell.s"] == 1]
    beyond = own["leak_stale"] - own["train_model_leak"]
    assert point["beyond_model"] == pytest.approx(beyond.mean())
    assert point["run_auc_bound"] == pytest.approx(own["run_auc_bound"].mean())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "nothing to vary"),
        (["--set", "seed=0", "--format", "xls"], "known: csv, parquet"),
        (
            ["--defense", "marvell", "--set", "defense.q=1"],
            "known parameters: s=4.0, auc=none",
        ),
        (["--set", "bottom=nothing"], "unknown bottom model"),
        (["--set", "width=4,0"], "width must be at least 1"),
        (["--set", "objective=nothing"], "unknown objective"),
        (["--set", "seed=0", "--workers", "0"], "workers must be at least 1"),
    ],
)
def test_what_is_wrong_is_said_before_any_run(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "none"
    code, out, err = call(
        capsys, monkeypatch, "sweep", *TINY, *arguments, "--out", str(folder)
    )
    assert (code, out) == (2, "") and problem in err
    assert not folder.exists()


# --- methods of one's own -----------------------------------------------------------


def test_own_methods_appear_in_compare_and_sweep(
    own: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = ["--limit", "120", "--epochs", "1"]
    compare = ["--plugin", own, "compare", *small, "--seeds", "1", "--json"]
    compare += ["--defense", "flip:share=0.2", "--defense", "objective=small + flip"]
    code, out, err = call(capsys, monkeypatch, *compare, "--out", str(tmp_path / "c"))
    assert code == 0, err
    found = json.loads(out)
    assert [row["defense"] for row in found["rows"]][1:] == compare[-3::2]
    assert "first-column" in found["rows"][0]["leaks"]
    sweep = ["--plugin", own, "sweep", *small, "--defense", "flip", "--json"]
    sweep += ["--set", "flip.share=0.1,0.5", "--out", str(tmp_path / "s")]
    code, out, err = call(capsys, monkeypatch, *sweep)
    assert code == 0, err
    assert len(json.loads(out)["curves"]["flip"]["points"]) == 2
    # without a word they are among what is compared by default
    texts = [method.text for method in methods_of([], "binary")]
    assert {"flip", "objective=small", "preset=both"} < set(texts)
    assert "objective=small" not in [m.text for m in methods_of([], "multiclass")]
    assert os.environ[plugins.VARIABLE] == own


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "FileNotFoundError"),
        ("1 +", "SyntaxError"),
        ("import nothing_like_this", "ModuleNotFoundError"),
        ("x = 1", "has none of DEFENSES, SCORE_ATTACKS, OBJECTIVES, PRESETS"),
        ("DEFENSES = {'iso': object}", "adds 'iso' to DEFENSES, which already has it"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named(
    own: str,
    content: str | None,
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "wrong_methods.py"
    if content is not None:
        path.write_text(content)
    code, _, err = call(capsys, monkeypatch, "--plugin", str(path), "run")
    assert code == 2 and "wrong_methods" in err and problem in err
