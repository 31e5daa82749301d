"""Leakage and cost as parties grow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_cases import call

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.cli.scale import (
    COLUMNS,
    DEFAULT,
    Size,
    columns_of,
    division_of,
    found_sizes,
    growth,
    growth_text,
    scale_trials,
    sizes_of,
    table_of,
)
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.datasets import load_dataset
from flower_vfl.simulations.datasets.vertical import (
    dirichlet_widths,
    divide_columns,
    party_columns,
)
from flower_vfl.simulations.runtime.engines import run_and_attack
from flower_vfl.simulations.studies.study import Study, run_study

SMALL = replace(
    DEFAULT, dataset="breast-cancer", epochs=1, batch_size=128, reproducible_noise=True
)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("scale")
    return run_study(folder, "scale", "", scale_trials(SMALL, [1, 2, 5], 1), bar=False)


def test_what_is_found_grows_with_the_parties(study: Study) -> None:
    assert study.errors == {}
    sizes = found_sizes(study)
    assert [size.parties for size in sizes] == [1, 2, 5]
    assert [size.columns for size in sizes] == [(30, 30), (15, 15), (6, 6)]
    for size in sizes:
        assert list(size.leaks) == ["norm", "mean:held_out=true"]
        for mean, worst, together in size.leaks.values():
            assert 0.5 <= mean <= worst <= 1.0 and 0.5 <= together <= 1.0
        assert size.seconds > 0 and size.memory and size.memory > 2**20
    alone = sizes[0].leaks["norm"]
    assert alone[0] == alone[1] == alone[2]  # one party is all there are


def test_bytes_are_those_of_embeddings_and_gradients(study: Study) -> None:
    # 455 training rows make 3 full batches and one of 71. Each step carries, for each
    # party and 4 float32 columns: its embedding to the server and on to the label
    # party, and its gradient from there and, one step later, to the party.
    rows, width = 455, 4
    last = rows - 3 * 128
    for size in found_sizes(study):
        document = next(
            study.documents[t["key"]]
            for t in study.trials
            if t["labels"]["parties"] == str(size.parties)
            and t["labels"]["part"] == "cost"
        )
        undelivered = last  # the last gradient of the run travels after its last step
        expected = size.parties * width * 4 * (4 * rows - undelivered)
        assert document["bytes"]["training"] == expected
        assert size.traffic == expected / 4


def test_growth_is_from_the_fewest_to_the_most() -> None:
    few = Size(2, (3, 4), "test_auc", 0.9, {"norm": (0.5, 0.6, 0.7)}, 0.01, 10.0, 100.0)
    few = replace(few, attacked=0.05)
    many = replace(few, parties=8, seconds=0.03, traffic=40.0, memory=150.0)
    many = replace(many, attacked=0.1)
    factors = growth([few, many])
    expected = {"parties": 4.0, "seconds": 3.0, "seconds with attacks": 2.0}
    assert factors == pytest.approx({**expected, "bytes": 4.0, "memory": 1.5})
    text = growth_text([few, many])
    assert "from 2 to 8 parties (×4)" in text
    assert "seconds ×3.00 (0.75 of linear)" in text
    assert "memory" not in growth([few, replace(many, memory=None)])
    head, rows = table_of([few])
    assert len(head) == len(rows[0])
    assert rows[0][1] == "3-4" and rows[0][3] == "0.50 / 0.60 / 0.70"
    assert rows[0][4:7] == ["10.00", "50.00", "25.00"]  # the last one for each party


def test_uneven_shares_are_a_dirichlet_draw() -> None:
    widths = dirichlet_widths(57, 8, 0.5, seed=3)
    assert sum(widths) == 57 and min(widths) >= 1
    shares = np.random.default_rng(3).dirichlet([0.5] * 8) * (57 - 8)
    assert all(abs(w - 1 - s) < 1 for w, s in zip(widths, shares, strict=True))
    names = [str(i) for i in range(57)]
    divided = divide_columns(names, 8, "dirichlet=0.5,3")
    assert [len(columns) for columns in divided[1:]] == widths
    assert sum(divided[1:], ()) == tuple(names)
    assert dirichlet_widths(4, 4, 0.01) == [1, 1, 1, 1]
    even = dirichlet_widths(1000, 4, 1e6)
    assert max(even) - min(even) <= 4
    for seed in range(50):  # each draw divides everything
        assert sum(dirichlet_widths(30, 7, 0.1, seed)) == 30


@pytest.mark.parametrize("text", ["dirichlet=0", "dirichlet=-1", "dirichlet=a"])
def test_a_division_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(d|D)irichlet"):
        divide_columns(["a", "b"], 2, text)


def test_options_become_settings() -> None:
    assert division_of("") == "even"
    assert division_of("dirichlet:alpha=0.3,seed=2") == "dirichlet=0.3,2"
    assert sizes_of("4, 1,2,2") == [1, 2, 4]
    for wrong in ("", "1,a", "0,1"):
        with pytest.raises(ConfigError, match="numbers of parties"):
            sizes_of(wrong)
    with pytest.raises(ConfigError, match="division"):
        division_of("zipf")


def test_the_cost_is_measured_without_attacks() -> None:
    leaking, bare = scale_trials(replace(SMALL, epochs=9), [2], 1)
    assert leaking.config.attack and leaking.config.coalitions == "all"
    assert not bare.config.attack and not bare.config.coalitions
    assert bare.config.epochs < 9 and bare.config.watch_memory
    alone = scale_trials(SMALL, [1], 1)[0]
    assert alone.config.coalitions == ""  # nobody to conspire with


def test_too_few_columns_are_told_with_a_dataset_that_has_enough() -> None:
    with pytest.raises(ConfigError, match=r"parties, 64; .* digits \(64\)"):
        columns_of(SMALL, 64)
    with pytest.raises(ConfigError, match="no known dataset has as many"):
        columns_of(SMALL, 5000)


@pytest.mark.data
def test_the_listed_datasets_have_so_many_columns(data_folder: Path) -> None:
    for name, columns in COLUMNS.items():
        dataset = load_dataset(name)
        codes = dataset.split(0, 0.2, 0.0)
        divided = party_columns(dataset, codes, columns)
        assert [len(own) for own in divided[1:]] == [1] * columns


def test_the_command_prints_a_table_and_its_growth(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["scale", "--dataset", "breast-cancer", "--epochs", "1"]
    arguments += ["--parties", "1,2,4", "--uneven", "dirichlet:alpha=0.5"]
    arguments += ["--attack", "norm,stale", "--out", str(tmp_path / "study")]
    code, out, _ = call(capsys, monkeypatch, *arguments)
    assert code == 0
    assert "from 1 to 4 parties (×4): seconds" in out
    code, out, _ = call(capsys, monkeypatch, *arguments, "--json")
    document = json.loads(out)
    assert [size["parties"] for size in document["sizes"]] == [1, 2, 4]
    few, many = document["sizes"][-1]["columns"]
    assert few < many
    assert document["growth"]["bytes"] == pytest.approx(4.0)
    code, out, _ = call(capsys, monkeypatch, *arguments, "--markdown")
    head = "| parties | columns | test AUC | norm | stale | stale, beyond the model |"
    assert out.startswith(head)
    for size in document["sizes"]:
        leaks, beyond = size["leaks"]["stale"], size["beyond"]["stale"]
        assert len({round(a - b, 9) for a, b in zip(leaks, beyond, strict=True)}) == 1
    code, _, err = call(capsys, monkeypatch, *arguments[:5], "--parties", "65")
    assert code == 2 and "imdb (500)" in err


def test_many_parties_share_a_wide_dataset_and_compute_as_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--parties", "65", "--epochs", "1", "--json"]
    arguments += ["--limit", "100", "--out", str(tmp_path / "study")]
    code, out, _ = call(capsys, monkeypatch, "scale", *arguments)
    (size,) = json.loads(out)["sizes"]
    assert code == 0 and size["parties"] == 65 and size["columns"] == [15, 16]
    code, _, err = call(capsys, monkeypatch, "scale", *arguments, "--dataset", "digits")
    assert code == 2 and "64 columns are too few" in err  # not what was asked for
    code, out, _ = call(capsys, monkeypatch, "scale", *arguments[:4], *arguments[5:])
    assert code == 0 and "of linear" not in out  # one size does not grow
    for path in tmp_path.rglob("result.json"):
        found = json.loads(path.read_text())
        assert (found["engine"], found["config"]["dataset"]) == ("stacked", "synthetic")


def test_memory_is_that_of_this_process_and_more(tmp_path: Path) -> None:
    config = RunConfig(epochs=1, watch_memory=True)
    assert run_and_attack(config, "in-process")["memory"]["peak"] > 2**26
