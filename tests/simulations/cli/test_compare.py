"""``flower-vfl compare``: what is compared, and a table of what the runs found."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from cli_cases import call
from rich.console import Console
from study_cases import columns_of, document_of, evaluation_rows, leak_rows

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.cli.compare import (
    DEFAULTS,
    compare_trials,
    comparison_markdown,
    methods_of,
    screen_tables,
    seeds_of,
)
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.objectives import preset
from flower_vfl.simulations.results import table
from flower_vfl.simulations.studies import trials as trials_module
from flower_vfl.simulations.studies.methods import parse_method
from flower_vfl.simulations.studies.study import Study, run_study
from flower_vfl.simulations.studies.tradeoff import comparison
from flower_vfl.simulations.studies.trials import Trial

TINY = ("--limit", "120", "--epochs", "1")


# --- what is compared ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("none", {}),
        ("marvell:s=4", {"defense": "marvell:s=4"}),
        ("defense=marvell", {"defense": "marvell"}),
        ("gc | iso:t=2", {"defense": "gc | iso:t=2"}),
        ("passive-1=iso; *=gc", {"defense": "passive-1=iso; *=gc"}),
        ("objective=gafm:delta=0.1", {"objective": "gafm:delta=0.1"}),
        (
            "objective=gafm + marvell:s=4 + width=1",
            {"objective": "gafm", "defense": "marvell:s=4", "width": 1},
        ),
        ("model=mlp:hidden=8+4", {"bottom": "mlp:hidden=8+4"}),
        (
            "leak-baseline=true + test-fraction=0.5",
            {"test_fraction": 0.5} | {"leak_baseline": True},
        ),
        ("preset=ladsg:detect=false", preset("ladsg:detect=false")),
        ("ladsg:detect=false", preset("ladsg:detect=false")),
        ("gafm", preset("gafm")),
        ("gafm + marvell:s=4", {**preset("gafm"), "defense": "marvell:s=4"}),
        ("gafm + width=3", {**preset("gafm"), "width": 3}),
        ("kdk:k=3", {"objective": "kdk:k=3"}),
    ],
)
def test_a_method_is_a_few_settings(text: str, changed: dict[str, Any]) -> None:
    assert parse_method(text).over(RunConfig(), {}) == RunConfig(**changed)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("iso + marvell", "gives the defense twice"),
        ("objective=", "has no value"),
        ("preset=ladsg + iso", "has a defense of its own"),
        ("iso + width=two", "width must be an integer, got 'two'"),
        ("iso + leak_layers=yes", "true or false"),
        ("preset=nothing", "known: gafm, ladsg"),
    ],
)
def test_a_wrong_method_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_method(text).over(RunConfig(), {})


def test_vanilla_is_always_there_and_first() -> None:
    texts = [method.text for method in methods_of(["iso", "none", "iso"], "binary")]
    assert texts == ["none", "iso"]
    for task, defaults in DEFAULTS.items():
        assert [method.text for method in methods_of([], task)] == list(defaults)


def test_rows_are_captured_once_and_where_that_is_possible() -> None:
    methods = methods_of(["iso"], "binary")
    config = RunConfig(capture=9)
    here = compare_trials(config, methods, [4, 5], "in-process")
    assert [trial.config.capture for trial in here] == [9, 9, 0, 0]
    assert [trial.config.seed for trial in here] == [4, 4, 5, 5]
    there = compare_trials(config, methods, [4], "ray")
    assert {trial.config.capture for trial in there} == {0}


def test_seeds_are_a_number_or_a_list() -> None:
    assert seeds_of("3", 5) == [5, 6, 7]
    assert seeds_of("4,2,4", 5) == [4, 2]
    assert seeds_of("4,", 5) == [4]
    for wrong in ("", "0", "-1", "a", "1;2"):
        with pytest.raises(ConfigError, match="are no seeds"):
            seeds_of(wrong, 0)


# --- the table ----------------------------------------------------------------------


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """Two methods and three seeds; Marvell of the last seed fails."""

    def pretend(config: RunConfig, engine: str) -> Any:
        if config.defense and config.seed == 2:
            raise ConfigError("too many seeds")
        slow = 3.0 if config.defense else 1.0
        leaks = dict.fromkeys(("norm", "mean", "median"), 0.6 + 0.1 * config.seed)
        leaks["cosine"] = 0.1
        found = document_of(config, 0.9 + 0.02 * config.seed, leaks, slow + config.seed)
        return found, {}

    monkeypatch.setattr(trials_module, "run_trial", pretend)
    trials = [
        Trial({"defense": text, "seed": str(seed)}, RunConfig(defense=d, seed=seed))
        for text, d in (("none", ""), ("marvell:s=4 | gradient-compression", "marvell"))
        for seed in range(3)
    ]
    return run_study(tmp_path, "compare", "t", trials)


def test_the_table_is_what_the_documents_say(study: Study) -> None:
    none, marvell = comparison(study)["rows"]
    assert (none["runs"], marvell["runs"]) == (3, 2)
    assert none["utility"]["mean"] == pytest.approx(0.92)
    ends = none["utility"]["min"], none["utility"]["max"]
    assert ends == pytest.approx((0.9, 0.94))
    assert none["leaks"]["norm"]["mean"] == pytest.approx(0.7)
    assert none["leaks"]["norm"]["sd"] == pytest.approx(0.1)  # of 0.6, 0.7, 0.8
    assert none["leaks"]["cosine"]["mean"] == pytest.approx(0.9)  # it is reversed
    assert none["time_ratio"] == 1.0
    assert marvell["time_ratio"] == pytest.approx(3.5 / 2.0)  # medians of 3, 4; 1, 2, 3


def test_the_table_fits_a_terminal(study: Study) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    for part in screen_tables(comparison(study)):
        console.print(part)
    text = console.export_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in text
    row = next(line for line in lines if line.startswith("│ none"))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["none", "0.920", "0.700", "0.700", "0.700", "0.900", "1.00×"]
    following = lines[lines.index(row) + 1]
    assert "0.900–0.940" in following and following.count("±0.100") == 3


def test_the_table_in_markdown(study: Study) -> None:
    head, _, none, marvell = comparison_markdown(comparison(study)).splitlines()
    assert head.startswith("| defense | test AUC | worst | best | norm |")
    assert none.startswith("| `none` | 0.920 | 0.900 | 0.940 | 0.700 ± 0.100 |")
    assert "`marvell:s=4 \\| gradient-compression`" in marvell
    assert head.count("|") == none.count("|") == marvell.count("|") - 1


def test_a_stale_attack_adds_columns_of_the_whole_run(study: Study) -> None:
    document = comparison(study)
    assert "beyond the model" not in comparison_markdown(document)
    for found in study.documents.values():
        defended = bool(found["config"]["defense"])
        rows = leak_rows({"stale": 0.9}) + evaluation_rows("train", model_leak=0.85)
        bound = {"metric": "run_auc_bound", "step": 0, "value": 0.95}
        more = columns_of([*rows, bound] if defended else rows)
        for column, values in more.items():
            found["records"][column] = found["records"][column] + values
    document = comparison(study)
    none, marvell = document["rows"]
    assert none["beyond_model"]["mean"] == pytest.approx(0.05)
    assert "run_auc_bound" not in none and marvell["run_auc_bound"]["max"] == 0.95
    head, _, *rows = comparison_markdown(document).splitlines()
    assert head.endswith("| stale | beyond the model | bound of the run | time |")
    assert rows[0].endswith("| 0.050 ± 0.000 |  | 1.00× |")
    assert rows[1].endswith("| 0.050 ± 0.000 | 0.950 ± 0.000 | 1.75× |")


# --- the command --------------------------------------------------------------------


def test_the_command_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ("compare", *TINY, "--seeds", "2", "--defense", "marvell:s=4")
    arguments += ("--out", str(tmp_path))
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert (code, err) == (0, "")
    *_, last = out.splitlines()
    assert last == str(tmp_path / "report.html") and Path(last).is_file()
    code, out, _ = call(capsys, monkeypatch, *arguments, "--json")
    found = json.loads(out)
    study = Study.load(tmp_path)
    assert len(study.documents) == 4 and found["report"] == last
    for row in found["rows"]:
        keys = [
            t["key"] for t in study.trials if t["labels"]["defense"] == row["defense"]
        ]
        documents = [study.documents[key] for key in keys]
        aucs = [document["final"]["test_auc"] for document in documents]
        assert row["utility"]["mean"] == pytest.approx(statistics.mean(aucs))
        for attack in ("norm", "cosine", "mean", "median"):
            worst = [worst_leak(table(document), attack) for document in documents]
            assert row["leaks"][attack]["mean"] == pytest.approx(statistics.mean(worst))
            assert row["leaks"][attack]["sd"] == pytest.approx(statistics.stdev(worst))


def worst_leak(records: pd.DataFrame, attack: str) -> float:
    found = records[(records["metric"] == "leak") & (records["attack"] == attack)]
    means = [np.mean(own) for _, own in found.groupby("party")["value"]]
    return max(max(mean, 1 - mean) for mean in means)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--defense", "nothing"], "unknown defense 'nothing'"),
        (["--defense", "iso:q=1"], "unknown parameter 'q'"),
        (["--defense", "objective=mean-squared-error"], "is not for a binary task"),
        (["--attack", "nothing"], "unknown attack 'nothing'"),
        (["--dataset", "diabetes", "--attack", "cosine"], "needs classes"),
        (["--dataset", "nothing"], "unknown dataset"),
        (["--seeds", "none"], "are no seeds"),
        (["--engine", "nothing"], "known: flower, in-process, ray"),
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
        capsys, monkeypatch, "compare", *arguments, "--out", str(folder)
    )
    assert (code, out) == (2, "") and problem in err
    assert not folder.exists()


def test_a_comparison_without_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["compare", *TINY, "--seeds", "1", "--defense", "max-norm"]
    arguments += ["--test-fraction", "0", "--out", str(tmp_path)]
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert (code, err) == (0, "")
    assert "nan" not in out and "--test-fraction" in out
    _, out, _ = call(capsys, monkeypatch, *arguments, "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert found["rows"][0]["utility"]["mean"] is None
    assert "set --test-fraction above 0" in found["verdict"][0]


def test_a_failed_run_is_said_and_the_rest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["compare", *TINY, "--seeds", "1", "--out", str(tmp_path)]
    arguments += ["--defense", "width=4 + optimizer=sgd:lr=1e30"]
    code, out, err = call(capsys, monkeypatch, *arguments)
    assert code == 1 and "none" in out
    assert "party '" in err and "1 of 2 runs failed" in err


def test_a_settings_file_names_a_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('defense = "iso:t=2"\nlimit = 120\nepochs = 1\nattack = "norm"\n')
    arguments = ["compare", "--config", str(file), "--seeds", "1", "--json"]
    code, out, err = call(capsys, monkeypatch, *arguments, "--out", str(tmp_path / "o"))
    assert code == 0, err
    assert [row["defense"] for row in json.loads(out)["rows"]] == ["none", "iso:t=2"]


@pytest.mark.parametrize("dataset", ["digits", "diabetes"])
def test_the_defaults_fit_every_task(
    dataset: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["compare", "--dataset", dataset, *TINY, "--seeds", "1", "--json"]
    code, out, err = call(capsys, monkeypatch, *arguments, "--out", str(tmp_path))
    assert code == 0, err
    task = {"digits": "multiclass", "diabetes": "regression"}[dataset]
    assert [row["defense"] for row in json.loads(out)["rows"]] == list(DEFAULTS[task])
