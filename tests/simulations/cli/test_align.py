"""``flower-vfl align``, ``flower-vfl key``, and runs that begin with an alignment."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cli_cases import call, training_losses
from flwr.app import Context, RecordDict

from flower_vfl.alignment.handshake import SavedAlignment
from flower_vfl.alignment.keys import key_text, read_key, write_key
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.simulations.app import aligning_at, client_app, make_strategy, train
from flower_vfl.simulations.cli.align import _by_name
from flower_vfl.simulations.cli.predict import predict_saved
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.runtime.flower_runtime import run_app

APP = Path(__file__).parents[3] / "simulations" / "label_leakage"
PARTIES = ("label", "passive-1", "passive-2")
NUMBERS = {"label": range(0, 60), "one": range(20, 80), "two": range(10, 70)}


def write_files(folder: Path) -> dict[str, Path]:
    """Write three files about people who overlap in part, in different spellings."""
    stream = np.random.default_rng(0)
    values = stream.normal(size=(80, 4))
    frame = pd.DataFrame(values, columns=list("abcd"))
    frame["mail"] = [f"Person-{n}@x.org" for n in range(80)]
    frame["bad"] = (values.sum(axis=1) > 0).astype(int)
    columns = {"label": ["bad"], "one": ["a", "b"], "two": ["c", "d"]}
    files = {}
    for name, numbers in NUMBERS.items():
        part = frame.loc[list(numbers), ["mail", *columns[name]]].sample(
            frac=1, random_state=1
        )
        if name == "one":
            part["mail"] = part["mail"].str.upper() + " "
        files[name] = folder / f"{name}.csv"
        part.to_csv(files[name], index=False)
    return files


def config_of(files: dict[str, Path], **changes: Any) -> RunConfig:
    return replace(
        RunConfig(
            label_party=str(files["label"]),
            passive=f"{files['one']},{files['two']}",
            parties=2,
            id_column="mail",
            label_column="bad",
            alignment="psu",
            normalise="lower_email",
            epochs=2,
            batch_size=32,
        ),
        **changes,
    )


def mapping(path: Path) -> dict[str, int]:
    table = pd.read_csv(path)
    mails = table["mail"].str.strip().str.lower()
    return dict(zip(mails, table["row"], strict=True))


@pytest.mark.parametrize("method", ["psu", "psi"])
@pytest.mark.parametrize("names", [("label", "one"), ("label", "one", "two")])
def test_each_side_gets_the_rows_of_its_own_ids(
    method: str,
    names: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = write_files(tmp_path)
    out = tmp_path / "out"
    code, text, error = call(
        capsys,
        monkeypatch,
        "align",
        *(str(files[name]) for name in names),
        *("--id-column", "mail", "--normalise", "lower_email", "--json"),
        *("--method", method, "--out-dir", str(out)),
    )
    assert code == 0, error
    document = json.loads(text)
    people = [set(NUMBERS[name]) for name in names]
    merged = set.union(*people) if method == "psu" else set.intersection(*people)
    assert document["aligned"] == len(merged)
    assert document["ids"] == {name: len(NUMBERS[name]) for name in names}
    found: dict[int, str] = {}
    for name, own in zip(names, people, strict=True):
        rows = mapping(out / f"{name}.aligned.csv")
        assert set(rows) == {f"person-{n}@x.org" for n in own & merged}
        for mail, row in rows.items():
            assert 0 <= row < len(merged)
            assert found.setdefault(row, mail) == mail
    assert len(set(found.values())) == len(found) == len(merged)
    assert ("label" in document["revealed"]) == (len(names) == 3)


def test_it_says_what_was_revealed_and_to_whom(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = write_files(tmp_path)
    given = ["align", str(files["label"]), str(files["one"]), "--id-column", "mail"]
    given += ["--normalise", "lower_email"]
    code, text, _ = call(capsys, monkeypatch, *given)
    assert code == 0
    assert "80 rows aligned by psu" in text
    assert "(label 60, one 60)" in text
    assert "so 40 ids are shared, but not which ones" in text
    assert (tmp_path / "label.aligned.csv").is_file()
    code, text, _ = call(capsys, monkeypatch, *given, "--padding", "4")
    assert code == 0
    assert "(label 64, one 64, including 4 dummies each)" in text
    assert "but not which ids are shared" in text


def test_different_id_columns_and_text_beside_numbers(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """7 is the same id in a file of numbers and in one that also has letters."""
    pd.DataFrame({"number": [7, 8, 9]}).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame({"code": ["7", "x8"]}).to_csv(tmp_path / "b.csv", index=False)
    code, text, error = call(
        capsys,
        monkeypatch,
        *("align", str(tmp_path / "a.csv"), str(tmp_path / "b.csv")),
        *("--id-column", "number,code", "--json"),
    )
    assert code == 0, error
    assert json.loads(text)["aligned"] == 4


@pytest.mark.parametrize(
    ("contents", "arguments", "problem"),
    [
        (["id\n1\n", "name\n1\n"], (), "has no column 'id'"),
        (["id\n1\n", "id\na@x.org\nA@X.org\n"], (), None),
        (
            ["id\nb@x.org\n", "id\na@x.org\nA@X.org\nb@x.org\n"],
            ("--normalise", "lower_email"),
            "'b': 1 of 3 ids repeat an earlier one after normalisation",
        ),
        (["id\n1\n", "id,v\n1,2\n,3\n"], (), "column 'id': 1 rows without an id"),
        (["id\n1\n", "id\n1.0\n2.0\n"], (), "are floats"),
        (["id\n1\n", "id\n2\n"], ("--method", "none"), "--method must be one of"),
        (["id\n1\n", "id\n2\n"], ("--method", "both"), "unknown alignment 'both'"),
        (["id\n1\n", "id\n2\n"], ("--group", "x"), "unknown group 'x'"),
        (["id\n1\n", "id\n2\n"], ("--padding", "-1"), "must not be negative"),
        (["id\n1\n", "id\n2\n"], ("--id-column", "id,id,id"), "3 id columns are given"),
        (["id\n1\n", "id\n2\n"], ("--normalise", "lower"), "unknown normaliser"),
        (["id\n1\n"], (), "two or more files"),
    ],
)
def test_what_cannot_be_aligned(
    contents: list[str],
    arguments: tuple[str, ...],
    problem: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = [tmp_path / f"{name}.csv" for name in "ab"[: len(contents)]]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    code, _, error = call(capsys, monkeypatch, "align", *map(str, files), *arguments)
    assert code == (0 if problem is None else 2)
    assert problem is None or problem in error


def test_two_files_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have the same party name"):
        _by_name([tmp_path / "x" / "a.csv", tmp_path / "y" / "a.parquet"])


def test_a_key_pair(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "bank.key"
    code, text, _ = call(capsys, monkeypatch, "key", str(path))
    assert code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    identity = read_key(path)
    assert key_text(identity.public) in text
    assert key_text(identity.private_bytes()) not in text
    assert f'alignment-key="{path}"' in text
    assert "alignment-pins=" in text
    code, _, error = call(capsys, monkeypatch, "key", str(path))
    assert code == 2
    assert "exists already" in error


def context_with(node_config: dict[str, Any], **run_config: Any) -> Context:
    run = replace(RunConfig(), **run_config).to_run_config()
    return Context(1, 1, node_config, RecordDict(), run)


def test_simulated_nodes_trust_the_server_and_others_do_not() -> None:
    simulated = {"partition-id": 1, "num-partitions": 3}
    assert aligning_at(context_with(simulated)).trust_server
    real = {"role": "passive", "name": "bank", "data": "bank.csv"}
    assert not aligning_at(context_with(real)).trust_server
    assert aligning_at(context_with({**real, "trust-server": True})).trust_server
    assert aligning_at(context_with(real, normalise="e164")).normalise == "e164"
    own = {**real, "alignment-normalise": "lower_email"}
    assert aligning_at(context_with(own, normalise="e164")).normalise == "lower_email"


def test_nodes_with_data_of_their_own_need_keys(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    config = config_of(files)
    nodes: list[dict[str, Any]] = [
        {"role": "label", "name": "shop", "data": str(files["label"])},
        {"role": "passive", "name": "bank", "data": str(files["one"])},
        {"role": "passive", "name": "agency", "data": str(files["two"])},
    ]
    run = config.to_run_config()
    with (
        InProcessGrid(client_app, nodes, run) as grid,
        pytest.raises(PartyError, match="pin them, or declare the server trusted"),
    ):
        make_strategy(config, progress=False).connect(grid)
    pins = []
    for node in nodes:
        path = tmp_path / f"{node['name']}.key"
        pins.append(f'{node["name"]} = "{key_text(write_key(path).public)}"')
        node["alignment-key"] = str(path)
        node["alignment-pins"] = str(tmp_path / "pins.toml")
    (tmp_path / "pins.toml").write_text("\n".join(pins))
    with InProcessGrid(client_app, nodes, run) as grid:
        training = make_strategy(config, progress=False).connect(grid)
    assert training.participants.label.rows == 80


def check_kept(folder: Path, files: dict[str, Path]) -> None:
    """Compare the alignments that the parties kept with the files."""
    found: dict[int, str] = {}
    for party, name in zip(PARTIES, files, strict=True):
        kept = SavedAlignment.load(DirectoryStore(folder / "parties" / party))
        assert kept is not None
        # parties order their rows by id, as text
        mails = sorted(pd.read_csv(files[name])["mail"].str.strip())
        assert len(kept.aligned.universe) == 80
        rows = kept.aligned.positions.tolist()
        for mail, row in zip(mails, rows, strict=True):
            assert found.setdefault(row, mail.lower()) == mail.lower()
    assert len(found) == len(set(found.values())) == 80


@pytest.mark.parametrize("method", ["psu", "psi"])
def test_training_after_the_alignment_of_files(method: str, tmp_path: Path) -> None:
    files = write_files(tmp_path)
    out = tmp_path / "out"
    config = config_of(
        files, alignment=method, out=str(out), state_dir=str(out / "parties")
    )
    with InProcessGrid(client_app, 3, config.to_run_config()) as grid:
        document = train(grid, config, "in-process", progress=False)
        rows = {party.rows for party in grid.parties().values()}
    assert rows == {80 if method == "psu" else 40}
    assert len(training_losses(document)) == 2
    if method == "psu":
        check_kept(out, files)
    with pytest.raises(ConfigError, match="pass files with new rows"):
        predict_saved(out)
    tables = [pd.read_csv(file) for file in files.values()]
    for table in tables:
        table["mail"] = table["mail"].str.strip().str.lower()
    shared = set.intersection(*(set(table["mail"]) for table in tables))
    new = []
    for number, table in enumerate(tables):
        new.append(str(tmp_path / f"new-{number}.csv"))
        table[table["mail"].isin(shared)].to_csv(new[-1], index=False)
    predicted = predict_saved(out, files=new)
    assert set(predicted["id"]) == shared


@pytest.mark.parametrize(
    "changes",
    [{"train_metrics": True}, {"capture": 10}, {"attack": "passive:labels=4"}],
)
def test_what_needs_labels_by_row_is_refused(changes: dict[str, Any]) -> None:
    config = replace(RunConfig(alignment="psu"), **changes)
    with pytest.raises(ConfigError, match="is for runs whose ids are not aligned"):
        make_strategy(config)


@pytest.mark.extra  # the app is aligned above, and runs under `flwr run` in test_app
@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "engine"), [("plain", "flower"), ("resident", "ray")]
)
def test_flwr_run_aligns_three_parties_and_trains_on_the_union(
    transport: str, engine: str, tmp_path: Path
) -> None:
    files = write_files(tmp_path)
    out = tmp_path / "out"
    config = config_of(
        files, out=str(out), state_dir=str(out / "parties"), transport=transport
    )
    run_app(APP, run_config=config.to_run_config(), nodes=3, timeout=600)
    document = json.loads((out / "result.json").read_text())
    assert document["engine"] == engine
    losses = training_losses(document)
    assert len(losses) == 2 and np.isfinite(losses).all()
    check_kept(out, files)
    finals = [torch.load(out / "parties" / name / "final.pt") for name in PARTIES]
    # 64 of 80 rows in batches of 32, for two epochs
    assert [final["step"] for final in finals] == [4, 4, 4]
