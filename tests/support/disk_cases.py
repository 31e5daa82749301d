"""A disk that is watched or that fails, and small runs of every kind that resumes."""

from __future__ import annotations

import errno
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from alignment_cases import make_app, make_strategy
from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from vertical_cases import (
    ADAM,
    COLUMNS,
    WIDTH,
    features,
    final_states,
    labels,
    rich_app,
)

from flower_vfl import InProcessGrid, LabelParty, PassiveParty, vertical_client_app
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.objectives import GAFM
from flower_vfl.parties import checkpoints
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.strategies import (
    Checkpoints,
    Defense,
    EarlyStopping,
    VerticalResult,
    VerticalStrategy,
    build_defense,
)

EVERY = 2  # steps: 48 training rows in batches of 24 are an epoch
Files = dict[str, bytes]  # by path below a folder
Call = Callable[[str], None]


@contextmanager
def watched_disk(before: Call) -> Iterator[None]:
    """Call ``before(name)`` at each call of the checkpoints that changes the disk.

    A file that is being written is half written at ``"write"``. Nothing waits for the
    disk, which the tests read through the same cache.
    """

    def hooked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            before(name)
            return function(*given, **named)

        return call

    def fdopen(handle: int, mode: str) -> Any:
        file = os.fdopen(handle, mode)
        whole = file.write

        def write(content: bytes) -> None:
            whole(content[: len(content) // 2])
            file.flush()
            before("write")
            whole(content[len(content) // 2 :])

        closing = SimpleNamespace(write=write, flush=file.flush, fileno=file.fileno)
        opened = mock.MagicMock()
        opened.__enter__.return_value = closing
        opened.__exit__.side_effect = lambda *error: file.close()
        return opened

    own = SimpleNamespace(**vars(os))
    own.fdopen, own.fsync = fdopen, hooked("fsync", lambda handle: None)
    own.open = hooked("open", os.open)
    made = SimpleNamespace(mkstemp=hooked("mkstemp", tempfile.mkstemp))
    with (
        mock.patch.object(checkpoints, "os", own),
        mock.patch.object(checkpoints, "tempfile", made),
        mock.patch.object(pathlib.Path, "replace", hooked("replace", Path.replace)),
        mock.patch.object(pathlib.Path, "unlink", hooked("unlink", Path.unlink)),
    ):
        yield


def read_files(folder: Path) -> Files:
    """Return all files below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def write_files(files: Files, folder: Path) -> Path:
    """Write files below a new folder, and return it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


class Kills:
    """What the disk holds at every moment at which a process may be killed."""

    def __init__(self, folder: Path, temporary: bool) -> None:
        self.folder, self.temporary = folder, temporary
        self.calls: list[str] = []
        self.states: dict[str, Files] = {}  # by digest: most calls change nothing

    def note(self, name: str) -> None:
        """Keep what is on the disk now."""
        self.calls.append(name)
        files = read_files(self.folder)
        kept = {n: c for n, c in files.items() if self.temporary or ".tmp" not in n}
        digest = hashlib.blake2b(repr(sorted(kept.items())).encode()).hexdigest()
        self.states.setdefault(digest, files)


class FullDisk:
    """Refuses one call, and every other until it is freed."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.refused = at, 0, ""

    def note(self, name: str) -> None:
        """Raise if it is full."""
        self.count += 1
        if self.count == self.at:
            self.refused = name
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/secret/path")


def plain_passive(context: Context) -> PassiveParty:
    """Return a passive party for GAFM."""
    number = int(context.node_config["partition-id"])
    model = nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.Dropout(0.2))
    return PassiveParty(features(number), model, device="cpu", optimizer=ADAM)


def gafm_label(context: Context) -> LabelParty:
    """Return a label party whose objective hides labels."""
    objective = GAFM(WIDTH * 2, squashed=False)
    return LabelParty(
        labels(), objective, device="cpu", optimizer=ADAM, trust_server=True
    )


def _gafm() -> ClientApp:
    return vertical_client_app(plain_passive, gafm_label)


def _raising(at: Any) -> dict[str, Any]:
    limit = Leakage(("mean",), limit=0.51, action="raise", window=2, factor=3.0)
    return {"defense": Defense("iso:t=0.01", at=at, noise_seed=2), "leakage": limit}


_rich = rich_app(build_defense=build_defense)
CASES: dict[str, tuple[ClientApp, Callable[[], dict[str, Any]]]] = {
    "plain": (_rich, dict),
    "early stopping": (
        _rich,
        lambda: {
            "early_stopping": EarlyStopping(patience=1, metric="loss"),
            "valid_fraction": 0.2,
            "learning_rate": 0.1,
            "evaluate_every": 1,
        },
    ),
    "geno": (
        _rich,
        lambda: {"defense": Defense("geno:exclude=true", noise_seed=2)},
    ),
    "raised at the strategy": (_rich, lambda: _raising("strategy")),
    "raised at the label party": (_rich, lambda: _raising("label")),
    "gafm": (_gafm(), lambda: {"defense": Defense(noise_seed=3)}),
    "psu": (make_app(), dict),
}


def make_run(case: str, folder: Path, **changed: Any) -> VerticalStrategy:
    """Return the strategy of a case."""
    kept = Checkpoints(every=EVERY, folder=folder, keep_final=True)
    if case == "psu":
        return make_strategy(checkpoints=kept)
    given = {"batch_size": 24, "seed": 5, "progress": False, "evaluate_every": 2}
    own = {**given, "checkpoints": kept, **CASES[case][1](), **changed}
    return VerticalStrategy(**own)


def start(case: str, folder: Path, resume: bool = False, **changed: Any) -> Any:
    """Run a case; return everything that a user can see of it, but for times."""
    with InProcessGrid(CASES[case][0], 3, {"state-dir": str(folder)}) as grid:
        made = make_run(case, folder, **changed)
        result = made.start(grid, num_rounds=2, resume=resume)
    return outcome(folder, result)


def outcome(folder: Path, result: VerticalResult) -> list[Any]:
    """Return weights, history and protection at the end of a run."""
    state = DirectoryStore(folder / "strategy").load("final")
    run = {key: value for key, value in state["run"].items() if "seconds" not in key}
    train = {
        epoch: {name: v for name, v in dict(metrics).items() if "seconds" not in name}
        for epoch, metrics in result.train_metrics_clientapp.items()
    }
    evaluated = {e: dict(m) for e, m in result.evaluate_metrics_clientapp.items()}
    history = [train, evaluated, result.records, result.stopped]
    defender = _bits(state["defender"])  # Geno's has NaN, which equals nothing
    return [final_states(folder), history, {**run, "train": train}, defender]


def _bits(state: Any) -> Any:
    """Return a nested state with the bytes of its tensors."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: _bits(value) for key, value in state.items()}
    return [_bits(each) for each in state] if isinstance(state, list) else state
