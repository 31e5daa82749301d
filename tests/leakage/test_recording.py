"""Recordings of any split-learning system: written, read, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from flower_vfl import Batch, GradientTransform
from flower_vfl.errors import ConfigError
from flower_vfl.leakage.recording import Recorder, read_recording

GRADIENT = np.arange(12.0).reshape(6, 2)
LABEL = np.array([0, 1, 0, 1, 0, 1])


def save(path: Path, **parts: Any) -> Path:
    known = {"gradient": GRADIENT, "label": LABEL} | parts
    np.savez(path, **{n: np.asarray(part) for n, part in known.items()})  # type: ignore[arg-type]
    return path


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    """Several parties, files of three batches, all fields."""
    recorder = Recorder(tmp_path, every=3)
    stream = torch.Generator().manual_seed(0)
    added: dict[str, list[torch.Tensor]] = {"bank": [], "shop/1": []}
    for step in range(1, 6):
        rows = torch.randperm(6, generator=stream)
        for party, width in (("bank", 2), ("shop/1", 5)):
            gradient = torch.randn(6, width, generator=stream)
            known = {"row": rows, "prediction": rows / 6}
            recorder.add(gradient, LABEL[rows], step=step, party=party, **known)
            added[party].append(gradient)
    recorder.save()
    assert len(list(tmp_path.iterdir())) == 4
    recording = read_recording(tmp_path)
    assert list(recording.parties) == ["bank", "shop/1"]
    for step, parties in recording.batches():
        assert set(parties) == set(added)
        for party, batch in parties.items():
            assert torch.equal(batch["gradient"], added[party][step - 1])
            assert (LABEL[batch["row"]] == batch["label"].numpy()).all()
            assert batch["prediction"].tolist() == (batch["row"] / 6).tolist()


def test_as_a_transform_it_changes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    assert isinstance(recorder, GradientTransform)
    gradient = torch.randn(6, 2)
    known = {"embedding": 2 * gradient, "rows": torch.arange(6)}
    batch = Batch("bank", 7, 0, torch.from_numpy(LABEL), **known)  # type: ignore[arg-type]
    assert recorder(gradient, batch) is gradient
    recorder.save()
    recorder.save()  # nothing is left
    (found,) = read_recording(tmp_path).batches()
    assert found[0] == 7 and list(found[1]) == ["bank"]
    assert torch.equal(found[1]["bank"]["embedding"], 2 * gradient)


def test_a_watched_embedding(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    embedding = torch.randn(6, 2, requires_grad=True)
    watched = recorder.watch(embedding, LABEL, row=torch.arange(6), party="bank")
    (3.0 * watched).sum().backward()
    assert torch.equal(embedding.grad, torch.full((6, 2), 3.0))  # type: ignore[arg-type]
    recorder.save()
    own = read_recording(tmp_path).parties["bank"]
    assert (own["gradient"] == 3.0).all() and own["step"].tolist() == [1] * 6
    np.testing.assert_array_equal(own["embedding"], embedding.detach())


@pytest.mark.parametrize("listed", [True, False])
def test_parquet(listed: bool, tmp_path: Path) -> None:
    columns: dict[str, Any] = {"label": LABEL, "party": ["a", "b"] * 3}
    if listed:
        columns["gradient"] = list(GRADIENT)
    else:
        columns |= {f"gradient_{k}": GRADIENT[:, k] for k in (1, 0)}
    pd.DataFrame(columns).to_parquet(tmp_path / "all.parquet")
    parties = read_recording(tmp_path / "all.parquet").parties
    assert list(parties) == ["a", "b"]
    np.testing.assert_array_equal(parties["a"]["gradient"], GRADIENT[::2])


def test_steps_and_rows_that_are_missing(tmp_path: Path) -> None:
    """A row that occurs again is a new step; equal steps have the same rows."""
    rows = [3, 5, 3, 5, 3, 5]
    own = read_recording(save(tmp_path / "a.npz", row=rows)).parties["passive-1"]
    assert own["step"].tolist() == [1, 1, 2, 2, 3, 3]
    own = read_recording(save(tmp_path / "b.npz")).parties["passive-1"]
    assert own["step"].tolist() == [1] * 6 and own["row"].tolist() == list(range(6))
    steps = [2, 2, 1, 1, 3, 3]
    own = read_recording(save(tmp_path / "c.npz", step=steps)).parties["passive-1"]
    assert own["step"].tolist() == sorted(steps)
    assert own["row"].tolist() == [0, 1] * 3
    assert own["gradient"][0].tolist() == GRADIENT[2].tolist()
    labels = [0, 1, 1, 1, 0, 1]
    own = read_recording(save(tmp_path / "d.npz", step=steps, label=labels)).parties
    assert own["passive-1"]["row"].tolist() == list(range(6))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"label": LABEL[1:]}, "'label' has 5 rows, the gradient 6 rows"),
        ({"label": 1}, "'label' has a single value"),
        ({"gradient": np.full((6, 2), np.nan)}, "'gradient' has values that are no"),
        ({"label": ["a"] * 6}, "'label' has values that are no finite numbers"),
        ({"labels": LABEL}, "has 'labels'; a recording has gradient, embedding"),
        ({"row": np.full(6, np.inf)}, "'row' has values that are no finite numbers"),
    ],
)
def test_what_is_refused(parts: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recording(save(tmp_path / "a.npz", **parts))


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no \.npz or Parquet file"):
        read_recording(tmp_path)
    with pytest.raises(ConfigError, match=r"is no \.npz or Parquet file"):
        read_recording(tmp_path / "nothing.npz")
    np.savez(tmp_path / "a.npz", gradient=GRADIENT)
    with pytest.raises(ConfigError, match="has no 'label', which an audit needs"):
        read_recording(tmp_path)
    objects = np.array([{}, {}, {}, {}, {}, {}])
    with pytest.raises(ConfigError, match="cannot be read"):  # nothing is unpickled
        read_recording(save(tmp_path / "a.npz", label=objects))
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04broken")
    with pytest.raises(ConfigError, match=r"'.*a\.npz' cannot be read"):
        read_recording(tmp_path)
    save(tmp_path / "a.npz")
    save(tmp_path / "b.npz", gradient=np.ones((6, 3)))
    with pytest.raises(ConfigError, match="gradients of 'passive-1' have 2 and 3 col"):
        read_recording(tmp_path)
    with pytest.raises(ConfigError, match="holds a recording already"):
        Recorder(tmp_path).add(GRADIENT, LABEL)
    with pytest.raises(ConfigError, match="6 rows of gradients and 5 of label"):
        Recorder(tmp_path / "new").add(GRADIENT, LABEL[1:])
