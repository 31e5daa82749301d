"""Tables of papers as files, their smoke runs, and what is made of the values."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from cli_cases import call
from sklearn.metrics import roc_auc_score

from flower_vfl.errors import ConfigError
from flower_vfl.simulations import reproduce_show, reproducing
from flower_vfl.simulations.capture import CAPTURE_FILE
from flower_vfl.simulations.checking import check_run
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.engines import run_and_attack
from flower_vfl.simulations.experiment_files import (
    PAPERS,
    experiment_names,
    load_experiment,
    read_experiment,
)
from flower_vfl.simulations.experiments import Column
from flower_vfl.simulations.paper_cells import Cell, cells_of, compare, judge
from flower_vfl.simulations.parties import load_rows
from flower_vfl.simulations.predict import predict_saved
from flower_vfl.simulations.readings import Found, completion, leak, neighbours, series
from flower_vfl.simulations.reproduce_show import as_markdown, differences_of
from flower_vfl.simulations.reproducing import (
    measured,
    outdated,
    run_experiment,
    save_results,
    saved_results,
    trials_of,
)
from flower_vfl.simulations.results import PARTIES_FOLDER

NAMES = experiment_names()
# How many figures each table of a paper prints; a figure's are those in the text.
PRINTED = {
    "marvell-table-1": 6,
    "gafm-table-2": 4 * 4 * 6,
    "gafm-table-3": 4 * 2 * 2,
    "gafm-table-4": 3 * 4 * 5,
    "gafm-table-6": 4 * 3 * 5,
    "gafm-table-7": 4 * 2,
    "gafm-table-8": 4 * 5,
    "gafm-table-10": 4 * 2 * 5,
    "gafm-table-11": 3 * 6,
    "gafm-original-table-1": 2 * 6 * 2,
    "gafm-original-table-2": 2 * 5 * 2,
    "gafm-original-table-3": 2 * (4 + 4 + 2),
    "florist-table-1": 7,
    "florist-table-2": 5,
    "florist-table-3": 9,
    "florist-table-5": 20,
    "ladsg-table-4": 36,
    "ladsg-table-5": 36,
    "ladsg-table-6": 40,
    "ladsg-table-7": 36,
}
FIGURES = {
    "marvell-figure-3",
    "marvell-figure-4",
    "gafm-figure-2",
    "gafm-figure-3",
    "gafm-original-figure-3",
    "florist-figure-2",
    "ladsg-figure-4",
    "ladsg-figure-5",
    "ladsg-figure-6",
}
TOML = """
paper = "Paper"
title = "Table 1"
shows = "Two methods."
data = "The data of the paper."
scaled = "Few rows."
minutes = 1
seeds = 2

[base]
dataset = "breast-cancer"
epochs = 1
batch-size = 128
attack = "norm"
optimizer = "adam:lr={lr}"

[let]
lr = 0.01

[quick]
limit = 100

[axes]
dataset = ["Cancer", "Other"]
method = ["none", "noise"]

[choices.dataset.Cancer]
quick = { epochs = 2 }

[choices.dataset.Other]
missing = "not obtained"

[choices.method.none]

[choices.method.noise]
defense = "iso:t={strength}"
width = "{width}"
let = { strength = 4, width = 8, lr = 0.02 }
seeds = 1

[[columns]]
name = "AUC"
reading = "final"
metric = "test_auc"

[[columns]]
name = "loss ratio"
reading = "final"
metric = "test_loss"
beside = "none"

[[columns]]
name = "norm"
reading = "leak"
attack = "norm"
hidden = true

[[columns]]
name = "AUC / norm"
reading = "quotient"
of = ["AUC"]
over = ["norm"]

[figures.Cancer]
none = ["0.9±0.1", "", "1.5"]
noise = ["0.2", "", ""]

[figures.Other]
none = ["0.7", "", ""]

[[claims]]
text = "Noise costs AUC."
row = "Cancer / noise"
column = "AUC"
below = "Cancer / none"

