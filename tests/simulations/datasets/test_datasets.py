"""Datasets by name: what is in the files and the bundled sets, and splits."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LinearRegression

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TEST, TRAIN, VALID, split_rows
from flower_vfl.simulations.datasets import Dataset, dataset_names, load_dataset
from flower_vfl.simulations.datasets.registry import SOURCES
from flower_vfl.simulations.datasets.types import split_groups
from flower_vfl.simulations.datasets.vertical import party_columns, prepare_party

# name: rows, columns, labels per class or mean label, official test rows
KNOWN: dict[str, tuple[int, int, list[int] | float, int | None]] = {
    "breast-cancer": (569, 30, [212, 357], None),
    "diabetes": (442, 10, 152.13, None),
    "diabetes-gafm": (442, 10, 152.13, 89),
    "digits": (1797, 64, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180], None),
    "synthetic": (2000, 1024, [1001, 999], None),
    "spambase": (4601, 57, [2788, 1813], None),
    "credit-default": (30000, 23, [23364, 6636], None),
    "boston": (506, 13, 22.533, None),
    "boston-gafm": (506, 13, 22.533, 102),
    "diabetes-raw": (442, 10, 152.13, None),
    "wdbc": (569, 30, [212, 357], None),
    "give-me-some-credit": (150000, 10, [139974, 10026], None),
    "adult": (48842, 14, [37155, 11687], 16281),
    "criteo": (8000, 39, [6272, 1728], None),
    "criteo-indexed": (19905, 39, [14848, 5057], 9905),
    "avazu": (8999, 22, [7436, 1563], None),
    "imdb": (50000, 500, [25000, 25000], 25000),
    "ham10000": (10015, 64, [8902, 1113], None),
    "bhi": (11001, 50, [7948, 3053], None),
    "cifar10": (5000, 32, [500] * 10, 1000),
    "cifar10-20k": (20000, 32, [2000] * 10, 4000),
    "yahoo-answers": (4418, 0, [2209, 2209], 418),
    "ag-news": (15600, 0, [3900] * 4, 7600),
}
BUNDLED = ("breast-cancer", "diabetes", "digits", "diabetes-raw", "wdbc", "synthetic")
IMAGES = {"ham10000": (3, 64, 64), "bhi": (3, 50, 50)}
IMAGES |= dict.fromkeys(("cifar10", "cifar10-20k"), (3, 32, 32))


def check_known(dataset: Dataset) -> None:
    rows, columns, labels, official = KNOWN[dataset.name]
    assert len(dataset) == rows
    if dataset.table is not None:
        assert dataset.table.shape == (rows, columns)
    elif dataset.pictures is not None:
        assert dataset.pictures.shape == IMAGES[dataset.name]
        assert len(dataset.pictures) == rows
    else:
        assert dataset.text is not None and min(map(len, dataset.text)) > 0
    if isinstance(labels, list):
        assert np.bincount(dataset.labels).tolist() == labels
        assert len(dataset.classes) == len(labels)
        assert dataset.task == ("binary" if len(labels) == 2 else "multiclass")
        assert dataset.labels.dtype == np.int64
    else:
        assert dataset.task == "regression" and dataset.classes == ()
        assert float(dataset.labels.mean()) == pytest.approx(labels, abs=0.005)
    assert len(np.unique(dataset.ids)) == rows
    found = None if dataset.test_mask is None else int(dataset.test_mask.sum())
    assert found == official
    with pytest.raises(ValueError, match="read-only"):
        dataset.labels[0] = 1


def test_the_known_numbers_cover_every_dataset() -> None:
    assert set(dataset_names()) == set(KNOWN)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_dataset_without_files(name: str, no_files: Path) -> None:
    check_known(load_dataset(name))


@pytest.mark.data
@pytest.mark.parametrize("name", [n for n in KNOWN if SOURCES[n].file is not None])
def test_dataset_of_a_file(name: str, data_folder: Path) -> None:
    check_known(load_dataset(name, data_dir=data_folder))


@pytest.mark.data
@pytest.mark.parametrize("name", ["wdbc", "diabetes-raw"])
def test_file_and_bundled_copy_are_equal(
    name: str, data_folder: Path, no_files: Path
) -> None:
    stored, bundled = load_dataset(name, data_dir=data_folder), load_dataset(name)
    assert stored is not bundled
    assert stored.table is not None and bundled.table is not None
    pd.testing.assert_frame_equal(stored.table, bundled.table)
    np.testing.assert_array_equal(stored.labels, bundled.labels)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "printed"),
    [("boston-gafm", (0.869, 0.815)), ("diabetes-gafm", (0.708, 0.759))],
)
def test_linear_regression_of_gafm_has_the_papers_rho(
    name: str, printed: tuple[float, float], data_folder: Path
) -> None:
    """Table 3 of the original GAFM: the paper does not state its split."""
    dataset = load_dataset(name, data_dir=data_folder)
    assert dataset.table is not None and dataset.test_mask is not None
    rows, test = dataset.table.to_numpy(float), dataset.test_mask
    fitted = LinearRegression().fit(rows[~test], dataset.labels[~test]).predict(rows)
    for part, expected in zip((~test, test), printed, strict=True):
        rho = np.corrcoef(fitted[part], dataset.labels[part])[0, 1]
        assert rho == pytest.approx(expected, abs=0.0006)


@pytest.mark.data
def test_column_sums_and_kinds(data_folder: Path) -> None:
    credit = load_dataset("credit-default", data_dir=data_folder)
    assert credit.table is not None
    assert credit.table["AGE"].sum() == 1064565  # mean age 35.4855
    assert not pd.api.types.is_numeric_dtype(credit.table["SEX"].dtype)
    assert credit.ids[:3].tolist() == [1, 2, 3]
    table = load_dataset("give-me-some-credit", data_dir=data_folder).table
    assert table is not None
    assert int(table["MonthlyIncome"].isna().sum()) == 29731
    assert int(table["NumberOfDependents"].isna().sum()) == 3924
    criteo = load_dataset("criteo", data_dir=data_folder)
    assert criteo.table is not None
    assert criteo.log_columns == tuple(f"I{i}" for i in range(1, 14))
    assert criteo.table["C1"].iloc[0] == "68fd1e64"
    assert int(criteo.table["I12"].isna().sum()) == 6214
    indexed = load_dataset("criteo-indexed", data_dir=data_folder).table
    assert indexed is not None
    assert not any(pd.api.types.is_numeric_dtype(t) for t in indexed.dtypes)
    avazu = load_dataset("avazu", data_dir=data_folder)
    assert avazu.ids[0] == "10000169349117863715"
    adult = load_dataset("adult", data_dir=data_folder)
    assert adult.table is not None and adult.test_mask is not None
    assert int((adult.table["sex"] == "Male").sum()) == 32650
    assert int(adult.labels[adult.test_mask].sum()) == 3846


@pytest.mark.data
def test_ham10000_targets(data_folder: Path) -> None:
    melanoma = load_dataset("ham10000", data_dir=data_folder)
    assert melanoma is load_dataset("ham10000", data_dir=data_folder, target="melanoma")
    dx = load_dataset("ham10000", data_dir=data_folder, target="dx")
    rare = load_dataset("ham10000", data_dir=data_folder, target="rare-melanoma")
    assert np.bincount(rare.labels).tolist() == [5256, 584]
    assert set(rare.ids[rare.labels == 1]) <= set(melanoma.ids[melanoma.labels == 1])
    assert np.bincount(dx.labels).tolist() == [327, 514, 1099, 115, 1113, 6705, 142]
    assert dx.classes[4] == "mel"
    np.testing.assert_array_equal(dx.labels == 4, melanoma.labels == 1)
    with pytest.raises(ConfigError, match="melanoma, dx"):
        load_dataset("ham10000", data_dir=data_folder, target="age")


@pytest.mark.data
@pytest.mark.parametrize(("name", "groups"), [("ham10000", 7470), ("bhi", 279)])
def test_groups_are_never_divided(name: str, groups: int, data_folder: Path) -> None:
    dataset = load_dataset(name, data_dir=data_folder)
    assert dataset.groups is not None
    assert len(np.unique(dataset.groups)) == groups
    codes = dataset.split(3, test_fraction=0.2, valid_fraction=0.1)
    parts = [set(dataset.groups[codes == code]) for code in (TRAIN, VALID, TEST)]
    assert sum(map(len, parts)) == groups
    shares = np.bincount(codes) / len(codes)
    np.testing.assert_allclose(shares, [0.7, 0.1, 0.2], atol=0.03)
    assert (codes != dataset.split(4, 0.2, 0.1)).any()


@pytest.mark.data
@pytest.mark.parametrize("name", list(IMAGES))
def test_images_are_decoded_only_as_far_as_needed(name: str, data_folder: Path) -> None:
    dataset = load_dataset(name, data_dir=data_folder, limit=40)
    assert dataset.pictures is not None and "array" not in dataset.pictures.__dict__
    images = dataset.images
    assert images.shape == (40, *IMAGES[name]) and images.dtype == np.uint8
    assert images is dataset.images and not images.flags.writeable
    assert images.std() > 20
    whole = load_dataset(name, data_dir=data_folder)
    assert whole.pictures is not None and "array" not in whole.pictures.__dict__


@pytest.mark.data
def test_cifar10_pixels(data_folder: Path) -> None:
    dataset = load_dataset("cifar10", data_dir=data_folder)
    with np.load(data_folder / "cifar10_5k.npz") as stored:
        pixel = stored["x_test"][7, 3, 20]
    np.testing.assert_array_equal(dataset.images[4007, :, 3, 20], pixel)
    # The channel means of CIFAR-10 as the literature gives them.
    means = dataset.images.mean(axis=(0, 2, 3)) / 255
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=0.01)


@pytest.mark.data
def test_jpeg_of_a_row_belongs_to_its_label(data_folder: Path) -> None:
    whole = load_dataset("ham10000", data_dir=data_folder)
    some = load_dataset("ham10000", data_dir=data_folder, limit=12)
    rows = np.searchsorted(whole.ids, some.ids)
    np.testing.assert_array_equal(whole.labels[rows], some.labels)
    np.testing.assert_array_equal(whole.take(rows).images, some.images)
    # HAM10000 skin is reddish: red is above blue.
    assert some.images[:, 0].mean() > some.images[:, 2].mean() + 10


@pytest.mark.data
def test_limit_keeps_both_classes_of_a_sorted_file(data_folder: Path) -> None:
    small = load_dataset("spambase", data_dir=data_folder, limit=200)
    large = load_dataset("spambase", data_dir=data_folder, limit=400)
    assert len(small) == 200 and set(small.ids) < set(large.ids)
    assert 0.3 < small.labels.mean() < 0.5
    assert (np.diff(small.ids) > 0).all()


def test_one_object_for_one_process() -> None:
    assert load_dataset("breast-cancer") is load_dataset("breast-cancer")
    limited = load_dataset("breast-cancer", limit=50)
    assert limited is load_dataset("breast-cancer", limit=50)
    assert len(limited) == 50
    assert load_dataset("breast-cancer", limit=10**6) is load_dataset("breast-cancer")


def test_names_targets_and_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"unknown dataset 'iris'; known: .*adult"):
        load_dataset("iris")
    with pytest.raises(ConfigError, match="none, leave it out"):
        load_dataset("digits", target="odd")
    with pytest.raises(ConfigError, match="limit must be at least 1"):
        load_dataset("digits", limit=0)


def test_split_without_groups_is_the_shared_one() -> None:
    dataset = load_dataset("breast-cancer")
    expected = split_rows(569, 11, 0.25, 0.1)
    np.testing.assert_array_equal(dataset.split(11, 0.25, 0.1), expected)


@pytest.mark.data
def test_official_test_rows_stay_test_rows(data_folder: Path) -> None:
    dataset = load_dataset("adult", data_dir=data_folder)
    codes = dataset.split(0, test_fraction=0.5, valid_fraction=0.1)
    np.testing.assert_array_equal(codes == TEST, dataset.test_mask)
    assert int((codes == VALID).sum()) == round(32561 * 0.1)


def test_split_groups_by_hand() -> None:
    groups = np.repeat(np.arange(50), 4)
    codes = split_groups(groups, 0, 0.2, 0.1)
    assert np.bincount(codes).tolist() == [140, 20, 40]
    assert (codes.reshape(50, 4) == codes.reshape(50, 4)[:, :1]).all()
    with pytest.raises(ConfigError, match="no training rows"):
        split_groups(np.zeros(10, np.int64), 0, 0.9, 0.0)
    with pytest.raises(ConfigError, match=r"test_fraction must be in \[0, 1\)"):
        split_groups(groups, 0, 1.5, 0.0)


def test_dataset_parts_must_fit_together() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0]})
    ids = np.arange(2)
    with pytest.raises(ConfigError, match="3 labels but 2 rows in its ids"):
        Dataset("x", "binary", ("n", "y"), np.array([0, 1, 0]), ids, table=frame)
    with pytest.raises(ConfigError, match="either a table, pictures or text"):
        Dataset("x", "binary", ("n", "y"), np.array([0, 1]), ids)


@pytest.mark.data
@pytest.mark.parametrize("name", list(KNOWN))
def test_every_dataset_can_be_divided(name: str, data_folder: Path) -> None:
    dataset = load_dataset(name, data_dir=data_folder, limit=120)
    split = dataset.split(0)
    for columns in party_columns(dataset, split, 2, label_share=0.2):
        party = prepare_party(dataset, split, columns)
        assert party.spec is not None
        tensors = list(party.inputs)
        if party.spec.image is not None:
            assert tensors[0].shape == (120, *party.spec.image)
            continue
        if party.spec.numeric:
            numbers = tensors.pop(0)
            assert numbers.shape == (120, party.spec.numeric)
            assert numbers.isfinite().all()
        for codes in tensors:
            assert (codes >= 0).all()
            assert (codes.amax(0) < codes.new_tensor(party.spec.cardinalities)).all()
