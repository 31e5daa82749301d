"""Columns divided among parties: tables, images, words."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TEST, TRAIN
from flower_vfl.simulations.datasets import Dataset, load_dataset
from flower_vfl.simulations.datasets.prepare import prepare_table
from flower_vfl.simulations.datasets.types import PartyData, Pictures
from flower_vfl.simulations.datasets.vertical import (
    Split,
    divide_columns,
    parse_split,
    party_columns,
    prepare_party,
)

TEN = [f"c{i}" for i in range(10)]


def vertical_split(
    dataset: Dataset,
    codes: NDArray[np.int8],
    parties: int,
    split: str = "even",
    label_share: float | str = 0.0,
) -> list[PartyData]:
    """Return the prepared data of all parties."""
    divided = party_columns(dataset, codes, parties, split, label_share)
    return [prepare_party(dataset, codes, columns) for columns in divided]


def sizes(parts: list[tuple[str, ...]]) -> list[int]:
    return [len(part) for part in parts]


def test_even() -> None:
    parts = divide_columns(TEN, 3)
    assert sizes(parts) == [0, 4, 3, 3]
    assert [name for part in parts for name in part] == TEN


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("fractions=0.2,0.4,0.4", [0, 2, 4, 4]),
        ("fractions=0.25,0.25,0.5", [0, 2, 3, 5]),
        ("widths=1,2,7", [0, 1, 2, 7]),
        ("widths=5,4,1", [0, 5, 4, 1]),
        (" columns = c0", None),
    ],
)
def test_fractions_and_widths(split: Any, expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="unknown split"):
            parse_split(split)
        return
    parts = divide_columns(TEN, 3, split)
    assert sizes(parts) == expected
    assert [name for part in parts for name in part] == TEN


def test_by_name() -> None:
    assert parse_split("columns=c3+ c1|c0").columns == (("c3", "c1"), ("c0",))
    assert divide_columns(TEN, 2, "columns=c3+c1|c0") == [(), ("c3", "c1"), ("c0",)]
    kept = divide_columns(TEN, 1, "columns=c3", label_share="c5+c6")
    assert kept == [("c5", "c6"), ("c3",)]


def test_label_share() -> None:
    parts = divide_columns(TEN, 2, "even", 0.4)
    assert parts == [tuple(TEN[:4]), tuple(TEN[4:7]), tuple(TEN[7:])]
    assert divide_columns(TEN, 2, "even", "0.4") == parts
    assert sizes(divide_columns(TEN, 2, "widths=3,5", "c9+c0")) == [2, 3, 5]
    assert sizes(divide_columns(TEN, 2, "fractions=0.5,0.5", 0.2)) == [2, 4, 4]
    assert divide_columns(TEN, 2, "even", "*") == [
        tuple(TEN),
        *divide_columns(TEN, 2)[1:],
    ]
    assert divide_columns(TEN, 1, "columns=c1", "*") == [tuple(TEN), ("c1",)]


@pytest.mark.parametrize(
    ("parties", "split", "share", "message"),
    [
        (2, "fractions=0.3,0.6", 0.0, "add up to 1, got 0.9"),
        (2, "fractions=0.3,x", 0.0, "could not convert string to float"),
        (2, "fractions=-0.5,1.5", 0.0, r"in \(0, 1\]"),
        (2, "fractions=0.01,0.99", 0.0, "leaves passive party 1 without a column"),
        (3, "fractions=0.5,0.5", 0.0, "another number of passive parties: 2, not 3"),
        (2, "widths=4,5", 0.0, "add up to 9, but 10 columns"),
        (2, "widths=10,0", 0.0, "at least one column"),
        (2, "widths=4.5,5.5", 0.0, "invalid literal for int"),
        (2, "columns=c1|", 0.0, "passive party 2 is given no columns"),
        (2, "columns=c1|c11", 0.0, r"no column 'c11'; near names: c1\b"),
        (2, "columns=c1|c1", 0.0, "'c1' is given twice"),
        (1, "columns=c1", "c1", "kept by the label party"),
        (1, "columns=c1", 0.5, "by name as well"),
        (11, "even", 0.0, "10 columns are too few .*, 11;"),
        (6, "even", 0.5, "5 columns are too few .*, 6;"),
        (0, "even", 0.0, "at least one passive party"),
        (1, "even", 1.0, r"label_share must be in \[0, 1\)"),
        (1, "even", 0.01, "less than one column"),
        (1, "even", "c0+d", "no column 'd'"),
        (1, "halves", 0.0, "unknown split 'halves'; write 'even', 'fractions="),
    ],
)
def test_impossible_divisions(
    parties: int, split: Any, share: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        divide_columns(TEN, parties, split, share)


def test_even_is_the_empty_split() -> None:
    assert parse_split("even") == Split() and Split().parties is None


def test_table_of_breast_cancer() -> None:
    dataset = load_dataset("breast-cancer")
    codes = dataset.split(0)
    label, first, second = vertical_split(dataset, codes, 2, "widths=10,20")
    assert label.inputs == () and label.spec is None and label.columns == ()
    assert first.inputs[0].shape == (569, 10) and second.inputs[0].shape == (569, 20)
    assert dataset.table is not None
    raw = dataset.table.to_numpy()
    train = raw[codes == TRAIN]
    expected = (raw - train.mean(0)) / train.std(0)
    found = torch.cat([first.inputs[0], second.inputs[0]], 1).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_party_prepares_its_columns_alone() -> None:
    dataset = load_dataset("diabetes-raw")
    codes = dataset.split(1)
    together = vertical_split(dataset, codes, 3, label_share=0.1)
    columns = party_columns(dataset, codes, 3, label_share=0.1)
    alone = prepare_party(dataset, codes, columns[2])
    assert alone.columns == together[2].columns
    assert torch.equal(alone.inputs[0], together[2].inputs[0])
    assert dataset.table is not None
    own_file = prepare_table(dataset.table[list(columns[2])], codes)
    assert torch.equal(own_file.inputs[0], together[2].inputs[0])


def picture_dataset() -> Dataset:
    pixels = np.arange(6 * 4 * 10 * 3, dtype=np.uint8).reshape(6, 4, 10, 3)
    return Dataset(
        "pictures",
        "binary",
        ("no", "yes"),
        np.array([0, 1] * 3),
        np.arange(6),
        pictures=Pictures((3, 4, 10), pixels),
    )


def test_images_are_cut_into_strips() -> None:
    dataset = picture_dataset()
    codes = np.zeros(6, dtype=np.int8)
    label, left, right = vertical_split(dataset, codes, 2, "even", 0.2)
    assert label.spec is not None and label.spec.image == (3, 4, 2)
    parts = [label.inputs[0], left.inputs[0], right.inputs[0]]
    assert [part.shape[3] for part in parts] == [2, 4, 4]
    joined = torch.cat(parts, dim=3).numpy()
    np.testing.assert_array_equal(joined, dataset.images)
    assert joined.dtype == np.uint8
    parts[1][...] = 0  # a party's own copy: the shared array stays as it was
    np.testing.assert_array_equal(joined, dataset.images)


def test_strips_that_cannot_be() -> None:
    dataset, codes = picture_dataset(), np.zeros(6, dtype=np.int8)
    with pytest.raises(ConfigError, match="strip of neighbouring columns"):
        vertical_split(dataset, codes, 1, "columns=x0+x2")
    with pytest.raises(ConfigError, match="6 rows but the split has 5"):
        vertical_split(dataset, codes[:5], 2)


TEXTS = (
    "the cat sat on the mat",
    "the dog ate the cat",
    "a dog on a mat",
    "the bird sang",
    "zebra zebra zebra the the the the",
    "nothing known",
)


def text_dataset() -> tuple[Dataset, NDArray[np.int8]]:
    dataset = Dataset(
        "texts", "binary", ("no", "yes"), np.array([0, 1] * 3), np.arange(6), text=TEXTS
    )
    return dataset, np.array([TRAIN] * 4 + [TEST] * 2, dtype=np.int8)


def test_text_is_weighed_as_by_scikit_learn() -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer

    dataset, codes = text_dataset()
    parties = vertical_split(dataset, codes, 2)
    words = [word for party in parties for word in party.columns]
    assert sorted(words) == sorted(
        {w for t in TEXTS[:4] for w in t.split() if w != "a"}
    )
    for party in parties[1:]:
        reference = TfidfVectorizer(vocabulary=list(party.columns)).fit(TEXTS[:4])
        expected = reference.transform(TEXTS).toarray()
        np.testing.assert_allclose(party.inputs[0].numpy(), expected, atol=1e-6)


def test_words_are_mixed() -> None:
    frame = pd.DataFrame(np.eye(100), columns=[f"w{i}" for i in range(100)])
    dataset = Dataset(
        "words",
        "binary",
        ("no", "yes"),
        np.arange(100) % 2,
        np.arange(100),
        table=frame,
        columns_are_words=True,
    )
    parts = party_columns(dataset, np.zeros(100, dtype=np.int8), 2)
    common = [sum(int(name[1:]) < 50 for name in part) for part in parts[1:]]
    assert sum(common) == 50 and min(common) > 15
