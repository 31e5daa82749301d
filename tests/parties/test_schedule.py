"""Which rows are in which batch: complete, disjoint, shuffled, the same for all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_vfl import ConfigError
from flower_vfl.parties.schedule import (
    SPLITS,
    TEST,
    TRAIN,
    VALID,
    Plan,
    Schedule,
    count_batches,
    split_rows,
)

quick = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**40)


def training_batches(schedule: Schedule, epoch: int) -> list[list[int]]:
    return [
        schedule.training_batches(epoch)[i].tolist()
        for i in range(schedule.batches("train", training=True))
    ]


@quick
@given(rows=st.integers(1, 300), size=st.integers(0, 320), seed=seeds)
def test_every_training_row_once_per_epoch(rows: int, size: int, seed: int) -> None:
    codes = split_rows(rows, seed, 0.3, 0.1) if rows > 3 else np.zeros(rows, np.int8)
    schedule = Schedule(codes, Plan(seed, size))
    for epoch in (1, 2):
        batches = training_batches(schedule, epoch)
        found = [row for batch in batches for row in batch]
        assert sorted(found) == np.flatnonzero(codes == TRAIN).tolist()
        wanted = size or len(found)
        assert all(len(batch) == wanted for batch in batches[:-1])
        assert len(batches[-1]) <= wanted + 1
        if wanted > 1 and len(found) > 1:
            assert len(batches[-1]) > 1  # batch norm cannot train on one row


@quick
@given(rows=st.integers(20, 200), size=st.integers(1, 50), seed=seeds)
def test_every_party_finds_the_same_rows_in_any_order(
    rows: int, size: int, seed: int
) -> None:
    one, other = (Schedule(split_rows(rows, seed), Plan(seed, size)) for _ in range(2))
    expected = {epoch: training_batches(one, epoch) for epoch in (1, 2, 3)}
    for epoch in (3, 1, 2):  # a party that comes back starts in the middle
        for index in reversed(range(len(expected[epoch]))):
            assert (
                other.training_batches(epoch)[index].tolist() == expected[epoch][index]
            )


def test_another_order_in_every_epoch_and_for_every_seed() -> None:
    codes = split_rows(100, 0)
    orders = [
        training_batches(Schedule(codes, Plan(seed, 0)), epoch)[0]
        for seed in (0, 1)
        for epoch in (1, 2, 3)
    ]
    assert len({tuple(order) for order in orders}) == 6
    assert all(order != sorted(order) for order in orders)


@quick
@given(
    rows=st.integers(2, 400),
    seed=seeds,
    test=st.floats(0, 0.49),
    valid=st.floats(0, 0.49),
)
def test_splits_are_disjoint_complete_and_of_the_right_size(
    rows: int, seed: int, test: float, valid: float
) -> None:
    if rows - round(rows * test) - round(rows * valid) < 1:
        with pytest.raises(ConfigError, match="no training rows"):
            split_rows(rows, seed, test, valid)
        return
    codes = split_rows(rows, seed, test, valid)
    sizes = [int((codes == code).sum()) for code in (TRAIN, VALID, TEST)]
    assert sizes[1:] == [round(rows * valid), round(rows * test)]
    assert sum(sizes) == rows
    assert np.array_equal(codes, split_rows(rows, seed, test, valid))


def test_splits_are_drawn_and_depend_on_the_seed() -> None:
    one, other = split_rows(200, 1), split_rows(200, 2)
    assert not np.array_equal(one, other)
    for codes in (one, other):
        held_out = np.flatnonzero(codes == TEST)
        assert held_out.min() < 40 and held_out.max() > 160  # from all over


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan")])
@pytest.mark.parametrize("name", ["test_fraction", "valid_fraction"])
def test_fractions_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be in"):
        split_rows(10, 0, **{name: value})


@quick
@given(
    rows=st.integers(1, 200),
    part=st.integers(0, 60),
    seed=seeds,
    name=st.sampled_from(list(SPLITS)),
)
def test_an_evaluation_has_every_row_in_order(
    rows: int, part: int, seed: int, name: str
) -> None:
    codes = np.random.default_rng(seed).integers(0, 3, rows).astype(np.int8)
    schedule = Schedule(codes, Plan(seed, 8, part))
    parts = [
        schedule.evaluation_rows(name, i).tolist()
        for i in range(schedule.batches(name))
    ]
    expected = np.flatnonzero(codes == SPLITS[name]).tolist()
    assert [row for p in parts for row in p] == expected
    assert schedule.size(name) == len(expected)
    assert all(len(p) <= (part or rows) + 1 for p in parts)


@pytest.mark.parametrize(
    ("rows", "size", "batches"),
    [
        (0, 4, 0),
        (1, 4, 1),
        (4, 4, 1),
        (5, 4, 1),  # one row more joins the batch before
        (6, 4, 2),
        (8, 4, 2),
        (9, 4, 2),
        (3, 1, 3),
        (4, 100, 1),
    ],
)
def test_count_batches(rows: int, size: int, batches: int) -> None:
    assert count_batches(rows, size) == batches


def test_a_remainder_of_one_row_joins_the_last_batch() -> None:
    schedule = Schedule(np.zeros(33, np.int8), Plan(0, 16))
    assert [len(batch) for batch in training_batches(schedule, 1)] == [16, 17]


@pytest.mark.parametrize("index", [-1, 3, 99])
def test_a_batch_that_does_not_exist(index: int) -> None:
    schedule = Schedule(np.zeros(40, np.int8), Plan(0, 16, 16))
    with pytest.raises(ConfigError, match=f"no batch {index}: the split has 3"):
        schedule.evaluation_rows("train", index)
    with pytest.raises(ConfigError, match="the split has 0"):
        schedule.evaluation_rows("test", 0)


def test_drawing_batches_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    schedule = Schedule(split_rows(50, 3), Plan(3, 8))
    schedule.training_batches(1)
    assert torch.equal(torch.get_rng_state(), before)
