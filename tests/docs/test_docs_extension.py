"""Methods written as docs/how-to/extend.md says appear wherever those of ours do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from cli_cases import undrawn
from docs_cases import ROOT, blocks_of, plugins_put_back, run_flower_vfl

from flower_vfl.simulations.cli import options

EXTEND = ROOT / "docs" / "how-to" / "extend.md"
SMALL = ["--dataset", "breast-cancer", "--epochs", "1", "--limit", "120"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The three files of the page, as options of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    options = []
    for block in blocks_of(EXTEND.read_text()):
        name = re.match(r"# ([\w-]+\.py)\n", block.code)
        if block.language == "python" and name:
            assert len(block.code.splitlines()) <= 30
            Path(name[1]).write_text(block.code)
            options += ["--plugin", name[1]]
    assert len(options) == 6
    with plugins_put_back(monkeypatch):
        yield options


def output(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, str]:
    run_flower_vfl([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.extra  # test_sweep has it for other methods, without a report
def test_compare_takes_them_unasked(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = output(capsys, [*files, "compare", *SMALL, "--seeds", "1"])
    table = pd.read_csv(Path(found["folder"]) / "results.csv")
    assert {"equal-length", "objective=smoothed"} < set(table["defense"])
    assert table["leak_largest-entry"].between(0.0, 1.0).all()
    page = Path(found["report"]).read_text()
    for name in ("equal-length", "smoothed", "largest-entry"):
        assert name in page


def test_sweep_varies_their_parameters(
    files: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "write_report", undrawn)
    values = ["--set", "equal-length.factor=0.5,1", "--set", "smoothed.eps=0.1,0.3"]
    methods = ["--defense", "equal-length", "--defense", "objective=smoothed"]
    attack = ["--attack", "largest-entry"]
    found = output(capsys, [*files, "sweep", *SMALL, *methods, *values, *attack])
    table = pd.read_csv(found["results"])
    assert len(table) == 4
    assert list(table["defense"].unique()) == ["equal-length", "objective=smoothed"]
    assert table["leak_largest-entry"].between(0.0, 1.0).all()


def test_without_the_plugin_the_name_is_unknown(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        run_flower_vfl(["run", *SMALL, "--defense", "equal-length"])
    assert "equal-length" in capsys.readouterr().err
