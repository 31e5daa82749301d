"""A study: what is finished is kept, what fails is said, and one table has it all."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from process_grid import FORKS
from study_cases import columns_of, document_of, evaluation_rows, leak_rows

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.simulations import plugins
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import FORMAT, load_result, table, tables
from flower_vfl.simulations.studies import study as study_module
from flower_vfl.simulations.studies import trials as trials_module
from flower_vfl.simulations.studies.run_metrics import (
    completions,
    largest_leaks,
    leaks,
    run_columns,
    utilities,
)
from flower_vfl.simulations.studies.study import Study, run_study
from flower_vfl.simulations.studies.trials import Trial

TINY = RunConfig(limit=120, epochs=1, attack="norm,mean", reproducible_noise=True)


def trials_of(*defenses: str, seeds: Sequence[int] = (0,)) -> list[Trial]:
    return [
        Trial(
            {"defense": defense or "none", "seed": str(seed)},
            replace(TINY, defense=defense, seed=seed),
        )
        for defense in defenses
        for seed in seeds
    ]


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Replace training by a document; return what was asked for."""
    asked: list[RunConfig] = []

    def pretend(config: RunConfig, engine: str) -> tuple[Any, dict[str, bytes]]:
        asked.append(config)
        if config.defense == "iso":
            raise PartyError("passive-1", "it is gone", "Start it again", step=7)
        if config.defense == "geno":
            raise ZeroDivisionError("a fault of the method itself")
        return document_of(config), {"capture.npz": b"rows"}

    monkeypatch.setattr(trials_module, "run_trial", pretend)
    return asked


# --- keys ---------------------------------------------------------------------------


def test_a_key_follows_from_what_decides_the_result() -> None:
    trial = Trial({"defense": "marvell:s=4", "seed": "0"}, TINY)
    elsewhere = replace(TINY, out="a", state_dir="b", resume=True, timeout=9.0)
    assert trial.key.startswith("defense-marvell-s-4-seed-0-")
    assert Trial(trial.labels, elsewhere).key == trial.key
    assert Trial(trial.labels, replace(TINY, width=8)).key != trial.key
    assert Trial(trial.labels, TINY, "ray").key != trial.key


def test_a_key_is_the_name_of_a_folder() -> None:
    labels = {"defense": "passive-1=iso:t=9; *=../a | gc", "x": "y" * 300}
    key = Trial(labels, TINY).key
    assert Path(key).name == key and not key.startswith(".") and len(key) < 80


def test_a_result_without_a_newer_setting_is_still_the_trials() -> None:
    trial = Trial({}, TINY)
    document = document_of(TINY)
    del document["config"]["leak_layers"]
    assert trial.made(document)
    assert not trial.made(document_of(replace(TINY, width=8)))
    assert not Trial({}, TINY, "ray").made(document)
    assert not trial.made(document | {"format": FORMAT - 1})


# --- what is run, and what is not ---------------------------------------------------


def test_what_is_finished_is_not_run_again(
    tmp_path: Path, no_runs: list[RunConfig]
) -> None:
    first = run_study(tmp_path, "compare", "t", trials_of("", seeds=(0, 1)))
    assert [config.seed for config in no_runs] == [0, 1]
    again = run_study(tmp_path, "compare", "t", trials_of("", seeds=(0, 1, 2)))
    assert [config.seed for config in no_runs] == [0, 1, 2]
    assert len(first.documents) == 2 and len(again.documents) == 3
    assert (again.run_folder(again.trials[0]["key"]) / "capture.npz").is_file()


def test_a_trial_that_comes_twice_is_run_once(
    tmp_path: Path, no_runs: list[RunConfig]
) -> None:
    study = run_study(tmp_path, "sweep", "t", trials_of("", "", seeds=(0, 0)))
    assert len(no_runs) == len(study.trials) == 1


@pytest.mark.parametrize("broken", ["", "{", '{"format": 1}', "[]"])
def test_a_broken_result_is_run_again(
    tmp_path: Path, no_runs: list[RunConfig], broken: str
) -> None:
    study = run_study(tmp_path, "compare", "t", trials_of(""))
    (study.run_folder(study.trials[0]["key"]) / "result.json").write_text(broken)
    study = run_study(tmp_path, "compare", "t", trials_of(""))
    assert len(no_runs) == 2 and len(study.documents) == 1


