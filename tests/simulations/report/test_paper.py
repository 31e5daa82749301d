"""Figures for papers: curves and bands by hand, and what is written."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from report_cases import matrix_cells, matrix_report

from flower_vfl.simulations.report.paper import (
    banded,
    seed_curves,
    setting_means,
    strongest,
    write_plots,
)


def runs(*rows: tuple[str, int, float, float]) -> pd.DataFrame:
    found = pd.DataFrame(rows, columns=["setting", "seed", "leak", "utility"])
    return found.assign(defense=found["setting"].str[0], attack="norm")


def test_a_curve_over_seeds_by_hand() -> None:
    found = seed_curves(
        runs(
            *[("a1", 0, 0.6, 0.7), ("a2", 0, 0.8, 0.9)],
            *[("a1", 1, 0.7, 0.8), ("a2", 1, 0.8, 0.7)],  # no better at a larger leak
            *[("b1", 0, 0.5, 0.5), ("b1", 1, 0.5, 0.5)],  # one setting: no curve
        )
    )
    assert set(found["defense"]) == {"a"} and set(found["seeds"]) == {2}
    # at 0.6 the second seed has no setting yet; from 0.8 on they reach 0.9 and 0.8
    assert found["x"].tolist() == [0.7, 0.8, 1.0]
    assert found["y"].tolist() == pytest.approx([0.75, 0.85, 0.85])
    sd = 0.1 / 2**0.5
    assert (found["high"] - found["y"]).tolist() == pytest.approx([sd] * 3)
    assert (found["y"] - found["low"]).tolist() == pytest.approx([sd] * 3)
    assert seed_curves(runs(("a1", 0, 0.6, 0.7))).empty


def test_points_by_hand() -> None:
    """The attack is the strongest on average, not by seed."""
    found = runs(("a1", 0, 0.6, 0.7), ("a1", 1, 0.8, 0.9))
    other = found.assign(attack="mean", leak=[0.95, 0.5])
    chosen = strongest(pd.concat([found, other]))
    assert chosen["attack"].tolist() == ["mean", "mean"]
    (point,) = setting_means(chosen).to_dict("records")
    assert point["x"] == pytest.approx(0.725) and point["y"] == pytest.approx(0.8)
    assert point["high"] - point["low"] == pytest.approx(2 * 0.1 * 2**0.5)
    assert point["seeds"] == 2


def test_bands_over_steps_by_hand() -> None:
    rows = pd.DataFrame(
        {
            "run": ["a", "a", "b", "b", "c"],
            "setting": ["x", "x", "x", "x", "y"],
            "step": [1, 2, 1, 2, 1],
            "value": [0.5, 0.6, 0.7, 0.6, 0.9],
        }
    )
    found = banded(rows).set_index(["setting", "x"])
    assert found.loc[("x", 1), "y"] == pytest.approx(0.6)
    assert found.loc[("x", 1), "high"] == pytest.approx(0.6 + 0.02**0.5)
    assert found.loc[("x", 2), "low"] == found.loc[("x", 2), "y"] == 0.6
    assert found.loc[("y", 1)].tolist() == pytest.approx([0.9, 0.9, 0.9, 1])


def test_figures_of_a_matrix(tmp_path: Path) -> None:
    cells = matrix_cells()
    written = write_plots(matrix_report(cells), tmp_path)
    names = {f"{what}-{d}" for what in ("privacy-utility", "heat-map") for d in "ab"}
    kinds = (".svg", ".png", ".csv")
    assert {p.name for p in written} == {n + kind for n in names for kind in kinds}
    data = pd.read_csv(tmp_path / "heat-map-a.csv")
    own = cells.query("dataset == 'a' and method == 'iso' and attack == 'norm'")
    (row,) = data.query("method == 'iso' and attack == 'norm'").to_dict("records")
    assert row["leak"] == pytest.approx(own["leak"].mean(), abs=1e-5)
    assert row["sd"] == pytest.approx(own["leak"].std(), rel=1e-4)
    for path in written[::3]:
        text = path.read_text()
        assert text.startswith("<svg") and "var(--" not in text and "NaN" not in text
    # a column of a journal, 3.4 inches at 300 pixels each
    header = (tmp_path / "privacy-utility-a.png").read_bytes()[:24]
    assert int.from_bytes(header[16:20], "big") == pytest.approx(1020, abs=3)
