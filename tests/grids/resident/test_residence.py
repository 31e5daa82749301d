from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from flower_vfl.protocol import residence


def test_marks_belong_to_a_run_and_a_node() -> None:
    residence.mark(1, 2)
    assert residence.is_resident(1, 2)
    assert not residence.is_resident(2, 1)
    residence.unmark(1, 2)
    assert not residence.is_resident(1, 2)
    residence.unmark(1, 2)
    residence.mark(1, 2)
    assert residence.is_resident(1, 2)
    residence.unmark(1, 2)


def test_an_old_session_does_not_unmark_a_new_one() -> None:
    residence.mark(3, 4)
    residence.mark(3, 4)
    residence.unmark(3, 4)
    assert residence.is_resident(3, 4)
    residence.unmark(3, 4)
    assert not residence.is_resident(3, 4)


def test_marks_from_many_threads() -> None:
    def toggle(_: int) -> None:
        for _ in range(500):
            residence.mark(5, 6)
            residence.unmark(5, 6)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(toggle, range(8)))
    assert not residence.is_resident(5, 6)