def test_an_error_does_not_lose_the_others(
    tmp_path: Path, no_runs: list[RunConfig]
) -> None:
    study = run_study(tmp_path, "compare", "t", trials_of("iso", "", "geno"))
    assert len(study.documents) == 1 and len(study.errors) == 2
    party, own = study.errors.values()
    assert (party["party"], party["step"]) == ("passive-1", 7)
    assert party["remedy"] == "Start it again"
    assert own["error"] == "ZeroDivisionError: a fault of the method itself"
    assert Study.load(tmp_path).errors == study.errors
    run_study(tmp_path, "compare", "t", trials_of("iso", "", "geno"))
    assert [config.defense for config in no_runs[3:]] == ["iso", "geno"]


def test_an_interrupted_study_leaves_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: RunConfig, engine: str) -> Any:
        if config.seed == 1:
            raise KeyboardInterrupt
        return document_of(config), {}

    monkeypatch.setattr(trials_module, "run_trial", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(tmp_path, "compare", "t", trials_of("", seeds=(0, 1)))
    assert len(pd.read_csv(tmp_path / "results.csv")) == 1


def test_a_folder_of_another_study_is_refused(
    tmp_path: Path, no_runs: list[RunConfig]
) -> None:
    run_study(tmp_path, "sweep", "t", trials_of(""))
    with pytest.raises(ConfigError, match="another kind, sweep; choose another --out"):
        run_study(tmp_path, "compare", "t", trials_of(""))
    with pytest.raises(ConfigError, match=r"has no study\.json"):
        Study.load(tmp_path / "runs")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"workers": 0}, "at least 1"),
        ({"gpus": 0.5}, "give --workers or --ray-address too"),
        ({"workers": 2, "engine": "ray"}, "--workers 1"),
        ({"engine": "moon"}, "known: flower, in-process, ray"),
    ],
)
def test_what_cannot_be_run_is_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    engine = settings.pop("engine", "in-process")
    trials = [Trial({}, TINY, engine)]
    with pytest.raises(ConfigError, match=problem):
        run_study(tmp_path, "compare", "t", trials, **settings)
    with pytest.raises(ConfigError, match="at least one run"):
        run_study(tmp_path, "compare", "t", [])


# --- the table ----------------------------------------------------------------------


def test_the_table_has_labels_settings_and_measures(
    tmp_path: Path, no_runs: list[RunConfig]
) -> None:
    trials = trials_of("", "marvell", seeds=(0, 1))
    wide = replace(trials[-1], config=replace(trials[-1].config, width=8))
    study = run_study(tmp_path, "compare", "t", [*trials[:-1], wide])
    frame = study.frame()
    assert list(frame["defense"]) == ["none", "none", "marvell", "marvell"]
    assert list(frame["seed"]) == [0, 1, 0, 1] and frame["seed"].dtype.kind == "i"
    assert list(frame["width"]) == [16, 16, 16, 8]
    assert "epochs" not in frame  # the same everywhere
    assert set(frame["test_auc"]) == {0.9} and set(frame["leak_norm"]) == {0.8}
    for read in (pd.read_csv, pd.read_parquet):
        path = study.write_table({pd.read_csv: "csv"}.get(read, "parquet"))
        found = read(path).astype({"did_not_train": object})
        found = found.fillna({"did_not_train": ""})  # CSV has no empty texts
        pd.testing.assert_frame_equal(found, frame, check_dtype=False)


def records_of(*rows: dict[str, Any], **document: Any) -> pd.DataFrame:
    return tables({"a": {"records": columns_of(rows), **document}})


