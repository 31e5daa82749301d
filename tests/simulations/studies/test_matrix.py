"""A matrix: the score, which settings are chosen, what a cell is, and the ranking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matrix_cases import CHOSEN, matrix_study, matrix_trials

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import load_rows
from flower_vfl.simulations.studies.matrix import (
    ALL,
    COLUMNS,
    TUNING,
    Grid,
    cells,
    choose,
    dcs,
    fitting,
    ranking,
    reported_trials,
    tuning_trials,
)

# --- the score ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leak", "utility", "beta", "score"),
    [
        (0.5, 0.9, 0.5, 1.0),  # nothing found, nothing lost
        (0.9, 0.6, 0.5, 1 / (1 + np.sqrt(0.5 * 0.16 + 0.5 * 0.09))),
        (0.8, 0.5, 0.25, 1 / (1 + np.sqrt(0.75 * 0.09 + 0.25 * 0.16))),
        (1.0, 0.9, 0.0, 1 / 1.5),  # the attack alone counts
        (1.0, 0.7, 1.0, 1 / 1.2),  # the model alone counts
        (0.5, 0.95, 0.5, 1.0),  # a better model is not punished
        (0.4, 0.9, 0.5, 1.0),  # nor an attack that is worse than a guess
    ],
)
def test_the_score_is_as_worked_by_hand(
    leak: float, utility: float, beta: float, score: float
) -> None:
    assert float(dcs(leak, utility, 0.9, beta)) == pytest.approx(score)


def test_a_weight_is_from_0_to_1() -> None:
    with pytest.raises(ConfigError, match=r"beta is a weight from 0 to 1, got 1\.5"):
        dcs(0.5, 0.5, 0.5, beta=1.5)


# --- what is run --------------------------------------------------------------------


def test_every_method_of_the_grid_has_as_many_settings() -> None:
    counts = {name: len(own) for name, own in Grid.read().methods.items()}
    assert {name for name, count in counts.items() if count != 4} == {"max-norm"}
    assert len(Grid.read().datasets) >= 6 and len(Grid.read().attacks) >= 10


def test_a_method_that_fits_no_class_problem_is_left_out_with_the_reason() -> None:
    grid = Grid(["breast-cancer", "digits"], ["norm", "passive"], ["norm"], {})
    methods = {"iso": ["iso"], "gafm-original": ["gafm-original + width=1"]}
    config = RunConfig(limit=60)
    parts, reasons = fitting(Grid(**{**vars(grid), "methods": methods}), config)
    assert set(parts["breast-cancer"].methods) == set(methods)
    assert set(parts["digits"].methods) == {"iso"}
    assert "not for a multiclass task" in reasons["digits"]["gafm-original"]
    assert parts["digits"].attacks == ["norm"] and "passive" in reasons["digits"]


@pytest.mark.parametrize(
    ("methods", "datasets", "problem"),
    [
        ({"x": ["marvel:s=4"]}, ["breast-cancer"], "'x' fits no dataset.*marvell"),
        ({"iso": ["iso"]}, ["diabetes"], "'diabetes' is a regression"),
    ],
)
def test_a_grid_that_cannot_be_run_is_refused(
    methods: dict[str, list[str]], datasets: list[str], problem: str
) -> None:
    grid = Grid(datasets, ["norm"], ["norm"], methods)
    with pytest.raises(ConfigError, match=problem):
        fitting(grid, RunConfig(limit=60))


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"marvel.*max-norm"):
        Grid.read().only([], ["marvel"])


def test_tuning_and_report_share_test_rows_but_no_seed() -> None:
    trials = matrix_trials()
    seeds: dict[str, set[int]] = {}
    for trial in trials:
        seeds.setdefault(trial.labels["stage"], set()).add(trial.config.seed)
    assert seeds == {"tuning": {100}, "reported": {0, 1}}
    own = [t.config for t in trials if t.labels["dataset"] == "breast-cancer"]
    first, last = (load_rows(config, 0).codes for config in (own[0], own[-1]))
    assert own[0].seed != own[-1].seed and (first == last).all()


def test_a_method_with_one_setting_is_not_tuned() -> None:
    parts = {"digits": Grid(["digits"], ["norm"], ["norm"], {"max-norm": ["max-norm"]})}
    tuned = tuning_trials(parts, RunConfig(), 100)
    assert [trial.labels["method"] for trial in tuned] == ["none"]
    shown = reported_trials(parts, RunConfig(), {}, [0])
    assert [trial.labels["method"] for trial in shown] == ["none", "max-norm"]


# --- what was found -----------------------------------------------------------------


def test_a_cell_is_an_attack_on_a_run(tmp_path: Path) -> None:
    found = cells(matrix_study(tmp_path))
    assert list(found.columns) == COLUMNS
    assert len(found) == 2 * 3 * 2 * 2  # datasets, methods, seeds, attacks
    row = found.query(
        "dataset == 'spambase' and method == 'iso' and attack == 'cosine' and seed == 1"
    ).iloc[0]
    assert row["setting"] == "iso:t=4" and row["untrained"] == ""
    assert row["leak"] == pytest.approx(0.7)
    assert row["utility"] == pytest.approx(0.87)  # of its own seed, on test rows
    assert row["utility_none"] == pytest.approx(0.92)
    score = 1 / (1 + np.sqrt(0.5 * 0.2**2 + 0.5 * 0.05**2))
    assert row["dcs"] == pytest.approx(score)


def test_model_completion_is_an_attack_on_training_rows(tmp_path: Path) -> None:
    study = matrix_study(tmp_path)
    success = {"train": 0.8, "test": 0.7, "labels_only_train": 0.6}
    entry = {"attack": "passive:steps=3", "party": "passive-1", **success}
    for document in study.documents.values():
        document["completion"] = [entry | {"labels_only_test": None}]
    found = cells(study)
    assert found["attack"].tolist() == ["norm", "cosine", "passive"] * 12
    assert set(found.query("attack == 'passive'")["leak"]) == {0.8}
    for row in found.itertuples():
        score = dcs(row.leak, row.utility, row.utility_none)
        assert row.dcs == pytest.approx(float(score))


def test_a_setting_is_chosen_on_validation_rows_and_only_if_it_trained(
    tmp_path: Path,
) -> None:
    study = matrix_study(tmp_path)
    tuned = cells(study, TUNING)
    assert set(tuned["seed"]) == {100} and set(tuned["attack"]) == {"norm"}
    assert tuned.query("setting == 'iso:t=4'")["utility"].tolist() == [0.86] * 2
    chosen = {key: text for key, text in choose(study).items() if key[1] != "none"}
    assert chosen == CHOSEN


def test_a_run_without_its_counterpart_has_no_cell(tmp_path: Path) -> None:
    study = matrix_study(tmp_path)
    for trial in study.trials:
        labels = trial["labels"]
        if labels["method"] == "none" and labels["seed"] == "1":
            del study.documents[trial["key"]]
    assert set(cells(study)["seed"]) == {0}


def test_tuning_without_a_measured_attack_is_refused(tmp_path: Path) -> None:
    study = matrix_study(tmp_path)
    for document in study.documents.values():
        kept = [m == "auc" for m in document["records"]["metric"]]
        for name, column in document["records"].items():
            own = zip(column, kept, strict=True)
            document["records"][name] = [value for value, keep in own if keep]
    with pytest.raises(ConfigError, match=r"no attack was measured.*--leak-every 1"):
        choose(study)


def test_the_ranking_is_by_mean_score(tmp_path: Path) -> None:
    found = ranking(cells(matrix_study(tmp_path)))
    own = found[found["dataset"] == "breast-cancer"]
    assert own["method"].tolist() == ["marvell", "iso", "none"]
    assert own["rank"].tolist() == [1, 2, 3]
    best = own.iloc[0]
    scores = [1 / (1 + np.sqrt(0.5 * leak**2 + 0.5 * 0.02**2)) for leak in (0.0, 0.1)]
    assert best["dcs"] == pytest.approx(np.mean(scores))
    assert best["leak"] == pytest.approx(0.55)
    assert (best["largest_leak"], best["largest_attack"]) == (
        pytest.approx(0.6),
        "cosine",
    )
    whole = found[found["dataset"] == ALL].set_index("method")
    by_dataset = found[found["dataset"] != ALL].groupby("method")["dcs"].mean()
    pd.testing.assert_series_equal(
        whole["dcs"].sort_index(), by_dataset, check_names=False
    )


def test_the_weight_decides_the_ranking(tmp_path: Path) -> None:
    found = cells(matrix_study(tmp_path))
    first = ranking(found, beta=1.0).groupby("dataset").first()["method"]
    assert set(first) == {"none"}  # nothing is lost without a defense
    first = ranking(found, beta=0.0).groupby("dataset").first()["method"]
    assert first["breast-cancer"] == "marvell" and first["spambase"] == "iso"


def test_what_did_not_train_is_ranked_last() -> None:
    rows = [("none", 1.0, 0.9, ""), ("ng", 0.5, 0.5, "no better than a guess")]
    found = pd.DataFrame(rows, columns=["method", "leak", "utility", "untrained"])
    found = found.assign(dataset="a", setting="", attack="norm", seed=0)
    ranked = ranking(found.assign(utility_none=0.9))
    assert ranked["method"].tolist() == ["none", "ng"] * 2
    assert ranked["dcs"].iloc[1] > ranked["dcs"].iloc[0]


def test_over_all_datasets_only_shared_ones_count(tmp_path: Path) -> None:
    found = cells(matrix_study(tmp_path))
    part = found[~((found["dataset"] == "spambase") & (found["method"] == "iso"))]
    ranked = ranking(part)
    whole = ranked[ranked["dataset"] == ALL].set_index("method")["dcs"]
    own = ranked[ranked["dataset"] == "breast-cancer"].set_index("method")["dcs"]
    pd.testing.assert_series_equal(whole, own)
