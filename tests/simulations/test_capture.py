"""Rows that are kept for pictures: what they are, and that a run stays the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_vfl.errors import ConfigError
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.parties.schedule import TEST, TRAIN
from flower_vfl.simulations import capture
from flower_vfl.simulations.capture import CAPTURE_FILE, check_capture, whole
from flower_vfl.simulations.cli.predict import predict_saved
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import load_rows, make_passive
from flower_vfl.simulations.results import PARTIES_FOLDER, table
from flower_vfl.simulations.runtime.engines import run_and_attack

SMALL = RunConfig(
    epochs=2, batch_size=64, attack="norm", width=3, reproducible_noise=True
)
ALL = 10_000  # more than there are


def run(config: RunConfig, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    state = str(folder / PARTIES_FOLDER)
    placed = replace(config, out=str(folder), state_dir=state)
    document = run_and_attack(placed, "in-process")
    kept = folder / CAPTURE_FILE
    if not kept.is_file():
        return document, {}
    with np.load(kept, allow_pickle=False) as file:
        return document, {name: file[name] for name in file}


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    records = table(document)
    records = records[~records["metric"].str.contains("seconds")]
    kept = {name: document[name] for name in ("final", "stopped", "bytes", "versions")}
    return kept | {"records": records.to_dict("list")}


def states(folder: Path) -> dict[str, Any]:
    found = {}
    for name in ("label", "passive-1", "passive-2"):
        found[name] = DirectoryStore(folder / PARTIES_FOLDER / name).load("final")
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("defense", ["", "marvell:s=4"])
@pytest.mark.parametrize("place", ["strategy", "label"])
def test_a_run_is_the_same_to_the_last_bit(
    tmp_path: Path, defense: str, place: str
) -> None:
    config = replace(SMALL, defense=defense, defense_at=place)
    plain, nothing = run(config, tmp_path / "plain")
    captured, arrays = run(replace(config, capture=20), tmp_path / "captured")
    assert not nothing and whole(arrays)
    assert without_times(plain) == without_times(captured)
    assert same(states(tmp_path / "plain"), states(tmp_path / "captured"))


def test_what_is_kept_of_test_rows(tmp_path: Path) -> None:
    config = replace(SMALL, capture=ALL)
    _, arrays = run(config, tmp_path)
    label = load_rows(config, 0)
    test = label.codes == TEST
    np.testing.assert_array_equal(arrays[capture.LABEL], label.labels[test])
    predicted = predict_saved(tmp_path)
    column = predicted.columns[-1]
    np.testing.assert_allclose(arrays[capture.PREDICTION], predicted[column], atol=1e-7)
    for index in (1, 2):
        rows = load_rows(config, index)
        model = make_passive(config, rows).model
        state = states(tmp_path)[f"passive-{index}"]
        model.load_state_dict(state["model"])
        with torch.no_grad():
            inputs = [part[torch.from_numpy(test)] for part in rows.data.inputs]
            expected = model.eval().cpu()(*inputs)
        found = arrays[f"{capture.EMBEDDING}/passive-{index}"]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_what_is_kept_of_gradients(tmp_path: Path) -> None:
    # Behind a linear top model the gradient of a row is (p − y)/B times a vector that
    # all rows share: its sign is the label.
    config = replace(SMALL, capture=ALL, epochs=3)
    document, arrays = run(config, tmp_path)
    rows = load_rows(config, 0)
    training = int((rows.codes == TRAIN).sum())
    steps = int(table(document).query("metric == 'steps'")["value"].iloc[-1])
    for party in ("passive-1", "passive-2"):
        gradient = arrays[f"{capture.GRADIENT}/{party}"].astype(np.float64)
        label = arrays[f"{capture.GRADIENT_LABEL}/{party}"]
        assert gradient.shape == (64, 3)
        # 455 rows are 7 batches of 64 and a remainder of 7, which is not kept.
        assert training % 64 == 7
        assert arrays[f"{capture.GRADIENT_STEP}/{party}"] == 3 * steps - 1
        direction = np.linalg.svd(gradient)[2][0]
        sign = np.sign(gradient @ direction)
        assert np.abs(sign @ np.where(label == 1, 1, -1)) == 64
        assert set(np.unique(label)) == {0, 1}
        predicted = arrays[f"{capture.GRADIENT_PREDICTION}/{party}"]
        # The larger the error was, the longer the row; the model is one step older.
        error = np.abs(predicted - label)
        length = np.abs(gradient @ direction)
        assert np.corrcoef(error, length)[0, 1] > 0.95


def test_so_many_rows(tmp_path: Path) -> None:
    _, arrays = run(replace(SMALL, capture=10), tmp_path)
    assert len(arrays[capture.LABEL]) == len(arrays[capture.PREDICTION]) == 10
    assert arrays[f"{capture.GRADIENT}/passive-2"].shape == (10, 3)
    assert arrays[capture.CLASSES].tolist() == ["malignant", "benign"]
    assert str(arrays[capture.TASK]) == "binary"


def test_without_test_rows(tmp_path: Path) -> None:
    config = replace(SMALL, capture=10, test_fraction=0.0, epochs=1)
    _, arrays = run(config, tmp_path)
    assert whole(arrays)
    assert capture.LABEL not in arrays
    assert len(arrays[f"{capture.GRADIENT}/passive-1"]) == 10


def test_of_values(tmp_path: Path) -> None:
    config = replace(SMALL, dataset="diabetes", capture=10, epochs=1, attack="")
    _, arrays = run(config, tmp_path)
    assert whole(arrays) and str(arrays[capture.TASK]) == "regression"


def test_refused_where_it_cannot_work() -> None:
    config = replace(SMALL, capture=5, out="somewhere")
    check_capture(config, "in-process")
    with pytest.raises(ConfigError, match="in-process"):
        check_capture(config, "ray")
    with pytest.raises(ConfigError, match="--out"):
        run_and_attack(replace(config, out=""), "in-process")
    with pytest.raises(ConfigError, match="capture must be at least 0"):
        replace(config, capture=-1)


def test_rows_without_their_parts_are_noticed(tmp_path: Path) -> None:
    _, arrays = run(replace(SMALL, capture=10, epochs=1), tmp_path)
    for name in arrays:
        fewer = {key: value for key, value in arrays.items() if key != name}
        # A gradient or an embedding less is no harm; what belongs to it is.
        if name.partition("/")[0] not in (capture.GRADIENT, capture.EMBEDDING):
            assert not whole(fewer), name
    shorter = arrays | {capture.LABEL: arrays[capture.LABEL][:-1]}
    assert not whole(shorter)
    broken = arrays[capture.PREDICTION].copy()
    broken[0] = np.nan
    assert not whole(arrays | {capture.PREDICTION: broken})
