"""Damaged, foreign and missing files: named, and an older step is used."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_cases import Files, read_files, start, watched_disk, write_files
from leak_cases import flower_warnings
from vertical_cases import assert_equal

from flower_vfl import ConfigError, PartyError

Runs = Callable[[str], tuple[Files, list[object]]]
NEWEST = "step-4.pt"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the files and the end of a finished run of a case."""
    known: dict[str, tuple[Files, list[object]]] = {}

    def make(case: str) -> tuple[Files, list[object]]:
        if case not in known:
            folder = tmp_path_factory.mktemp("finished")
            with watched_disk(lambda name: None):
                expected = start(case, folder)
            known[case] = read_files(folder), expected
        return known[case]

    return make


def resume(case: str, files: Files, folder: Path) -> tuple[Any, list[str]]:
    """Resume a run; return its end and the warnings."""
    write_files(files, folder)
    with flower_warnings() as told, watched_disk(lambda name: None):
        return start(case, folder, resume=True), told


def flipped(content: bytes, stream: random.Random) -> bytes:
    at = stream.randrange(len(content))
    changed = bytes([content[at] ^ 1 << stream.randrange(8)])
    return content[:at] + changed + content[at + 1 :]


@pytest.mark.parametrize("flips", [2, pytest.param(25, marks=pytest.mark.extra)])
@pytest.mark.parametrize(
    ("case", "file"),
    [
        ("plain", f"label/{NEWEST}"),
        ("raised at the strategy", f"passive-1/{NEWEST}"),
        ("raised at the strategy", f"strategy/{NEWEST}"),
    ],
)
def test_one_flipped_bit_costs_a_step_and_nothing_else(
    case: str, file: str, flips: int, finished: Runs, tmp_path: Path
) -> None:
    files, expected = finished(case)
    stream, party = random.Random(7), file.split("/")[0]
    for number in range(flips):
        damaged = {**files, file: flipped(files[file], stream)}
        found, told = resume(case, damaged, tmp_path / str(number))
        assert_equal(found, expected)
        named = [line for line in told if "step 4 cannot be used" in line]
        assert len(named) == 1
        assert party in named[0]
        assert any(str(tmp_path / str(number) / file) in line for line in told)


@pytest.mark.parametrize("flips", [2, pytest.param(25, marks=pytest.mark.extra)])
@pytest.mark.parametrize(
    ("case", "file", "words"),
    [
        ("psu", "passive-1/alignment.pt", "passive-1.*alignment.*damaged.*without res"),
        ("early stopping", "passive-2/best-*.pt", "passive-2.*best-.* is damaged"),
        ("early stopping", "strategy/best-*.pt", "strategy.*best-.* is damaged"),
    ],
)
def test_what_cannot_be_replaced_is_refused_by_name(
    case: str, file: str, words: str, flips: int, finished: Runs, tmp_path: Path
) -> None:
    files, _ = finished(case)
    stream = random.Random(8)
    chosen = [name for name in files if Path(name).match(file)]
    assert chosen
    for number in range(flips):
        damaged = {n: flipped(files[n], stream) for n in chosen}
        with pytest.raises((ConfigError, PartyError), match=words):
            resume(case, {**files, **damaged}, tmp_path / str(number))


def swap(
    other: str,
) -> Callable[[Files, str], bytes]:
    return lambda files, name: files[other]


CHANGES: dict[str, tuple[Callable[[Files, str], bytes | None], str]] = {
    "missing": (lambda files, name: None, "no checkpoint 'step-4'"),
    "empty": (lambda files, name: b"", "damaged"),
    "one byte": (lambda files, name: files[name][:1], "damaged"),
    "half": (lambda files, name: files[name][: len(files[name]) // 2], "damaged"),
    "cut at the end": (lambda files, name: files[name][:-1], "damaged"),
    "longer": (lambda files, name: files[name] + b"\0", "damaged"),
    "of another kind": (lambda files, name: b"PK\3\4" + bytes(5000), "damaged"),
    "another party's": (swap(f"passive-2/{NEWEST}"), "'step-4' of party 'passive-2'"),
    "the strategy's": (swap(f"strategy/{NEWEST}"), "'step-4' of party 'strategy'"),
    "of another step": (swap("passive-1/step-2.pt"), "'step-2' of party 'passive-1'"),
    "of another run": (swap("other"), "of another run"),
    "of another time": (swap("again"), "written at another time"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_are_not_those_of_the_checkpoint(
    change: str, finished: Runs, tmp_path: Path
) -> None:
    files, expected = finished("plain")
    make, words = CHANGES[change]
    name, folder = f"passive-1/{NEWEST}", tmp_path / "run"
    if change == "of another run":
        start("plain", tmp_path / "other")
        files = {**files, "other": (tmp_path / "other" / name).read_bytes()}
    if change == "of another time":  # a resumed run wrote it again
        start("plain", write_files(before(files), tmp_path / "again"), resume=True)
        files = {**files, "again": (tmp_path / "again" / name).read_bytes()}
    content = make(files, name)
    kept = {n: c for n, c in files.items() if "/" in n and n != name}
    found, told = resume(
        "plain", kept if content is None else {**kept, name: content}, folder
    )
    assert_equal(found, expected)
    assert any(words in line and "party 'passive-1'" in line for line in told)


def before(files: Files) -> Files:
    """Return the files of a run that was killed before its last step."""
    return {n: c for n, c in files.items() if NEWEST not in n and "final" not in n}


def test_all_damaged_is_refused_with_the_names_of_all(
    finished: Runs, tmp_path: Path
) -> None:
    files, _ = finished("plain")
    changed = {n: c[:99] if "label/step" in n else c for n, c in files.items()}
    with pytest.raises(ConfigError, match="no checkpoint that every") as caught:
        resume("plain", changed, tmp_path)
    for tag in ("step-2", "step-4"):
        assert f"party 'label': its checkpoint '{tag}' is damaged" in str(caught.value)


def test_a_step_that_only_the_parties_have_does_not_exist(
    finished: Runs, tmp_path: Path
) -> None:
    files, expected = finished("early stopping")
    kept = {n: c for n, c in files.items() if n != f"strategy/{NEWEST}"}
    found, told = resume("early stopping", kept, tmp_path)
    assert_equal(found, expected)
    assert not any("cannot be used" in line for line in told)


def test_left_over_temporary_files_are_removed(finished: Runs, tmp_path: Path) -> None:
    files, _ = finished("plain")
    folders = ("label", "passive-1", "strategy")
    resume("plain", {**files, **{f"{f}/x.tmp": b"half" for f in folders}}, tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_final_that_is_half_old_is_refused(finished: Runs, tmp_path: Path) -> None:
    from disk_cases import CASES, make_run

    from flower_vfl import InProcessGrid

    files, _ = finished("plain")
    write_files(files, tmp_path)
    start("plain", tmp_path / "other")

    def restore() -> None:
        with InProcessGrid(CASES["plain"][0], 3, {"state-dir": str(tmp_path)}) as grid:
            make_run("plain", tmp_path).connect(grid).restore("final")

    restore()
    shutil.copy(tmp_path / "other" / "label" / "final.pt", tmp_path / "label")
    with pytest.raises(ConfigError, match=r"'label': its checkpoint 'final' is of ano"):
        restore()
