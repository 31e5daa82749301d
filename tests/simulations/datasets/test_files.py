"""Files of datasets: where they are looked for, checksums, and what is fetched."""

from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.datasets import data_folders, load_dataset
from flower_vfl.simulations.datasets.files import CREDIT_COLUMNS
from flower_vfl.simulations.datasets.registry import SOURCES


def test_missing_file_that_may_not_be_fetched(no_files: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_dataset("criteo")
    message = str(caught.value)
    assert "'criteo_8k.csv.gz'" in message and "6e502bf7a8e8" in message
    assert str(no_files) in message and "FLOWER_VFL_DATA" in message


def test_folder_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_VFL_DATA", "no/such/folder")
    with pytest.raises(ConfigError, match="FLOWER_VFL_DATA names 'no/such/folder'"):
        load_dataset("adult")
    with pytest.raises(ConfigError, match="data_dir names"):
        load_dataset("adult", data_dir=Path("other/folder"))


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "criteo_8k.csv.gz").write_bytes(b"half a download")
    with pytest.raises(ConfigError, match=r"criteo_8k.csv.gz' is damaged.*6e502bf7"):
        load_dataset("criteo", data_dir=tmp_path)


def test_folders_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWER_VFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = tmp_path / "project"
    here.mkdir()
    monkeypatch.chdir(here)
    folders = data_folders()
    assert folders[0] == tmp_path / "shared" / "data"
    assert folders[-1] == tmp_path / "cache" / "flower-vfl"
    assert len(folders) == 3
    assert data_folders(here) == [here, folders[-1]]


class FakeOpenML:
    """Stands in for ``sklearn.datasets.fetch_openml``."""

    def __init__(self, frame: pd.DataFrame, data_id: int) -> None:
        self.frame, self.data_id, self.calls = frame, data_id, 0

    def __call__(
        self, *, data_id: int, as_frame: bool, data_home: str
    ) -> SimpleNamespace:
        assert (data_id, as_frame) == (self.data_id, True)
        self.calls += 1
        return SimpleNamespace(frame=self.frame.copy())


def install(
    monkeypatch: pytest.MonkeyPatch, frame: pd.DataFrame, data_id: int
) -> FakeOpenML:
    fake = FakeOpenML(frame, data_id)
    monkeypatch.setattr("sklearn.datasets.fetch_openml", fake)
    return fake


def made_spambase() -> pd.DataFrame:
    """A table in the layout of OpenML's data 44, with made values."""
    rng = np.random.default_rng(0)
    names = [f"word_freq_{i}" for i in range(48)] + ["char_freq_%3B", "char_freq_%28"]
    names += ["char_freq_%5B", "char_freq_%21", "char_freq_%24", "char_freq_%23"]
    names += [f"capital_run_length_{i}" for i in ("average", "longest", "total")]
    frame = pd.DataFrame(rng.random((4601, 57)).round(3), columns=names)
    return frame.assign(**{"class": pd.Categorical(["1"] * 1813 + ["0"] * 2788)})


def test_fetched_once_and_verified(
    no_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_spambase()
    fake = install(monkeypatch, made, 44)
    dataset = load_dataset("spambase")
    assert load_dataset("spambase") is dataset and fake.calls == 1
    assert dataset.table is not None and "char_freq_;" in dataset.table.columns
    assert dataset.labels.sum() == 1813
    expected = made.drop(columns="class").to_numpy()
    np.testing.assert_array_equal(dataset.table.to_numpy(), expected)
    stored = no_files / "spambase.csv.gz"
    assert (no_files / "spambase.csv.gz.sha256").is_file()
    assert not list(no_files.glob(".*"))
    stored.write_bytes(stored.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=r"spambase.csv.gz' is damaged"):
        load_dataset("spambase")


def test_fetched_table_of_another_size(
    no_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, made_spambase().iloc[:4000], 44)
    with pytest.raises(ConfigError, match=r"4000 rows .* expected 4601 rows and 1813"):
        load_dataset("spambase")
    install(monkeypatch, made_spambase().rename(columns={"class": "label"}), 44)
    with pytest.raises(ConfigError, match=r"data id 44\) has another layout"):
        load_dataset("spambase")
    assert not (no_files / "spambase.csv.gz").exists()


def test_no_network(no_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", offline)
    with pytest.raises(ConfigError) as caught:
        load_dataset("boston")
    message = str(caught.value)
    assert "no route to host" in message and "'boston_housing.csv.gz'" in message
    assert "54fdb9e36e89" in message and str(no_files) in message


def as_openml(name: str, folder: Path) -> tuple[pd.DataFrame, int]:
    """Return a known file in the layout in which OpenML has it."""
    file = SOURCES[name].file
    assert file is not None
    frame = pd.read_csv(folder / file.name)
    if name == "spambase":
        frame.columns = [quote(column, safe="") for column in frame.columns]
        frame["spam"] = frame["spam"].astype(str).astype("category")
        return frame.rename(columns={"spam": "class"}), 44
    if name == "credit-default":
        frame = frame.drop(columns="ID")
        assert tuple(frame.columns[:-1]) == CREDIT_COLUMNS
        frame.columns = [f"x{i}" for i in range(1, 24)] + ["y"]
        nominal = ["x2", "x3", "x4", "y"]
        return frame.astype(dict.fromkeys(nominal, str)).astype(
            dict.fromkeys(nominal, "category")
        ), 42477
    if name == "boston":
        frame = frame.rename(columns=str.upper)
        words = frame["RAD"].astype(int).astype(str).astype("category")
        chas = frame["CHAS"].astype(str).astype("category")
        return frame.assign(RAD=words, CHAS=chas), 531
    is_test = frame.pop("is_test")
    frame = pd.concat([frame[is_test == 1], frame[is_test == 0]], ignore_index=True)
    income = pd.Categorical(np.where(frame.pop("income") == 1, ">50K", "<=50K"))
    frame.columns = [column.replace("_", "-") for column in frame.columns]
    for column in frame.select_dtypes(exclude="number").columns:
        frame[column] = frame[column].replace("?", np.nan).astype("category")
    return frame.assign(**{"class": income}), 1590


@pytest.mark.data
@pytest.mark.parametrize("name", ["spambase", "credit-default", "boston", "adult"])
def test_fetched_table_equals_the_file(
    name: str, data_folder: Path, no_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_dataset(name, data_dir=data_folder)
    fake = install(monkeypatch, *as_openml(name, data_folder))
    fetched = load_dataset(name)
    assert fake.calls == 1 and fetched is not stored
    assert stored.table is not None and fetched.table is not None
    pd.testing.assert_frame_equal(fetched.table, stored.table)
    np.testing.assert_array_equal(fetched.labels, stored.labels)
    np.testing.assert_array_equal(fetched.ids, stored.ids)
    if stored.test_mask is not None:
        np.testing.assert_array_equal(fetched.test_mask, stored.test_mask)