[[differences]]
where = "Cancer / noise / *"
text = "Because."
"""


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    path = tmp_path / "some-table-1.toml"
    path.write_text(TOML, encoding="utf-8")
    return path


def test_every_table_and_figure_of_the_papers_is_there() -> None:
    assert set(NAMES) == PRINTED.keys() | FIGURES


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_the_paper_has_a_cell(name: str) -> None:
    experiment = load_experiment(name)
    printed = [text for row in experiment.figures.values() for text in row if text]
    assert all(re.search(r"\d", text) for text in printed)
    if name in PRINTED:
        assert len(printed) == PRINTED[name]
    else:  # a diagram
        assert "read no values" in experiment.about["scaled"]
        assert experiment.claims
    assert experiment.minutes > 0
    assert all(experiment.about.values())


@pytest.mark.extra  # smoke runs have nearly the same names
@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_names_in_the_settings_mean_something(name: str, data_folder: Path) -> None:
    experiment = load_experiment(name)
    seen = set()
    for row in experiment.rows:
        if row.config is not None and row.config not in seen:
            seen.add(row.config)
            check_run(replace(row.config, limit=row.config.limit or 2000))


@pytest.mark.data
@pytest.mark.parametrize("name", NAMES)
def test_a_smoke_run_fills_every_cell(
    name: str, tmp_path: Path, data_folder: Path
) -> None:
    experiment = load_experiment(name, quick=True)
    study = run_experiment(experiment, tmp_path / name, quick=True, bar=False)
    assert study.errors == {}
    assert "smoke run" in study.title and study.extra["quick"]
    frame = measured(experiment, study)
    cells = cells_of(experiment, frame)
    read = [column.reading for column in experiment.shown]
    for row in experiment.rows:
        for reading, cell in zip(read, cells[row.labels], strict=True):
            optional = reading in ("epoch", "nothing")  # e.g. vanilla has no GAN part
            assert cell.values or row.missing or optional, (row.name, cell.column.name)
            assert all(map(math.isfinite, cell.values))
    text = as_markdown(experiment, frame, quick=True)
    assert reproduce_show.SMOKE.capitalize() in text
    assert f"flower-vfl reproduce {name} --quick" in text


def test_settings_come_in_layers(paper: Path) -> None:
    experiment = read_experiment(paper)
    none, noise, *other = experiment.rows
    assert none.config == RunConfig(
        epochs=1,
        batch_size=128,
        attack="norm",
        optimizer="adam:lr=0.01",
        reproducible_noise=True,
        device="cpu",
    )
    assert noise.config == replace(
        none.config, defense="iso:t=4", width=8, optimizer="adam:lr=0.02"
    )
    assert [row.seeds for row in (none, noise)] == [2, 1]
    assert {row.missing for row in other} == {"not obtained"}
    assert len(trials_of(experiment)) == 3
    quick = read_experiment(paper, quick=True)
    assert quick.rows[0].config == replace(none.config, limit=100, epochs=2)
    assert len(trials_of(quick)) == 2
    assert len(trials_of(quick, seeds=3)) == 6


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('metric = "test_loss"', 'metrik = "test_loss"', "metrik"),
        ('reading = "leak"', 'reading = "leek"', "reading 'leek'"),
        ("epochs = 1\n", "epoch = 1\n", "epoch"),
        ('beside = "none"', 'beside = "nothing"', "nothing"),
        ('none = ["0.9±0.1", "", "1.5"]', 'none = ["0.9"]', "1 figures for 3 columns"),
        ('noise = ["0.2", "", ""]', 'noises = ["0.2", "", ""]', "Cancer / noises"),
        ('row = "Cancer / noise"', 'row = "Cancer"', "row of a claim"),
        ('column = "AUC"', 'column = "Auc"', "column of a claim"),
        ("{strength}", "{power}", "power"),
        ('over = ["norm"]', 'over = ["mean"]', "mean"),
        ("minutes = 1\n", "", "minutes"),
        ('"none", "noise"]', '"none", "nois"]', "choice of method"),
    ],
)
def test_a_mistake_in_a_file_is_told(
    paper: Path, old: str, new: str, problem: str
) -> None:
    assert old in TOML
    paper.write_text(TOML.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        read_experiment(paper)
    assert "some-table-1.toml" in str(caught.value)


def test_an_unknown_table_is_told_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gafm-table-2"):
        load_experiment("gafm-table-22")


def test_values_of_a_table_are_those_of_its_runs(paper: Path, tmp_path: Path) -> None:
    experiment = read_experiment(paper, quick=True)
    study = run_experiment(experiment, tmp_path / "study", seeds=2, bar=False)
    frame = measured(experiment, study, seeds=2)
    documents = {
        (trial["labels"]["method"], trial["labels"]["seed"]): study.documents[
            trial["key"]
        ]
        for trial in study.trials
    }
    final = {key: document["final"] for key, document in documents.items()}
    cells = cells_of(experiment, frame)
    auc, ratio, quotient = cells["Cancer", "noise"]
    seeds = ("0", "1")
    assert auc.values == tuple(final["noise", s]["test_auc"] for s in seeds)
    assert ratio.values == pytest.approx(
        [final["noise", s]["test_loss"] / final["none", s]["test_loss"] for s in seeds]
    )
    flipped = [
        np.mean(
            [
                np.mean(values["values"])
                for name, values in documents["noise", s]["series"].items()
                if name.startswith("leak_flipped_norm/")
            ]
        )
        for s in seeds
    ]
    assert quotient.values == pytest.approx(
        [final["noise", s]["test_auc"] / f for s, f in zip(seeds, flipped, strict=True)]
    )
    assert cells["Other", "none"][0].values == ()
    # kept values read back to the same table
    save_results(experiment, frame, tmp_path / "kept")
    kept = saved_results(experiment, tmp_path / "kept")
    assert kept is not None
    again = cells_of(experiment, kept)["Cancer", "noise"][0]
    assert again.values == pytest.approx(auc.values, rel=1e-5)
    assert outdated(experiment, kept) == []
    changed = paper.read_text().replace("limit = 100", "limit = 120")
    paper.write_text(changed, encoding="utf-8")
    assert outdated(read_experiment(paper, quick=True), kept) == [
        "Cancer / none",
        "Cancer / noise",
    ]


def test_a_run_of_another_table_is_taken_over(paper: Path, tmp_path: Path) -> None:
    experiment = read_experiment(paper, quick=True)
    run_experiment(experiment, tmp_path / "first", bar=False)
    shared = TOML.replace('"none", "noise"]', '"none"]').partition("[figures")[0]
    paper.write_text(shared.replace('beside = "none"\n', ""), encoding="utf-8")
    other = read_experiment(paper, quick=True)
    key = trials_of(other)[0].key
    study = run_experiment(other, tmp_path / "second", bar=False)
    first = tmp_path / "first" / "runs" / key / "result.json"
    second = study.run_folder(key) / "result.json"
    assert first.read_bytes() == second.read_bytes()  # its times are in it


def cell(values: tuple[float, ...], paper: str, **settings: Any) -> Cell:
    return Cell(values, Column("a", "final", **settings), paper)


def test_a_cell_shows_mean_and_deviation() -> None:
    assert cell((0.5, 0.7), "").text == "0.600 ± 0.141"
    assert cell((0.5,), "").text == "0.500"
    assert cell((), "0.3").text == ""
    assert cell((0.5, 0.7), "", seeds="min").text == "0.500"
    assert cell((0.5, 0.7), "", seeds="max", digits=1).text == "0.7"
    assert cell((-1.25,), "", beside="b", how="percent").text == "-1.250%"


@pytest.mark.parametrize(
    ("values", "paper", "differs"),
    [
        ((0.5,), "0.54", False),  # within the tolerance
        ((0.5,), "0.56", True),
        ((0.5,), "0.56±0.04", False),  # within two deviations of the paper
        ((0.4, 0.6), "0.7", False),  # within two of ours
        ((0.5,), "", False),
        ((), "0.9", False),
        ((0.5,), "-0.049", True),
        ((0.0179,), "1.79e-2 ± 7.03e-5", False),
        ((1.12,), "1.12 (58 s)", False),
    ],
)
def test_a_difference_is_one_beyond_chance(
    values: tuple[float, ...], paper: str, differs: bool
) -> None:
    assert cell(values, paper).differs(0.05) is differs


def test_values_are_compared_in_three_ways() -> None:
    assert compare(3.0, 2.0, "ratio") == 1.5
    assert compare(3.0, 2.0, "difference") == 1.0
    assert compare(1.9, 2.0, "percent") == pytest.approx(-5.0)
    assert math.isnan(compare(1.0, 0.0, "ratio"))


def frame_of(values: dict[str, float]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"dataset": "Cancer", "method": name, "seed": 0, "run": "x", "seconds": 1.0}
            | {"AUC": value, "loss ratio": 1.0, "norm": 1.0, "AUC / norm": value}
            for name, value in values.items()
        ]
    )


@pytest.mark.parametrize(("noise", "held"), [(0.4, True), (0.95, False)])
def test_claims_and_differences_are_judged(
    paper: Path, noise: float, held: bool
) -> None:
    experiment = read_experiment(paper)
    frame = frame_of({"none": 0.9, "noise": noise})
    cells = cells_of(experiment, frame)
    assert judge(experiment.claims[0], experiment, cells) == (noise, held)
    assert differences_of(experiment, cells) == {
        "": ["Cancer / none, AUC / norm"],  # 0.9, the paper has 1.5
        "Because.": ["Cancer / noise, AUC"],  # the paper has 0.2
    }
    text = as_markdown(experiment, frame)
    assert f"| Cancer | noise | {noise:.3f} / 0.2 | 1.000 | {noise:.3f} |" in text
    assert "| Other | none | no data / 0.7 | no data | no data |" in text
    assert "```sh\nflower-vfl reproduce some-table-1.toml\n```" in text
    assert "- Differs, **unexplained**: Cancer / none, AUC / norm." in text
    assert "- Differs: Cancer / noise, AUC. Because." in text
    assert ("(held)" if held else "(missed)") in text
    assert "The data of the paper." in text
    assert "1 seed; 2 of 2 rows." in text
    empty = as_markdown(experiment, frame.iloc[:0])
    assert "Not run yet." in empty


DOCUMENT = {
    "epochs": [{"steps": 2}, {"steps": 2}],
    "series": {
        "leak_norm/a": {"steps": [1, 2, 3, 4], "values": [0.1, 0.2, 0.3, 0.4]},
        "leak_norm/b": {"steps": [1, 2, 3, 4], "values": [0.5, 0.6, 0.7, 0.8]},
        "leak_norm/a+b": {"steps": [1], "values": [0.9]},
        "leak_norm/a/random": {"steps": [1], "values": [0.5]},
        "leak_norm@deep.0/a": {"steps": [4], "values": [0.66]},
    },
    "completion": [
        {"attack": "passive:labels=4", "train": 0.2, "labels_only_train": 0.1},
        {"attack": "passive:labels=4", "train": 0.4, "labels_only_train": 0.1},
        {"attack": "active", "train": 0.9, "labels_only_train": None},
    ],
}


def test_series_are_read_by_epoch_and_party() -> None:
    run = Found(DOCUMENT)
    assert leak(run, "norm", flipped=False) == pytest.approx(0.45)
    assert leak(run, "norm", flipped=False, parties="max") == pytest.approx(0.65)
    last = leak(run, "norm", flipped=False, epochs="last", parties="a")
    assert last == pytest.approx(0.35)
    assert series(run, "leak_norm", epochs="first", statistic="max") == 0.4
    assert series(run, "leak_norm", parties="a+b") == 0.9
    layer = leak(run, "norm", flipped=False, layers=["features.0", "deep.0"])
    assert layer == 0.66
    q95 = series(run, "leak_norm", statistic="q95", parties="b")
    assert q95 == pytest.approx(np.quantile([0.5, 0.6, 0.7, 0.8], 0.95))
    for wrong in (
        lambda: leak(run, "cosine"),
        lambda: leak(run, "norm", flipped=False, layers=["first"]),
        lambda: series(run, "leak_norm", parties="c"),
        lambda: series(run, "leak_norm@deep.0", epochs="first"),
        lambda: completion(run, "direct"),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_completions_are_read_by_attack() -> None:
    run = Found(DOCUMENT)
    assert completion(run) == pytest.approx(0.3)
    assert completion(run, "active") == 0.9
    assert completion(run, alone=True) == pytest.approx(0.1)


def test_neighbours_tell_separate_classes_from_mixed_ones(tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    labels = np.arange(200) % 2
    for shift, low, high in ((10.0, 1.0, 1.0), (0.0, 0.3, 0.7)):
        rows = stream.normal(size=(200, 3)) + shift * labels[:, None]
        arrays: dict[str, Any] = {"embedding/passive-1": rows, "label": labels}
        np.savez(tmp_path / CAPTURE_FILE, **arrays)
        assert low <= neighbours(Found({}, tmp_path)) <= high
    with pytest.raises(ConfigError, match="set capture"):
        neighbours(Found({}, tmp_path / "elsewhere"))


def test_the_list_names_every_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call(capsys, monkeypatch, "reproduce", "--list", "--json")
    entries = json.loads(out)
    assert code == 0
    assert [entry["name"] for entry in entries] == NAMES
    assert all(entry["runs"] and entry["minutes"] for entry in entries)
    code, out, _ = call(capsys, monkeypatch, "reproduce", "--list")
    assert code == 0 and "hours in all" in out
    code, _, err = call(capsys, monkeypatch, "reproduce")
    assert code == 2 and "which table" in err


def test_the_command_runs_a_table_and_writes_the_page(
    paper: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flower_vfl.simulations import experiment_files

    monkeypatch.setattr(experiment_files, "PAPERS", tmp_path)
    monkeypatch.setattr(experiment_files, "_order", lambda name: (name,))
    monkeypatch.setattr(reproducing, "RESULTS", tmp_path / "kept")
    out = tmp_path / "runs"
    arguments = ("reproduce", "some-table-1", "--out", str(out))
    code, text, _ = call(capsys, monkeypatch, *arguments, "--seeds", "1")
    assert code == 0
    assert "Paper, Table 1" in text and "The data of the paper." in text
    assert "1 seed; 2 of 2 rows" in text
    assert "Command: flower-vfl reproduce some-table-1" in text
    code, text, _ = call(capsys, monkeypatch, *arguments, "--quick", "--json")
    document = json.loads(text)
    assert code == 0 and document["smoke_run"]
    assert document["rows"][0]["cells"]["AUC"]["paper"] == "0.9±0.1"
    assert document["rows"][2]["missing"] == "not obtained"
    code, text, _ = call(capsys, monkeypatch, *arguments, "--quick", "--markdown")
    assert code == 0 and "**Smoke run" in text
    page = tmp_path / "results.md"
    write = ("reproduce", "--write", str(page), "--from")
    quick = str(out / "reproduce-some-table-1-quick")
    code, _, err = call(capsys, monkeypatch, *write, quick)
    assert code == 2 and "smoke run" in err and not page.exists()
    code, text, _ = call(
        capsys, monkeypatch, *write, str(out / "reproduce-some-table-1")
    )
    assert code == 0
    assert "## Paper" in page.read_text() and "| Cancer | none |" in page.read_text()
    assert (tmp_path / "kept" / "some-table-1.csv").is_file()


def test_the_page_in_docs_is_the_one_that_would_be_written() -> None:
    page = PAPERS.parents[1] / "docs" / "results.md"
    assert page.read_text(encoding="utf-8") == reproduce_show.results_page()


def test_shared_files_are_toml() -> None:
    for path in (PAPERS / "shared").glob("*.toml"):
        assert tomllib.loads(path.read_text(encoding="utf-8"))["paper"]


def test_training_rows_are_evaluated_at_the_end(tmp_path: Path) -> None:
    config = RunConfig(epochs=2, train_metrics=True, out=str(tmp_path))
    config = replace(config, state_dir=str(tmp_path / PARTIES_FOLDER))
    found = run_and_attack(config, "in-process")["final"]
    frame = predict_saved(tmp_path, "train")
    rows = load_rows(config, 0)
    truth = dict(zip(rows.ids.astype(str), rows.labels, strict=True))
    labels = [truth[name] for name in frame["id"].astype(str)]
    scores = frame["probability of benign"]
    auc = roc_auc_score(labels, scores)
    assert found["train_auc"] == pytest.approx(auc, abs=1e-9)
    assert "train_auc" not in run_and_attack(RunConfig(epochs=1), "in-process")["final"]
