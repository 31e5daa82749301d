"""The files of a run: what is said about them, and to whom."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message
from flwr.common.serde import message_to_proto

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import check_files, load_rows

ROWS = 120


def tables() -> dict[str, pd.DataFrame]:
    random = np.random.default_rng(0)
    ids = pd.Series(range(ROWS))
    score = random.normal(size=ROWS)
    noisy = score + random.normal(size=ROWS)
    bank = {"id": ids, "debt": random.normal(size=ROWS), "y": (noisy > 0).astype(int)}
    shop = {"id": ids, "visits": score, "basket": random.normal(size=ROWS)}
    return {"bank": pd.DataFrame(bank), "shop": pd.DataFrame(shop)}


def configured(folder: Path, **changes: Any) -> RunConfig:
    """Write the tables of `tables`, or those given, and return a run on them."""
    given = {name: changes.pop(name, table) for name, table in tables().items()}
    for name, table in given.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    config = RunConfig(
        label_party=str(folder / "bank.csv"),
        passive=str(folder / "shop.csv"),
        parties=1,
        label_column="y",
        epochs=1,
    )
    return replace(config, **changes)


def test_a_line_for_each_file(tmp_path: Path) -> None:
    written = "CSV, UTF-8, delimiter ',', decimal '.', LF"
    assert check_files(configured(tmp_path)) == [
        f"bank.csv: 120 rows: label 'y' (binary), 1 number; {written}",
        f"shop.csv: 120 rows: 2 number; {written}",
    ]
    assert check_files(RunConfig()) == []


@pytest.mark.parametrize("kind", ["copy", "word", "noisy"])
def test_a_column_that_predicts_the_label(kind: str, tmp_path: Path) -> None:
    shop, labels = tables()["shop"], tables()["bank"]["y"]
    values = {"copy": labels, "word": labels.map({0: "b", 1: "a"})}
    values["noisy"] = labels + np.random.default_rng(1).normal(0, 0.05, ROWS)
    shop = shop.assign(**{"like y": values[kind]}).sample(frac=1, random_state=0)
    config = configured(tmp_path, shop=shop)
    assert check_files(config)[2:] == [
        "warning: column 'like y' of 'shop.csv' alone predicts the label almost "
        "perfectly; if it follows from the label, leave it out with --drop 'like y'"
    ]
    assert len(check_files(replace(config, drop="like y"))) == 2


def test_a_column_that_predicts_an_amount(tmp_path: Path) -> None:
    shop, bank = tables()["shop"], tables()["bank"]
    config = configured(tmp_path, bank=bank.assign(y=np.exp(shop["visits"])))
    assert "column 'visits' of 'shop.csv' alone predicts" in check_files(config)[2]


def test_a_label_party_warns_of_its_own_columns_in_its_own_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = tables()["bank"]
    config = configured(tmp_path, bank=bank.assign(copy=bank["y"]))
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    load_rows(config, 0, config.label_party)
    assert "column 'copy' of 'bank.csv' alone predicts" in caplog.text
    caplog.clear()
    load_rows(config, 1, str(tmp_path / "shop.csv"))
    assert caplog.text == ""


@pytest.mark.parametrize("alignment", ["none", "psi"])
@pytest.mark.parametrize("spelling", ["{:.1f}", "{:05d}"])
def test_ids_that_look_alike(spelling: str, alignment: str, tmp_path: Path) -> None:
    shop = tables()["shop"]
    kind = float if "f" in spelling else int
    shop["id"] = [spelling.format(kind(number)) for number in shop["id"]]
    config = configured(tmp_path, shop=shop, alignment=alignment)
    with pytest.raises(ConfigError) as caught:
        check_files(config)
    assert str(caught.value) == (
        f"the ids look alike but are written differently: '0' in '{tmp_path}/bank.csv'"
        f", '{spelling.format(kind(0))}' in '{tmp_path}/shop.csv'; use --normalise "
        "whole_number, or --normalise none if they are different ids"
    )
    check_files(replace(config, normalise="none"))
    used = replace(config, normalise="whole_number")
    assert len(check_files(used)) == 2
    with InProcessGrid(client_app, 2, used.to_run_config()) as grid:
        assert train(grid, used, "in-process", progress=False)["final"]


def test_what_a_normaliser_refuses_names_the_file(tmp_path: Path) -> None:
    config = configured(tmp_path, normalise="lower_email")
    with pytest.raises(ConfigError, match=r"bank.csv', column 'id': id at position 0"):
        check_files(config)


def test_a_column_to_drop_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file has the column 'nope' to drop"):
        check_files(configured(tmp_path, drop="visits,nope"))


SECRET = "Zaphod"
BAD: dict[str, dict[str, list[Any]]] = {
    "a cell": {"shop": [SECRET, *range(1, ROWS)]},
    "names": {"shop": [f"{SECRET} {number}" for number in range(ROWS)]},
    "an id": {"shop id": [SECRET, SECRET, *range(2, ROWS)]},
    "a label": {"bank": [SECRET] * ROWS},
    "labels": {"bank": [SECRET, *range(1, ROWS)]},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_nothing_of_a_table_leaves_its_node_in_an_error(
    bad: dict[str, list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = tables()
    for place, values in bad.items():
        party, _, name = place.partition(" ")
        made[party][name or {"shop": "visits", "bank": "y"}[party]] = values
    config = configured(tmp_path, **made)
    nodes = [
        {"role": role, "name": name, "data": str(tmp_path / f"{name}.csv")}
        for role, name in (("label", "bank"), ("passive", "shop"))
    ]
    with pytest.raises(ConfigError, match=SECRET):  # on the command line
        check_files(config)
    at_server = replace(config, label_party="", passive="", label_column="y")
    sent: list[bytes] = []

    class Watched(InProcessGrid):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            replies = list(super().send_and_receive(messages, timeout=timeout))
            sent.extend(message_to_proto(m).SerializeToString() for m in replies)
            return replies

    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    with (
        Watched(client_app, nodes, at_server.to_run_config()) as grid,
        pytest.raises(PartyError) as caught,
    ):
        train(grid, at_server, "in-process", progress=False)
    name = "bank" if "bank" in bad else "shop"
    assert str(caught.value) == (
        f"party '{name}': its table cannot be used. The log of that node says why"
    )
    assert len(sent) == 2
    assert not any(word in m for m in sent for word in (SECRET.encode(), b"visits"))
    assert SECRET in caplog.text  # where the owner finds it


@pytest.mark.parametrize("files", [False, True])
def test_the_rows_are_divided_by_a_seed_of_their_own(
    files: bool, tmp_path: Path
) -> None:
    config = configured(tmp_path) if files else RunConfig(limit=ROWS)
    run, other = replace(config, seed=5), replace(config, seed=7)
    assert (load_rows(run, 0).codes != load_rows(other, 0).codes).any()
    fixed = load_rows(replace(other, split_seed=5), 0)
    assert (load_rows(run, 0).codes == fixed.codes).all()


def test_aligned_rows_are_not_divided_by_another_seed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="split-seed is for runs without"):
        configured(tmp_path, alignment="psi", split_seed=0)
