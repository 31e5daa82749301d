"""The benchmark page says what the study found, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matrix_cases import matrix_study

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.studies.benchmark import benchmark_page
from flower_vfl.simulations.studies.study import Study


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return benchmark_page(matrix_study(tmp_path_factory.mktemp("matrix")))


def section(page: str, title: str) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def score(leak: float, lost: float) -> float:
    return float(1 / (1 + np.sqrt(0.5 * (leak - 0.5) ** 2 + 0.5 * lost**2)))


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of each line of a table by the method in it."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    found = [cells for cells in lines if len(cells) > 2 and "`" in cells[1]]
    return {re.findall("`(.*?)`", cells[1])[0]: cells for cells in found}


def test_a_datasets_table_has_the_figures_of_its_runs(page: str) -> None:
    rows = rows_of(section(page, "breast-cancer"))
    assert list(rows) == ["marvell", "iso", "none"]
    best = np.mean([score(0.5, 0.02), score(0.6, 0.02)])
    expected = ["`marvell:s=4`", f"{best:.3f}", "0.55", "0.60 `cosine`"]
    assert rows["marvell"][2:] == [*expected, "0.890", "−0.020"]  # mean of two seeds
    assert rows_of(section(page, "spambase"))["marvell"][2] == "`marvell:s=1`"
    assert "- `gafm` is left out: it does not fit." in section(page, "spambase")


def test_the_table_over_all_datasets_has_their_means(page: str) -> None:
    text = section(page, "Over all datasets")
    own = [score(0.6, 0.05), score(0.7, 0.05)]  # the same setting on both
    assert rows_of(text)["iso"][2] == f"{np.mean(own):.3f}"
    assert "Mean over `breast-cancer` and `spambase`." in text


def test_the_table_of_attacks_has_the_mean_leak(page: str) -> None:
    lines = section(page, "What each attack finds").splitlines()
    assert "| method | `norm` | `cosine` |" in lines
    assert "| `marvell` | 0.60 | 0.70 |" in lines  # 0.5 and 0.7 on the two datasets
    assert "| `none` | 0.90 | 1.00 |" in lines


def test_the_sentences_at_the_top_have_the_figures_of_the_tables(page: str) -> None:
    first, second, third = re.findall(r"(?m)^\d\. (.*)$", page)
    marvell = [score(0.5, 0.02), score(0.6, 0.02), score(0.7, 0.01), score(0.8, 0.01)]
    plain = [score(0.9, 0.0), score(1.0, 0.0)]
    assert "Of 2 defenses `marvell` has the best" in first
    assert f": {np.mean(marvell):.3f}, against {np.mean(plain):.3f} without" in first
    assert "2 datasets, 2 attacks and 2 seeds" in first
    assert "leak AUC of 1.00 on average; with `marvell` it has 0.70" in second
    assert "utility changes by −0.015" in second
    assert "`cosine`: its leak AUC is 0.70 on average" in third
    assert "1.00 without a defense" in third


def test_the_page_says_what_it_took_and_how_it_was_tuned(page: str) -> None:
    assert "```sh\nflower-vfl matrix --workers 2\n```" in page
    runs = "10 runs for tuning and 12 for the figures, 2 at a time, in 1.5 minutes"
    assert runs in page and "sum to 1.1 minutes" in page  # 22 runs of 3 s
    text = section(page, "How settings were tuned").replace("\n", " ")
    assert (
        "with seed 100 and the attacks `norm`" in text and "seeds 0, 1 and all" in text
    )
    assert "| `iso` | `iso:t=1` and `iso:t=4` |" in text


def test_an_unfinished_matrix_has_no_page(tmp_path: Path) -> None:
    study = matrix_study(tmp_path)
    empty = Study(tmp_path, study.kind, study.title, trials=study.trials)
    with pytest.raises(ConfigError, match="no finished run to report"):
        benchmark_page(empty)
