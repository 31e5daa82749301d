"""Which runs did not train, and what a comparison amounts to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from study_cases import columns_of, document_of, evaluation_rows, leak_rows

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.results import tables
from flower_vfl.simulations.studies import trials as trials_module
from flower_vfl.simulations.studies.study import Study, run_study
from flower_vfl.simulations.studies.tradeoff import (
    comparison,
    tradeoff,
    untrained,
    verdict,
)
from flower_vfl.simulations.studies.trials import Trial

GUESS, DIVERGED = "no better than a guess", "its loss diverged"


def _losses(*values: float) -> list[dict[str, Any]]:
    numbered = enumerate(values, 1)
    return [{"metric": "loss", "epoch": e, "step": 0, "value": v} for e, v in numbered]


@pytest.mark.parametrize(
    ("rows", "guess", "why"),
    [
        (evaluation_rows(auc=0.9), {}, ""),
        (evaluation_rows(auc=0.54), {}, GUESS),
        (evaluation_rows(auc=0.416), {}, GUESS),
        (evaluation_rows(auc=0.62), {}, ""),  # far below others, but it trained
        (evaluation_rows(auc=float("nan")), {}, GUESS),
        (evaluation_rows(pearson=0.05), {}, GUESS),
        (evaluation_rows(pearson=-0.6), {}, GUESS),
        (evaluation_rows(pearson=0.2), {}, ""),
        (evaluation_rows(accuracy=0.15), {"guess": 0.1}, GUESS),
        (evaluation_rows(accuracy=0.81), {"guess": 0.8}, GUESS),
        (evaluation_rows(accuracy=0.81), {"guess": 0.1}, ""),
        (evaluation_rows(accuracy=0.6), {}, ""),
        (_losses(0.7, 5216.0) + evaluation_rows(auc=0.9), {}, DIVERGED),
        (_losses(0.7, float("inf")) + evaluation_rows(auc=0.9), {}, DIVERGED),
        (_losses(-0.001, 0.5) + evaluation_rows(auc=0.9), {}, ""),
        (_losses(5216.0, 0.7) + evaluation_rows(auc=0.9), {}, ""),
        (leak_rows({"norm": 0.5}), {}, ""),  # never evaluated
    ],
)
def test_a_run_that_did_not_train(rows: Any, guess: Any, why: str) -> None:
    document = {"records": columns_of(rows), **guess}
    assert untrained(tables({"a": document})).to_dict() == {"a": why}


def test_runs_are_judged_one_by_one() -> None:
    runs = {
        "a": _losses(0.7, 0.6) + evaluation_rows(auc=0.9),
        "b": _losses(0.7, 90.0) + evaluation_rows(auc=0.9),
        "c": _losses(0.7, 0.6, 0.5) + evaluation_rows(auc=0.5),
    }
    found = untrained(tables({k: {"records": columns_of(r)} for k, r in runs.items()}))
    assert found.to_dict() == {"a": "", "b": DIVERGED, "c": GUESS}


def _rows(**methods: Any) -> dict[str, Any]:
    rows = []
    for name, (utility, leak, why) in methods.items():
        area = 2.0 * (1.0 - leak) * 2.0 * max(utility - 0.5, 0.0)
        row = {"defense": name, "utility": {"mean": utility}, "largest_leak": leak}
        rows.append(row | {"untrained": why, "area": area})
    return {"metric": "test_auc", "rows": rows}


NONE = (0.85, 1.0, "")


@pytest.mark.parametrize(
    ("methods", "target", "sentences"),
    [
        (
            {
                "none": NONE,
                "iso": (0.849, 0.9, ""),
                "marvell": (0.833, 0.68, ""),
                "gafm": (0.42, 0.5, GUESS),
                "ladsg": (0.45, 0.5, GUESS),
                "gc": (0.7, 0.9, f"1 of 3 runs: {GUESS}"),
            },
            None,
            [
                "Choose marvell: largest leak 1.00 → 0.68, test AUC −0.017.",
                "gafm and ladsg did not train on this data.",
                "gc did not train in 1 of 3 runs.",
            ],
        ),
        (
            {"none": NONE, "iso": (0.86, 0.99, "")},
            None,
            ["No defense helps: none lowers the largest leak, 1.00."],
        ),
        (
            {"none": (0.52, 1.0, GUESS), "iso": (0.6, 0.7, "")},
            None,
            [
                "The model does not train even without a defense (no better than a "
                "guess): change its settings or its data first.",
                "none did not train on this data.",
            ],
        ),
        (  # the target decides who is good enough, and utility between them
            {
                "none": NONE,
                "a": (0.6, 0.5, ""),
                "b": (0.7, 0.64, ""),
                "c": (0.8, 0.7, ""),
            },
            0.65,
            ["Choose b: largest leak 1.00 → 0.64, test AUC −0.150."],
        ),
        (
            {"none": NONE, "a": (0.6, 0.7, "")},
            0.65,
            [
                "No defense keeps the largest leak at or below 0.65; closest is a: "
                "largest leak 1.00 → 0.70, test AUC −0.250."
            ],
        ),
        (
            {"none": (0.8, 0.6, ""), "a": (0.8, 0.5, "")},
            0.65,
            ["No defense is needed: without one the largest leak is 0.60."],
        ),
        (  # a target that is close to what leaks without a defense
            {"none": (0.8, 0.66, ""), "a": (0.8, 0.645, "")},
            0.65,
            ["Choose a: largest leak 0.66 → 0.65, test AUC unchanged."],
        ),
        (  # the largest product does not help, another one does
            {"none": (0.9, 0.6, ""), "a": (0.9, 0.59, ""), "b": (0.7, 0.5, "")},
            None,
            ["Choose b: largest leak 0.60 → 0.50, test AUC −0.200."],
        ),
        ({"a": (0.8, 0.6, "")}, None, ["Choose a: largest leak 0.60, test AUC 0.800."]),
    ],
)
def test_the_verdict(methods: Any, target: float | None, sentences: list[str]) -> None:
    assert list(verdict(_rows(**methods), target)) == sentences


def test_a_study_marks_runs_that_did_not_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(config: RunConfig, engine: str) -> Any:
        auc = 0.4 if config.defense == "gc" or (config.seed and config.defense) else 0.9
        leaks = {"norm": 0.6 if config.defense else 0.9, "cosine": 0.3}
        return document_of(config, auc, leaks), {}

    monkeypatch.setattr(trials_module, "run_trial", pretend)
    trials = [
        Trial({"defense": d or "none", "seed": str(s)}, RunConfig(defense=d, seed=s))
        for d in ("", "iso", "gc")
        for s in range(2)
    ]
    study = run_study(tmp_path, "compare", "t", trials)
    found = comparison(study)["rows"]
    assert [row["untrained"] for row in found] == ["", f"1 of 2 runs: {GUESS}", GUESS]
    assert found[0]["largest_leak"] == pytest.approx(0.9)
    assert found[0]["largest_attack"] == "norm"
    assert found[1]["largest_attack"] == "cosine"  # reversed, it finds 0.7
    marked = study.frame().set_index("key")["did_not_train"]
    assert marked.tolist() == ["", "", "", GUESS, GUESS, GUESS]


def test_a_study_without_a_finished_run_has_no_curve(tmp_path: Path) -> None:
    trial = {"key": "iso", "digest": "", "labels": {"defense": "iso"}}
    study = Study(tmp_path, "sweep", "", trials=[trial])
    assert tradeoff(study) == {"metric": "", "curves": {}}
