"""Measurements in a file: all of them, in order, however many there are."""

from __future__ import annotations

import tracemalloc

from flower_vfl.records import Measurement, Records


def measured(steps: int) -> list[Measurement]:
    return [
        Measurement("leak", step / 7, step, party, "norm", layer)
        for step in range(-1, steps)
        for party, layer in (("bank", ""), ("shop", "0"))
    ]


def since(records: Records, first: int) -> list[Measurement]:
    found = records.rows(first)
    return [Measurement(kind[0], value, step, *kind[1:]) for kind, step, value in found]


def test_what_is_added_comes_back_in_order() -> None:
    given = measured(5)
    records = Records(given[:3])
    assert since(records, 1) == given[1:3]
    records += given[3:]
    assert list(records) == given and len(records) == len(given)
    assert since(records, len(given)) == []


def test_a_long_run_needs_no_more_memory() -> None:
    records, step = Records(), measured(0)
    tracemalloc.start()
    for _ in range(100_000):
        records += step
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(records) == 200_000 and used < 2 << 20
    assert since(records, 199_998) == step
