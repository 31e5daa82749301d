"""How checkpoints are kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from vertical_cases import assert_equal

from flower_vfl import ConfigError
from flower_vfl.parties.checkpoints import DirectoryStore, RecordStore, open_store


@pytest.fixture(params=["directory", "record"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RecordStore:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "party")
    return RecordStore(RecordDict())


def test_a_store_returns_what_was_saved(store: RecordStore) -> None:
    assert store.tags() == []
    state = {"weights": torch.randn(3), "step": 4, "list": [1, 2.5, "x"]}
    store.save("best", state)
    assert_equal(store.load("best"), state)
    store.save("best", {"step": 5})
    assert store.load("best") == {"step": 5}


def test_only_steps_and_best_epochs_are_pruned(store: RecordStore) -> None:
    for tag in ("alignment", "best-4", "best-8", "final", "step-8", "step-9"):
        store.save(tag, {})
    store.prune({"best-8", "step-9"})
    assert set(store.tags()) == {"alignment", "best-8", "final", "step-9"}


@pytest.mark.parametrize(
    "tag", ["", "../x", "a/b", ".hidden", "Best", "a b", "x" * 65, "-x", "a\n"]
)
def test_unsafe_tags_are_refused(store: RecordStore, tag: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a checkpoint"):
        store.save(tag, {})
    with pytest.raises(ConfigError):
        store.load(tag)


def test_a_missing_tag_lists_those_that_are_there(store: RecordStore) -> None:
    store.save("best", {})
    with pytest.raises(ConfigError, match=r"no checkpoint 'final'; kept: best"):
        store.load("final")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_checkpoint(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    store.save("best", {"step": 1})

    def crash(*args: object) -> None:
        raise OSError("disk full")

    owner: object = os if moment == "fsync" else Path
    monkeypatch.setattr(owner, moment, crash)
    with pytest.raises(OSError, match="disk full"):
        store.save("best", {"step": 2})
    monkeypatch.undo()
    assert store.load("best") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return os.system, ("true",)

    store = DirectoryStore(tmp_path)
    store.save("best", {"evil": Evil()})
    with pytest.raises(Exception, match="Weights only"):
        store.load("best")


def test_names_that_look_alike_as_folders_stay_apart(tmp_path: Path) -> None:
    context = Context(1, 1, {"state-dir": str(tmp_path)}, RecordDict(), {})
    names = ["shop 1", "shop_1", "shop/1", "../shop", "..", "läden", "l_den"]
    folders = []
    for name in names:
        store = open_store(context, name)
        assert isinstance(store, DirectoryStore)
        assert store.folder.resolve().parent == tmp_path.resolve()
        folders.append(store.folder.resolve())
    assert len(set(folders)) == len(names)


def test_the_nodes_own_folder_comes_before_that_of_the_run(tmp_path: Path) -> None:
    run = {"state-dir": str(tmp_path / "run")}
    own = Context(1, 1, {"state-dir": str(tmp_path / "own")}, RecordDict(), run)
    assert open_store(own, "a").folder == tmp_path / "own" / "a"  # type: ignore[attr-defined]
    shared = Context(1, 1, {}, RecordDict(), run)
    assert open_store(shared, "a").folder == tmp_path / "run" / "a"  # type: ignore[attr-defined]


def test_only_its_owner_reads_what_a_party_keeps(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "party")
    store.save("step-1", {"step": 1})
    assert store.folder.stat().st_mode & 0o777 == 0o700
    for path in store.folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