def test_leaks_are_flipped_after_the_mean_and_the_largest_single_party_counts() -> None:
    measured = [
        *leak_rows({"norm": 0.0}),
        *leak_rows({"norm": 0.9}),
        *leak_rows({"norm": 0.6}, "passive-2"),
        *leak_rows({"norm": 0.99}, "passive-2", random=True),
        *leak_rows({"norm": 0.95}, "passive-1+passive-2"),
    ]
    measured += [row | {"layer": "0"} for row in leak_rows({"norm": 1.0})]
    records = records_of(*measured, *evaluation_rows(auc=0.9))
    found = leaks(records).set_index(["party", "random", "layer"])["leak"]
    assert found["passive-1", False, ""] == pytest.approx(0.55)  # 1 - mean(0.0, 0.9)
    assert found["passive-2", False, ""] == 0.6
    assert largest_leaks(records)["leak"].tolist() == [0.6]
    row = run_columns(records).loc["a"]
    assert row["flipped_leak_norm"] == pytest.approx(0.95)
    assert row["leak_norm/passive-1+passive-2"] == 0.95
    assert row["leak_norm/passive-2/random"] == 0.99
    assert row["leak_norm@0/passive-1"] == 1.0
    # |rho| has no other side: its mean is taken over the batches as they are
    records = records_of(*measured, *evaluation_rows(pearson=0.7, rmse=1.0))
    assert largest_leaks(records)["leak"].tolist() == [pytest.approx(0.95)]


def test_a_stale_leak_is_that_of_the_last_epoch_less_what_the_model_tells() -> None:
    stale = "stale:score=cosine"
    late = [
        row | {"step": 8, "epoch": 2}
        for row in [
            *leak_rows({"norm": 0.8, stale: 0.9}),
            *leak_rows({stale: 0.95}, "passive-2"),
            *leak_rows({stale: 0.99}, "passive-1+passive-2"),
        ]
    ]
    early = leak_rows({"norm": 0.6, stale: 0.6})
    model = [
        row | {"step": 8, "epoch": 2}
        for row in evaluation_rows("train", auc=0.85, model_leak=0.85)
    ]
    bounds = [
        {"metric": "run_auc_bound", "step": 0, "epoch": epoch, "value": value}
        for epoch, value in ((2, 0.9), (1, 0.7))
    ]
    given = [*early, *late, *bounds, *evaluation_rows(auc=0.9)]
    records = records_of(*given, *model, *model)  # evaluated twice
    row = run_columns(records).loc["a"]
    assert row["leak_norm"] == pytest.approx(0.7)
    assert (row[f"leak_{stale}/passive-1"], row[f"leak_{stale}"]) == (0.9, 0.95)
    assert row["beyond_model"] == pytest.approx(0.1)
    assert row["run_auc_bound"] == 0.9
    found = leaks(records).set_index(["attack", "party"])["beyond"]
    assert found[stale, "passive-1+passive-2"] == pytest.approx(0.14)
    assert pd.isna(found["norm", "passive-1"])
    plain = run_columns(records_of(*early, *late, *evaluation_rows(auc=0.9)))
    assert not {"beyond_model", "run_auc_bound"} & set(plain)
    nothing = run_columns(records_of(*evaluation_rows(auc=0.9)))
    assert list(nothing) == ["utility", "test_auc"]


def test_the_main_metric_is_that_of_the_task() -> None:
    rows = [*evaluation_rows(auc=0.9), *evaluation_rows("valid", auc=0.8)]
    assert utilities(records_of(*rows)).loc["a"].tolist() == [
        "test_auc",
        "auc",
        0.9,
        False,
    ]
    rows = [
        *evaluation_rows("valid", accuracy=0.5),
        *evaluation_rows("train", accuracy=0.8),
    ]
    later = evaluation_rows("valid", accuracy=0.6)[0] | {"epoch": 2, "step": 4}
    found = utilities(records_of(*rows, later)).loc["a"]
    assert found.tolist() == ["valid_accuracy", "accuracy", 0.6, False]


def test_completion_is_the_mean_of_repetitions_of_the_best_party() -> None:
    def entry(attack: str, party: int, train: float, test: float | None) -> Any:
        found = {"attack": attack, "party": f"passive-{party}"}
        alone = {"labels_only_train": None, "labels_only_test": None}
        return {**found, **alone, "train": train, "test": test}

    found = [entry("passive:labels=4", 1, 0.6, 0.5)]
    found += [entry("passive:labels=4", 2, 0.7, None)]
    found += [entry("passive:labels=4", 2, 0.9, None)]
    known = completions(records_of(completion=found))
    assert known["attack"].tolist() == ["passive", "passive"]
    values = dict(zip(known["split"], known["value"], strict=True))
    assert values == {"train": pytest.approx(0.8), "test": 0.5}
    found.append(entry("passive:labels=8", 1, 0.75, 0.7))
    several = completions(records_of(completion=found))
    assert "passive:labels=8" in several["attack"].tolist()


