"""Tables as files: their settings, runs, values and claims, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from cli_cases import call

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.papers import reproduce as reproducing
from flower_vfl.simulations.papers.experiments import Claim, read_experiment
from flower_vfl.simulations.papers.reproduce import (
    add_saved,
    cells_of,
    judge,
    measured,
    outdated,
    run_experiment,
    save_results,
    saved_results,
    trials_of,
)
from flower_vfl.simulations.papers.show import as_markdown, differences_of
from flower_vfl.simulations.results import table

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
headline = true

[[differences]]
where = "Cancer / noise / *"
text = "Because."
"""


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    path = tmp_path / "some-table-1.toml"
    path.write_text(TOML, encoding="utf-8")
    return path


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
    paper.write_text(TOML.replace("\nmethod = [", "\nway = ["), encoding="utf-8")
    shared = read_experiment(paper)  # an axis without choices of its own
    assert [row.config for row in shared.rows] == [
        row.config for row in experiment.rows
    ]
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
        table(documents["noise", s])
        .query("metric == 'leak_flipped' and attack == 'norm'")
        .groupby("party")["value"]
        .mean()
        .mean()
        for s in seeds
    ]
    assert quotient.values == pytest.approx(
        [final["noise", s]["test_auc"] / f for s, f in zip(seeds, flipped, strict=True)]
    )
    assert cells["Other", "none"][0].values == ()
    # kept values read back to the same table
    save_results(experiment, frame, tmp_path / "kept")
    kept = saved_results(experiment, tmp_path / "kept")
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


def frame_of(values: dict[str, list[float]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"dataset": "Cancer", "method": name, "seed": i, "run": f"{name}{i}"}
            | {
                "seconds": 1.0,
                "AUC": value,
                "loss ratio": 1.0,
                "norm": 1.0,
                "AUC / norm": value,
            }
            for name, own in values.items()
            for i, value in enumerate(own)
        ]
    )


@pytest.mark.parametrize(
    ("noise", "spread", "says"),
    [
        (0.4, 0.01, "held"),
        (0.9, 0.0, "missed"),  # equal is not below
        (0.95, 0.01, "missed"),
        (0.85, 0.2, "undecided"),  # within two standard errors
        (0.87, 0.01, "held"),  # 5.2 standard errors of three seeds
        (0.88, 0.01, "held"),  # 3.5
        (0.89, 0.01, "undecided"),  # 1.7
    ],
)
def test_claims_and_differences_are_judged(
    paper: Path, noise: float, spread: float, says: str
) -> None:
    experiment = read_experiment(paper)
    around = [noise - spread, noise, noise + spread]
    frame = frame_of({"none": [0.9, 0.9, 0.9], "noise": around})
    cells = cells_of(experiment, frame)
    verdict = judge(experiment.claims[0], experiment, cells)
    assert verdict.own is not None and verdict.own.value == pytest.approx(noise)
    assert [cell.value for cell in verdict.beside] == [pytest.approx(0.9)]
    assert verdict.says == says
    assert differences_of(experiment, cells) == {
        "": ["Cancer / none, AUC / norm"],  # 0.9, the paper has 1.5
        "Because.": ["Cancer / noise, AUC"],  # the paper has 0.2
    }
    text = as_markdown(experiment, frame)
    shown = f"{noise:.3f} ± {spread / 3**0.5:.3f}"
    assert f"| Cancer | noise | {shown} / 0.2 | 1.000 ± 0.000 | {shown} |" in text
    assert "| Other | none | no data / 0.7 | no data | no data |" in text
    assert "Two methods. `flower-vfl reproduce some-table-1.toml`" in text
    assert "- Differs, **unexplained**: Cancer / none, AUC / norm." in text
    assert "- Differs: Cancer / noise, AUC. Because." in text
    assert "The data of the paper." in text
    assert "3 seeds; 2 of 2 rows; 0.1 minutes" in text
    empty = as_markdown(experiment, frame.iloc[:0])
    assert "Not run yet." in empty


