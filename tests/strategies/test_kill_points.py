"""A run that is killed anywhere in a checkpoint goes on as if it had not been."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from disk_cases import CASES, FullDisk, Kills, start, watched_disk, write_files
from vertical_cases import assert_equal

from flower_vfl import ConfigError, PartyError

PARTIES = ("label", "passive-1", "passive-2")


def kills_of(case: str, folder: Path, temporary: bool) -> tuple[Kills, list[object]]:
    """Run a case to its end; return what each kill would have left, and the end."""
    kills = Kills(folder, temporary)
    with watched_disk(kills.note):
        expected = start(case, folder)
    kills.note("end")
    assert {"mkstemp", "write", "fsync", "replace", "open", "unlink"} < {*kills.calls}
    return kills, expected


SOME = [(case, False, 4 if case == "plain" else 8) for case in CASES]
ALL = [
    pytest.param(case, temporary, 1, marks=pytest.mark.extra)
    for case in CASES
    for temporary in (False, True)
]


@pytest.mark.parametrize(("case", "temporary", "stride"), [*SOME, *ALL])
def test_a_run_that_is_killed_at_any_point(
    case: str, temporary: bool, stride: int, tmp_path: Path
) -> None:
    """Without the extra ones, moments that differ in temporary files are one.

    They are every fourth, and of runs that are not plain, every eighth.
    """
    kills, expected = kills_of(case, tmp_path / "whole", temporary)
    resumed = 0
    for number, files in enumerate([*kills.states.values()][::stride]):
        folder = write_files(files, tmp_path / str(number))
        with watched_disk(lambda name: None):
            if any(re.match(r"strategy/step-\d+\.pt", name) for name in files):
                found = start(case, folder, resume=True)
                resumed += 1
            else:
                with pytest.raises((ConfigError, PartyError), match="start"):
                    start(case, folder, resume=True)
                if case == "psu":  # aligned anew, in another order
                    continue
                found = start(case, folder)
        assert_equal(found, expected)
        assert not list(folder.rglob("*.tmp"))
    assert resumed >= 15 // stride


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.extra)])
def test_a_full_disk_is_named_and_costs_nothing(stride: int, tmp_path: Path) -> None:
    kills, expected = kills_of("plain", tmp_path / "whole", temporary=False)
    refused = {}
    for at in range(1, len(kills.calls), stride):
        disk, folder = FullDisk(at), tmp_path / str(at)
        with watched_disk(disk.note), pytest.raises(PartyError) as caught:
            start("plain", folder)
        told = str(caught.value)
        for word in (
            r"'(step-\d|final)'",
            "No space left on device",
            "Free disk space",
        ):
            assert re.search(word, told), told
        assert "/secret" not in told
        refused[caught.value.party] = disk.refused
        with watched_disk(lambda name: None):
            known = any((folder / "strategy").glob("step-*.pt"))
            assert_equal(start("plain", folder, resume=known), expected)
        assert not list(folder.rglob("*.tmp"))
    assert set(refused) == {*PARTIES, "strategy"}