@pytest.mark.parametrize(
    "records",
    [None, {}, {"metric": ["auc"]}, columns_of([{"value": "<b>"}]), "auc"],
)
def test_records_that_are_none_are_refused(records: Any) -> None:
    with pytest.raises(ConfigError, match="not what flower-vfl writes"):
        table({"records": records})


def test_an_older_format_is_to_be_run_again(
    tmp_path: Path, no_runs: list[RunConfig]
) -> None:
    study = run_study(tmp_path, "compare", "t", trials_of(""))
    result = study.run_folder(study.finished[0]) / "result.json"
    result.write_text(json.dumps(document_of(TINY) | {"format": 1}))
    for read in (lambda: load_result(result.parent), lambda: Study.load(tmp_path)):
        with pytest.raises(ConfigError, match=r"has format 1, .* made it again"):
            read()
    run_study(tmp_path, "compare", "t", trials_of(""))
    assert len(no_runs) == 2 and Study.load(tmp_path).finished == study.finished


# --- real runs ----------------------------------------------------------------------


def finished(folder: Path) -> dict[str, tuple[int, int]]:
    files = folder.glob("runs/*/result.json")
    return {f.parent.name: (f.stat().st_ino, f.stat().st_mtime_ns) for f in files}


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    trials = trials_of("", "iso", seeds=range(5))
    study = (tmp_path, "sweep", "t", trials)
    process = FORKS.Process(target=run_study, args=study)
    process.start()
    while len(finished(tmp_path)) < 2:
        assert process.is_alive(), "it ended before it could be killed"
        time.sleep(0.005)
    process.kill()
    process.join()
    before = finished(tmp_path)
    assert 2 <= len(before) < len(trials)
    run_study(*study)
    after = finished(tmp_path)
    assert len(after) == len(trials)
    assert {key: after[key] for key in before} == before
    assert len(pd.read_csv(tmp_path / "results.csv")) == len(trials)
    left = [path.name for path in tmp_path.rglob(".*")]
    assert len(left) <= 1  # what was being written at that moment


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.long
def test_runs_on_ray_find_the_same_as_runs_here(own: str, tmp_path: Path) -> None:
    """And know the methods of one's own."""
    import ray

    plugins.use_plugins([own])
    attack = "norm,first-column,passive:labels=10,steps=20"
    config = replace(TINY, attack=attack, defense="flip", objective="small")
    trials = [Trial({"seed": str(s)}, replace(config, seed=s)) for s in (0, 1)]
    wrong = Trial({"seed": "2"}, replace(config, seed=2, data_dir="", dataset="moon"))
    here = run_study(tmp_path / "here", "sweep", "t", [*trials, wrong])
    there = run_study(tmp_path / "there", "sweep", "t", [*trials, wrong], workers=2)
    assert not ray.is_initialized()
    assert list(here.errors) == list(there.errors) == [wrong.key]
    assert "unknown dataset 'moon'" in there.errors[wrong.key]["error"]
    assert set(there.documents) == {trial.key for trial in trials}
    for key, document in there.documents.items():
        assert document["workers"] == 2
        for part in ("final", "completion", "config"):
            assert document[part] == here.documents[key][part]
        both = [table(d).query("step > 0") for d in (document, here.documents[key])]
        pd.testing.assert_frame_equal(*both)
    assert set(there.frame()) >= {"leak_first-column", "test_auc"}


def test_a_real_run_is_kept_without_its_parties(tmp_path: Path) -> None:
    trial = Trial({"seed": "0"}, replace(TINY, capture=5))
    study = run_study(tmp_path, "compare", "t", [trial])
    folder = study.run_folder(trial.key)
    assert {path.name for path in folder.iterdir()} == {"result.json", "capture.npz"}
    kept = json.loads((folder / "result.json").read_text())
    assert kept["config"]["out"] == kept["config"]["state_dir"] == ""
    assert Study.load(tmp_path).documents[trial.key] == kept
    assert study_module.STUDY_FILE in {path.name for path in tmp_path.iterdir()}