@pytest.mark.parametrize(
    ("none", "noise", "says"),
    [
        # the seeds differ by 0.2, but noise costs 0.01 with every one of them
        ([0.5, 0.6, 0.7], [0.49, 0.589, 0.691], "held"),
        ([0.5, 0.6, 0.7], [0.69, 0.49, 0.589], "undecided"),
        ([0.5, 0.6, 0.7, 0.8], [0.49, 0.589, 0.691], "undecided"),  # no pairs
        ([0.5], [0.4], "undecided"),
        ([], [0.4, 0.4, 0.4], ""),
    ],
)
def test_rows_are_compared_by_seed(
    paper: Path, none: list[float], noise: list[float], says: str
) -> None:
    experiment = read_experiment(paper)
    cells = cells_of(experiment, frame_of({"none": none, "noise": noise}))
    assert judge(experiment.claims[0], experiment, cells).says == says


def test_limits_are_judged_by_the_error_of_a_mean(paper: Path) -> None:
    experiment = read_experiment(paper)
    values = [0.88, 0.9, 0.92]  # standard error 0.0115, twice that 0.023
    cells = cells_of(experiment, frame_of({"none": values}))

    def says(**limits: float) -> str:
        claim = Claim("", "Cancer / none", "AUC", **limits)
        return judge(claim, experiment, cells).says

    assert [says(least=limit) for limit in (0.87, 0.88, 0.93)] == [
        "held",
        "undecided",
        "missed",
    ]
    assert says(most=0.93) == "held" and says(least=0.84, most=0.84) == "missed"
    assert says() == ""


def test_only_missing_runs_are_made_and_saved_rows_are_kept(
    paper: Path, tmp_path: Path
) -> None:
    experiment = read_experiment(paper, quick=True)
    study = run_experiment(experiment, tmp_path / "all", bar=False)
    frame = measured(experiment, study)
    saved, lacking = frame.iloc[:1], frame.iloc[1:]
    study = run_experiment(experiment, tmp_path / "part", bar=False, saved=saved)
    assert [trial["digest"] for trial in study.trials] == list(lacking["run"])
    both = add_saved(experiment, measured(experiment, study), saved)
    values = both.drop(columns="seconds").reset_index(drop=True)
    pd.testing.assert_frame_equal(values, frame.drop(columns="seconds"))
    study = run_experiment(experiment, tmp_path / "none", bar=False, saved=frame)
    nothing = measured(experiment, study)
    assert len(nothing) == 0 and add_saved(experiment, nothing, frame).equals(frame)
    # settings that have changed since
    kept = add_saved(experiment, lacking, saved.assign(run="changed"))
    assert list(kept["run"]) == list(lacking["run"])
    # the run of a row that has another name now, or of another row with its settings
    kept = add_saved(experiment, lacking, saved.assign(method="renamed"))
    assert kept.reset_index(drop=True).equals(frame)


def test_the_command_runs_a_table_and_writes_the_page(
    paper: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flower_vfl.simulations.papers import experiments as experiment_files

    monkeypatch.setattr(experiment_files, "PAPERS", tmp_path)
    monkeypatch.setattr(experiment_files, "_order", lambda name: (name,))
    monkeypatch.setattr(reproducing, "RESULTS", tmp_path / "kept")
    out = tmp_path / "runs"
    arguments = ("reproduce", "some-table-1", "--out", str(out))
    code, text, _ = call(capsys, monkeypatch, *arguments, "--seeds", "1")
    assert code == 0
    assert "Paper, Table 1" in text and "The data of the paper." in text
    assert "1 seed; 2 of 2 rows" in text and "Time: 0." in text
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
    code, text, _ = call(capsys, monkeypatch, "reproduce", "--claims", "--json")
    assert code == 0 and json.loads(text)[0] == {
        "table": "Paper, Table 1",
        "claim": "Noise costs AUC.",
        "paper": "0.2 < 0.9±0.1",
        "ours": json.loads(text)[0]["ours"],
        "verdict": "undecided",
        "headline": True,
    }
    assert "| Paper, Table 1 | Noise costs AUC. |" in page.read_text()
    every = ("reproduce", "--all", "--quick", "--out", str(out))
    code, text, _ = call(capsys, monkeypatch, *every)
    assert code == 0 and "Paper, Table 1 (smoke run" in text
