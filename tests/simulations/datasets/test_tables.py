"""One party's table: preparation, files, and the task that its labels make."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TEST, TRAIN, VALID, split_rows
from flower_vfl.simulations.datasets import infer_task, read_party_file
from flower_vfl.simulations.datasets.party_files import PartyFile, order_by_ids
from flower_vfl.simulations.datasets.prepare import TableFit, prepare_table


def mixed_table(rows: int = 200) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "age": rng.integers(18, 90, rows),
            "city": rng.choice(["Bonn", "Graz", "Oslo"], rows),
            "income": rng.lognormal(8, 2, rows),
            "member": rng.random(rows) < 0.5,
        }
    )
    frame.loc[rng.random(rows) < 0.2, "income"] = np.nan
    frame.loc[rng.random(rows) < 0.1, "city"] = None
    return frame


def test_numbers_are_as_scikit_learn_makes_them() -> None:
    frame, codes = mixed_table(), split_rows(200, 0, 0.3, 0.1)
    party = prepare_table(frame, codes)
    raw = frame[["age", "income", "member"]].astype(float).to_numpy()
    imputer = SimpleImputer(strategy="median").fit(raw[codes == TRAIN])
    scaler = StandardScaler().fit(imputer.transform(raw[codes == TRAIN]))
    expected = scaler.transform(imputer.transform(raw))
    missing = frame["income"].isna().to_numpy()
    assert party.spec is not None and party.spec.numeric == 4
    assert party.inputs[0].dtype == torch.float32
    np.testing.assert_allclose(party.inputs[0][:, :3], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(party.inputs[0][:, 3].numpy() == 1, missing)
    assert isinstance(party.fit, TableFit)
    assert party.fit.numeric_names == ("age", "income", "member", "income (missing)")
    assert party.columns == ("age", "city", "income", "member")


def test_categories_by_hand() -> None:
    frame = pd.DataFrame({"c": ["b", "b", "a", "a", "rare", None, None, "new", "a"]})
    codes = np.array([TRAIN] * 7 + [TEST, VALID], dtype=np.int8)
    party = prepare_table(frame, codes)
    assert party.spec is not None and party.spec.cardinalities == (4,)
    # missing is 1, then a, b; the value of one row and the new one are 0
    assert party.inputs[0][:, 0].tolist() == [3, 3, 2, 2, 0, 1, 1, 0, 2]
    assert party.inputs[0].dtype == torch.int64
    none = prepare_table(frame.iloc[[0, 2, 4, 5]], codes[:4])
    assert none.spec is not None and none.spec.cardinalities == (1,)


def test_only_training_rows_are_learned_from() -> None:
    frame, codes = mixed_table(), split_rows(200, 0, 0.3)
    changed = frame.copy()
    changed.loc[codes == TEST, "age"] = 10**6
    changed.loc[codes == TEST, "city"] = "elsewhere"
    first, second = prepare_table(frame, codes), prepare_table(changed, codes)
    assert first.fit == second.fit
    train = torch.from_numpy(codes == TRAIN)
    for a, b in zip(first.inputs, second.inputs, strict=True):
        assert torch.equal(a[train], b[train])
    assert (second.inputs[1][~train] == 0).all()


def test_log_columns() -> None:
    frame = pd.DataFrame({"n": [-7.0, 0.0, 1.0, 1e6], "m": [1.0, 2.0, 3.0, 4.0]})
    codes = np.zeros(4, dtype=np.int8)
    found = prepare_table(frame, codes, log_columns=("n",)).inputs[0].numpy()
    log = np.array([-np.log(8), 0.0, np.log(2), np.log(1 + 1e6)])
    np.testing.assert_allclose(found[:, 0], (log - log.mean()) / log.std(), rtol=1e-5)
    np.testing.assert_allclose(found[:, 1], (frame["m"] - 2.5) / np.sqrt(1.25))


def test_new_rows_and_json() -> None:
    frame, codes = mixed_table(), split_rows(200, 0, 0.3)
    party = prepare_table(frame, codes)
    assert isinstance(party.fit, TableFit)
    again = TableFit.from_state_dict(json.loads(json.dumps(party.fit.state_dict())))
    assert again == party.fit
    some = frame.iloc[[5, 150, 7]]
    shuffled = some[["member", "income", "city", "age"]].assign(other=1)
    for tensor, whole in zip(again.apply(shuffled), party.inputs, strict=True):
        assert torch.equal(tensor, whole[[5, 150, 7]])
    with pytest.raises(ConfigError, match=r"columns \['age'\] are missing"):
        again.apply(frame.drop(columns="age"))
    with pytest.raises(
        ConfigError, match="'age' was numeric in training, but now holds 'old'"
    ):
        again.apply(frame.assign(age="old"))


def test_numbers_as_categories_survive_missing_values() -> None:
    codes = np.zeros(4, dtype=np.int8)
    party = prepare_table(pd.DataFrame({"zip": ["1", "1", "2", "2"]}), codes)
    assert isinstance(party.fit, TableFit)
    later = party.fit.apply(pd.DataFrame({"zip": [2.0, np.nan, 1.0]}))
    assert later[0][:, 0].tolist() == [2, 0, 1]


def test_odd_columns() -> None:
    codes = np.array([TRAIN, TRAIN, TEST], dtype=np.int8)
    frame = pd.DataFrame(
        {
            "constant": [0.1, 0.1, 0.1],
            "absent": [np.nan, np.nan, 5.0],
            "infinite": [1.0, np.inf, -np.inf],
            3: [1, 2, 3],
        },
        index=[7, 7, 7],
    )
    party = prepare_table(frame, codes)
    assert party.columns[3] == "3"
    numbers = party.inputs[0]
    assert numbers.isfinite().all()
    assert numbers[:, 0].abs().max() < 1e-6
    assert numbers[:, 4:].tolist() == [[1, 0], [1, 1], [0, 1]]
    whole = pd.DataFrame({"n": pd.array([1, None, 3], dtype="Int64")})
    assert prepare_table(whole, np.zeros(3, np.int8)).inputs[0].shape == (3, 2)


def test_tables_that_cannot_be_prepared() -> None:
    frame, codes = mixed_table(4), np.zeros(4, dtype=np.int8)
    with pytest.raises(ConfigError, match="4 rows but the split has 3"):
        prepare_table(frame, codes[:3])
    with pytest.raises(ConfigError, match="no training rows"):
        prepare_table(frame, np.full(4, TEST, dtype=np.int8))
    with pytest.raises(ConfigError, match="no columns"):
        prepare_table(frame[[]], codes)
    with pytest.raises(ConfigError, match="'day' holds dates"):
        days = pd.date_range("2024-01-01", periods=4)
        prepare_table(pd.DataFrame({"day": days}), codes)
    with pytest.raises(ConfigError, match=r"more than one column called \['age'\]"):
        prepare_table(frame[["age", "age"]], codes)


# A party's own files


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_party_file(suffix: str, tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "key": [12, 5, 30],
            "x": [1.5, np.nan, 2.0],
            "y": [0, 1, 0],
            "note": list("aab"),
        }
    )
    path = tmp_path / f"party{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    rows = read_party_file(path, "key", "y", drop=["note"])
    assert rows.ids.tolist() == [12, 5, 30] and rows.ids.dtype == np.int64
    assert list(rows.features.columns) == ["x"]
    assert rows.labels is not None and rows.labels.tolist() == [0, 1, 0]
    ordered = order_by_ids(rows)
    assert ordered.ids.tolist() == [5, 12, 30]
    assert ordered.features["x"].fillna(-1).tolist() == [-1, 1.5, 2.0]
    assert ordered.labels is not None and ordered.labels.tolist() == [1, 0, 0]
    passive = read_party_file(str(path), "key", drop=["y"])
    assert passive.labels is None and list(passive.features) == ["x", "note"]


def test_ids_are_kept_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,x\n007,1\n 12 ,2\nNA,3\n")
    rows = read_party_file(path, "id")
    assert rows.ids.tolist() == ["007", "12", "NA"]
    assert order_by_ids(rows).features["x"].tolist() == [1, 2, 3]
    path.write_text(f"id,x\n{2**64},1\n3,2\n")
    assert read_party_file(path, "id").ids.tolist() == [str(2**64), "3"]


def test_csv_and_parquet_give_the_same_ids(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    text = pd.DataFrame({"id": ["3", "1", "2"], "x": [1, 2, 3]})
    text.to_parquet(tmp_path / "a.parquet")
    text.to_csv(tmp_path / "a.csv", index=False)
    text.astype({"id": float}).to_parquet(tmp_path / "b.parquet")
    text.set_index("id").to_parquet(tmp_path / "c.parquet")
    for name in ("a.parquet", "a.csv", "b.parquet", "c.parquet"):
        ids = read_party_file(tmp_path / name, "id").ids
        assert ids.dtype == np.int64 and ids.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ("id,x\n1,2\n", {"id_column": "key"}, "no column 'key'; its columns: id, x"),
        ("id,x\n1,2\n", {"label_column": "y"}, "no column 'y'; its columns: id, x"),
        ("id,x\n1,2\n4,1\n1,3\n1,4\n", {}, "2 rows that repeat.*the first of them '1'"),
        ("id,x\n1,2\n,3\n", {}, "column 'id': 1 rows without an id"),
        ("id,x,y\n1,2,\n2,3,0\n", {"label_column": "y"}, "1 rows without a label"),
        ("id,x\n1,2\n", {"drop": ["x"]}, "no feature column left.*passive party"),
        ("id\n1\n", {}, "no feature column left"),
        ("", {}, "is empty"),
        ("id,x\n", {}, "has no rows"),
        ('id,x\n1,2\n2,"3', {}, "cannot be read"),
    ],
)
def test_party_files_that_cannot_be_used(
    content: str, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "party.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_party_file(path, **{"id_column": "id", **arguments})
    assert str(path) in str(caught.value)


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file .*absent.csv"):
        read_party_file(tmp_path / "absent.csv", "id")
    with pytest.raises(ConfigError, match=r"party.xlsx' has an unknown format.*\.csv"):
        read_party_file(tmp_path / "party.xlsx", "id")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not a table")
    with pytest.raises(ConfigError, match=r"broken.parquet' cannot be read"):
        read_party_file(broken, "id")


def test_the_label_party_may_have_labels_only(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    path.write_text("id,y\nb,1\na,0\n")
    rows = order_by_ids(read_party_file(path, "id", "y"))
    assert isinstance(rows, PartyFile)
    assert rows.features.shape == (2, 0) and rows.ids.tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("labels", "task", "classes", "coded"),
    [
        ([0, 1, 1], "binary", ("0", "1"), [0, 1, 1]),
        ([-1, 1, -1], "binary", ("-1", "1"), [0, 1, 0]),
        ([2.0, 1.0, 2.0], "binary", ("1", "2"), [1, 0, 1]),
        (["yes", "no"], "binary", ("no", "yes"), [1, 0]),
        ([True, False], "binary", ("False", "True"), [1, 0]),
        ([4, 2, 9], "multiclass", ("2", "4", "9"), [1, 0, 2]),
        (["b", "c", "a"], "multiclass", ("a", "b", "c"), [1, 2, 0]),
        ([0.5, 1.25, 3.0], "regression", (), [0.5, 1.25, 3.0]),
    ],
)
def test_infer_task(
    labels: list[Any], task: str, classes: tuple[str, ...], coded: list[float]
) -> None:
    found = infer_task(labels)
    assert (found.task, found.classes) == (task, classes)
    assert found.labels.tolist() == coded
    assert found.labels.dtype == (np.float32 if task == "regression" else np.int64)


def test_task_that_is_known_better() -> None:
    assert infer_task([3, 4, 5], "regression").labels.tolist() == [3.0, 4.0, 5.0]
    assert infer_task(range(30), "multiclass").classes[29] == "29"
    for labels, task, message in [
        ([1, 2, 3], "binary", "two labels, found 3"),
        (["a", "b", "c"], "regression", "needs numbers"),
        ([1, 1], None, "every label is '1'"),
        ([1.0, np.nan], None, "1 rows without a label"),
        (range(11), None, "11 labels have 11 different values: add --task"),
        ([0, 1], "ranking", "unknown task 'ranking'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            infer_task(labels, task)  # type: ignore[arg-type]
