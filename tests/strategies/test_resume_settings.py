"""Which settings a resumed run may change, and how the others are refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_cases import Files, make_run, read_files, watched_disk, write_files
from flwr.app import Context
from leak_cases import flower_warnings
from torch import nn
from vertical_cases import ADAM, COLUMNS, SGD, WIDTH, features, labels

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    Leakage,
    PartyError,
    PassiveParty,
    vertical_client_app,
)
from flower_vfl.simulations.config import RunConfig
from flower_vfl.strategies import Checkpoints, Defense, EarlyStopping, build_defense
from flower_vfl.strategies.checkpoints import MAY_CHANGE

NOTES = {"width": 3, "learning-rate": "", "epochs": 2, "out": "a", "seed": 5}


def party(context: Context, **options: Any) -> Any:
    """Return a party; options change the data, the model and the optimizer."""
    number = int(context.node_config["partition-id"])
    shift, width = options.get("shift", 0.0), options.get("width", WIDTH)
    optimizer = options.get("optimizer", ADAM)
    if number == 0:
        truth = 1 - labels() if options.get("other_labels") else labels()
        objective = CrossEntropy(nn.Linear(2 * width, 1))
        return LabelParty(
            truth, objective, device="cpu", trust_server=True, optimizer=optimizer,
            build_defense=build_defense,
        )  # fmt: skip
    data = features(number) + shift * (number == 2)
    model = nn.Linear(COLUMNS, width)
    return PassiveParty(data, model, device="cpu", optimizer=optimizer)


def run(
    folder: Path, resume: bool, epochs: int = 2, own: Any = None, **changed: Any
) -> Any:
    make = partial(party, **(own or {}))
    app = vertical_client_app(make, make)
    given = {"notes": NOTES, "defense": Defense("iso:t=3", noise_seed=1)}
    made = make_run("plain", folder, **{**given, **changed})
    grid = InProcessGrid(app, 3, {"state-dir": str(folder)})
    with grid, watched_disk(lambda name: None):
        return made.start(grid, num_rounds=epochs, resume=resume)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return the files of a finished run."""
    folder = tmp_path_factory.mktemp("first")
    run(folder, resume=False)
    return read_files(folder)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 6}, "seed was 5 in the run that is resumed, now 6; resume with 5"),
        ({"batch_size": 16}, "batch_size was 24 .* now 16"),
        ({"aggregation": "concat"}, "aggregation was not set .* now concat"),
        ({"learning_rate": 0.1}, r"learning_rate was not set .* now {'\*': 0.1}"),
        ({"test_fraction": 0.25}, "test_fraction was 0.2 .* now 0.25"),
        ({"valid_fraction": 0.1}, "valid_fraction was 0.0 .* now 0.1"),
        ({"evaluate_every": 1}, "evaluate_every was 2 .* now 1"),
        (
            {"early_stopping": EarlyStopping(2), "valid_fraction": 0.2},
            "(early_stopping|valid_fraction) was",
        ),
        ({"defense": Defense("iso:t=2", noise_seed=1)}, "was iso:t=3.0 at .*iso:t=2.0"),
        ({"defense": Defense("iso:t=3", noise_seed=2)}, "noise_seed was 1 .* now 2"),
        ({"defense": Defense("iso:t=3", "label", 1)}, "at the strategy .* the label"),
        ({"defense": ()}, "defense was iso:t=3.0 .* now not set"),
        ({"leakage": Leakage(("norm",))}, "leakage was not set .* now Leakage"),
        ({"notes": {**NOTES, "width": 8}}, "width was 3 .* now 8; resume with 3"),
        (
            {"notes": {**NOTES, "learning-rate": "0.1"}, "learning_rate": 0.1},
            "learning-rate was not set .* now 0.1",
        ),
        ({"notes": {}}, "width was 3 .* now not set"),
    ],
)
def test_other_settings_of_the_strategy(
    changed: dict[str, Any], words: str, first: Files, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(write_files(first, tmp_path), resume=True, epochs=3, **changed)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"shift": 1e-6}, "'passive-2': its data is not that of the run that is res"),
        ({"other_labels": True}, "'label': its data is not that of the run"),
        ({"width": 8}, r"size mismatch for top.weight.*\[1, 6\].*\[1, 16\]"),
        ({"optimizer": SGD}, "its optimizer was Adam .*, now SGD"),
        ({"optimizer": partial(torch.optim.Adam, lr=0.02)}, "'lr': 0.01.*'lr': 0.02"),
    ],
)
def test_other_data_models_and_optimizers_of_a_party(
    own: dict[str, Any], words: str, first: Files, tmp_path: Path
) -> None:
    with pytest.raises(PartyError, match=words) as caught:
        run(write_files(first, tmp_path), resume=True, epochs=3, own=own)
    assert "start without resume" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoints": 3},
        {"threads": 1, "retries": 3, "evaluation_rows": 9, "progress": None},
        {"notes": {**NOTES, "epochs": 3, "out": "b", "checkpoint-every": 1}},
    ],
)
def test_what_may_change(changed: dict[str, Any], first: Files, tmp_path: Path) -> None:
    write_files(first, tmp_path)
    if "checkpoints" in changed:
        kept = Checkpoints(every=changed["checkpoints"], folder=tmp_path)
        changed = {"checkpoints": kept}
    result = run(tmp_path, resume=True, epochs=3, **changed)
    assert list(result.train_metrics_clientapp) == [1, 2, 3]


def test_every_setting_that_may_change_is_one() -> None:
    assert set(MAY_CHANGE.split()) <= set(vars(RunConfig()))


def test_after_a_leak_limit_the_defense_may_change(tmp_path: Path) -> None:
    limit = Leakage(("mean",), limit=0.51, action="stop", window=1)
    stopped = run(tmp_path, resume=False, leakage=limit)
    assert "leak limit" in stopped.stopped
    stronger = {"defense": Defense("iso:t=20", noise_seed=1), "leakage": None}
    with flower_warnings() as told:
        result = run(tmp_path, resume=True, **stronger)
    assert list(result.train_metrics_clientapp) == [1, 2]
    changes = [line for line in told if "after the leak limit was exceeded" in line]
    assert any("iso:t=3.0" in line and "iso:t=20.0" in line for line in changes)
    with pytest.raises(ConfigError, match="seed was"):
        run(tmp_path, resume=True, seed=9, **stronger)


def test_other_parties_are_refused(first: Files, tmp_path: Path) -> None:
    write_files(first, tmp_path)
    names = ("label", "a", "b")
    configs = [{"partition-id": i, "name": n} for i, n in enumerate(names)]
    app = vertical_client_app(party, party)
    with InProcessGrid(app, configs, {"state-dir": str(tmp_path)}) as grid:
        given = {"notes": NOTES, "defense": Defense("iso:t=3", noise_seed=1)}
        made = make_run("plain", tmp_path, **given)
        with pytest.raises(
            ConfigError, match=r"passive-1, passive-2, label, now .* a, b"
        ):
            made.start(grid, num_rounds=3, resume=True)
