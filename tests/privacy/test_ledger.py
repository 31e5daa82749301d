"""The ledger counts what was revealed, once, whoever writes and whatever breaks."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from torch import nn

from flower_vfl import ConfigError, CrossEntropy, LabelPrivacy
from flower_vfl.privacy import Ledger, Release
from flower_vfl.privacy.private_labels import PrivateLabels
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.transform import Defender

ONE = Release("randomised-response", epsilon=0.5)
WIDE = Release("laplace", epsilon=0.5, draws="0..100")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "label" / "ledger.json"


def test_the_key_is_made_once_and_kept(path: Path) -> None:
    key = Ledger(path).key
    assert key >= 2**200
    assert Ledger(path).key == key
    Ledger(path).register(ONE, "labels")
    assert Ledger(path).key == key
    assert Ledger(path.with_name("other.json")).key != key


def test_only_its_owner_can_read_it(path: Path) -> None:
    Ledger(path).register(ONE, "labels")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_same_draws_count_once(path: Path) -> None:
    first = Ledger(path).register(ONE, "labels")
    assert Ledger(path).register(ONE, "labels") == first
    assert first.epsilon == 0.5
    assert first.auc_bound == pytest.approx(0.6225, abs=1e-4)


@pytest.mark.parametrize(
    ("release", "digest"),
    [
        (ONE, "changed labels"),
        (Release("randomised-response", epsilon=0.25), "labels"),
        (Release("randomised-response", epsilon=0.5, draws="a prior"), "labels"),
        (WIDE, "labels"),
    ],
)
def test_other_draws_add_up(path: Path, release: Release, digest: str) -> None:
    first = Ledger(path).register(ONE, "labels")
    both = Ledger(path).register(release, digest)
    assert both.epsilon == 0.5 + release.amount
    assert both.auc_bound > first.auc_bound + 0.01
    # Neither a third training with the first draws nor the order changes anything.
    assert Ledger(path).register(ONE, "labels") == both


def test_asking_notes_nothing(path: Path) -> None:
    Ledger(path).register(ONE, "labels")
    before = path.read_bytes()
    assert Ledger(path).register(WIDE, "labels", note=False).epsilon == 1.0
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "",
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "key": "00"}),
        lambda text: json.dumps({**json.loads(text), "releases": [{"epsilon": 1}]}),
        lambda text: text.replace("0.5", "-0.5"),
        lambda text: text.replace("0.5", '"0.5"'),
        lambda text: "\0" + text,
    ],
)
def test_a_damaged_file_is_refused_and_left_alone(path: Path, damage: object) -> None:
    ledger = Ledger(path)
    key = ledger.register(ONE, "labels") and f"{ledger.key:064x}"
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    before = path.read_bytes()
    for use in (lambda: ledger.key, lambda: ledger.register(ONE, "labels")):
        with pytest.raises(ConfigError, match="restore it from a backup") as caught:
            use()
        assert path.name in str(caught.value)
        assert key not in str(caught.value)
    assert path.read_bytes() == before


def test_a_crash_while_writing_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Ledger(path).register(ONE, "labels")

    def crash(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="no space"):
        Ledger(path).register(WIDE, "labels")
    monkeypatch.undo()
    assert Ledger(path).register(ONE, "labels") == first
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".json", ".lock"]


def test_many_at_once_lose_nothing(path: Path) -> None:
    def spend(number: int) -> int:
        ledger = Ledger(path)
        ledger.register(ONE, f"labels {number % 4}")
        return ledger.key

    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(spend, range(16)))
    assert len(keys) == 1
    assert Ledger(path).register(ONE, "labels 0").epsilon == 2.0


def test_two_runs_at_once_do_not_exceed_the_budget(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look at the ledger before either writes."""
    both, check = Barrier(2), PrivateLabels._check_budget

    def checked(self: PrivateLabels, *given: Any) -> None:
        check(self, *given)
        with suppress(BrokenBarrierError):
            both.wait(timeout=1.0)

    monkeypatch.setattr(PrivateLabels, "_check_budget", checked)

    def run(epsilon: float) -> bool:
        text = f"epsilon={epsilon},ledger={path},budget=epsilon=1"
        privacy, labels = LabelPrivacy.from_text(text), torch.zeros(20)
        party = PrivateLabels(privacy, CrossEntropy(nn.Linear(1, 1)), labels, range(20))
        try:
            party.check_run(TrainingConfig(1, 10), Defender())
        except ConfigError as error:
            assert "the budget of its labels" in str(error)
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(run, [0.6, 0.7])) == 1
    assert len(json.loads(path.read_text())["releases"]) == 1
