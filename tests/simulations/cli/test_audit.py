"""Audits of recorded gradients, also of apps that are not ours."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cli_cases import call
from flwr.serverapp import Grid
from markupsafe import escape
from sklearn.metrics import roc_auc_score
from third_party_apps import part_of, run_digits, run_tumours, tumours
from torch import nn

from flower_vfl import InProcessGrid, record_grid
from flower_vfl.leakage.recording import Recorder
from flower_vfl.simulations.studies import audit as audit_module
from flower_vfl.simulations.studies.study import Study

MEAN = "mean:held_out=true"
FEW = ("--attack", "norm,cosine,stale,similarity:known=false", "--defense")


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Any:
    """Call ``flower-vfl audit`` in the test's folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    return partial(call, capsys, monkeypatch, "audit")


@pytest.fixture
def audited(command: Any) -> Any:
    """Audit a recording and return what the command prints for a program."""

    def run(recording: Path, *arguments: str) -> dict[str, Any]:
        given = (str(recording), "--out", "out", *arguments, "--json")
        code, out, error = command(*given)
        assert code == 0, error
        return json.loads(out)

    return run


def one_known_row(gradient: np.ndarray, labels: np.ndarray) -> float:
    """Return the AUC of the cosine to the first row whose label is 1."""
    known = np.flatnonzero(labels)[0]
    rows = gradient.reshape(len(labels), -1).astype(np.float64)
    scores = rows @ rows[known] / np.linalg.norm(rows, axis=1)
    return float(roc_auc_score(*(np.delete(each, known) for each in (labels, scores))))


def test_an_app_that_is_not_ours(tmp_path: Path, audited: Any, drawn: None) -> None:
    """Flower's vertical example, with one line more: as it is, and defended."""
    found = {}
    few = (FEW[0], f"{FEW[1]},embedding", FEW[2])
    labels = tumours()[1][part_of("train")]
    for name, defense in (("plain", ""), ("marvell", "marvell:s=4")):

        def recorded(client: Any, nodes: int, folder: Path = tmp_path / name) -> Grid:
            grid, kind = InProcessGrid(client, nodes), "train.apply_gradients"
            known = {"labels": labels, "embeddings": "arrays"}
            return record_grid(grid, folder, message_type=kind, **known)

        outcome = run_tumours(recorded, defense=defense, seed=1)
        found[name] = audited(tmp_path / name, *few, "marvell:s=4")
        aucs = np.array([one_known_row(*each) for each in outcome.received])
        largest = max(max(a.mean(), 1 - a.mean()) for a in (aucs[0::2], aucs[1::2]))
        assert found[name]["leaks"]["none"]["cosine"] == pytest.approx(largest)
    plain, defended = (found[name]["leaks"]["none"] for name in found)
    assert plain["cosine"] > 0.95 and plain["similarity:known=false"] > 0.95
    assert defended["cosine"] < 0.75
    assert defended["embedding"] > 0.8
    first, helps, embeddings = found["plain"]["findings"]
    assert first.startswith("Largest leak: 1.00, by the ")
    assert helps.startswith("marvell:s=4 lowers what gradients leak from 1.00 to 0.")
    assert embeddings.startswith("The embeddings alone leak 0.")
    page = Path(found["marvell"]["report"]).read_text()  # the last
    for sentence in found["marvell"]["findings"]:
        assert f'<p class="verdict">{escape(sentence)}</p>' in page


@pytest.mark.parametrize(("exploit", "told"), [(0.9, True), (0.6, False)])
def test_what_a_defense_leaves_to_exploit_is_told(
    exploit: float, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs embeddings, so that it does not choose the defense of gradients."""
    leaks = pd.DataFrame(
        {"none": [1.0, 1.0], "iso": [0.7, exploit], "max-norm": [0.8, 0.5]},
        index=["cosine", "exploit"],
    )
    monkeypatch.setattr(audit_module, "leak_table", lambda study: leaks)
    study = Study(Path(), "audit", "t", {"task": "binary"})
    _, helps, *more = audit_module.findings(study)
    assert helps.startswith("iso lowers what gradients leak from 1.00 to 0.70")
    sentence = "With the embeddings, exploit finds 0.90 behind iso."
    assert more == ([sentence] if told else [])


def test_a_client_mod_records_several_classes(tmp_path: Path, audited: Any) -> None:
    recorder = Recorder(tmp_path / "digits")
    run_digits(InProcessGrid, defense=recorder)
    recorder.save()
    found = audited(tmp_path / "digits", "--attack", MEAN, "--defense", "iso:t=99")
    leaks = found["leaks"]
    assert leaks["none"][MEAN] > 0.85 > 0.65 > leaks["iso:t=99"][MEAN]


def record(folder: Path, values: bool = False) -> None:
    """Train plain PyTorch, with three lines more."""
    torch.manual_seed(0)
    x = torch.randn(120, 4)
    y = x[:, 0] if values else (x[:, 0] > 0).long()
    bottom, top = nn.Linear(4, 3), nn.Linear(3, 1)
    recorder = Recorder(folder)  # NEW
    for _ in range(2):
        for rows in torch.arange(120).split(60):
            embedding = recorder.watch(bottom(x[rows]), y[rows], row=rows)  # NEW
            score = top(embedding)[:, 0]
            if values:
                nn.functional.mse_loss(score, y[rows]).backward()
            else:
                loss = nn.functional.binary_cross_entropy_with_logits
                loss(score, y[rows].float()).backward()
    recorder.save()  # NEW


def test_plain_pytorch_and_every_attack_that_fits(tmp_path: Path, command: Any) -> None:
    record(tmp_path / "plain")
    code, out, _ = command("plain", "--defense", "max-norm")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    for words in ("plain: 4 steps; passive-1 (120 rows)", "exploit", "embedding"):
        assert words in out
    assert "Largest leak: 1.00" in out and "The embeddings alone leak" in out
    assert (tmp_path / "runs" / "audit-plain" / "report.html").is_file()


def test_predictions_are_a_yardstick(tmp_path: Path, audited: Any) -> None:
    labels = np.tile([0, 1], 50)
    noise = np.random.default_rng(0).normal(size=(100, 3))
    parts = {"gradient": noise, "label": labels, "prediction": 0.2 + 0.6 * labels}
    np.savez(tmp_path / "a.npz", **parts)  # type: ignore[arg-type]
    found = audited(tmp_path / "a.npz", *FEW, "max-norm")
    result = tmp_path / "out" / "runs" / "none" / "result.json"
    assert json.loads(result.read_text())["final"]["train_auc"] == 1.0
    assert max(found["leaks"]["none"].values()) < 0.75


def test_a_regression(tmp_path: Path, audited: Any) -> None:
    record(tmp_path / "values", values=True)
    found = audited(tmp_path / "values", "--defense", "max-norm")
    assert set(found["leaks"]["none"]) >= {"norm", "spectral", "embedding"}
    assert (
        json.loads(Path("out/study.json").read_text())["extra"]["task"] == "regression"
    )
    assert "Largest leak" in found["findings"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "'nothing' is no .npz or Parquet file, and no folder of them"),
        (["plain", "--attack", "strange"], "unknown score attack 'strange'"),
        (["plain", "--defense", "strange"], "unknown defense 'strange'"),
        (["plain", "--task", "strange"], "unknown task 'strange'"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, tmp_path: Path, command: Any
) -> None:
    record(tmp_path / "plain")
    code, _, error = command(*arguments)
    assert code != 0 and message in error and "Traceback" not in error


def test_nothing_is_overwritten(tmp_path: Path, command: Any) -> None:
    record(tmp_path / "plain")
    for name, content, held in (
        ("study.json", '{"kind": "compare"}', "a study of another kind, compare"),
        ("result.json", "{}", "a run"),
    ):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(content)
        given = ("plain", "--attack", "norm", "--out", str(folder))
        code, _, error = command(*given)
        assert code != 0 and f"holds {held}; choose another --out" in error
        assert (folder / name).read_text() == content


def test_parties_must_agree(tmp_path: Path, command: Any) -> None:
    recorder = Recorder(tmp_path / "two")
    for party, label in (("a", [0, 1]), ("b", [1, 0])):
        recorder.add(torch.ones(2, 2), label, party=party)
    recorder.save()
    code, _, error = command("two")
    assert code != 0 and "its labels differ from those of 'a'" in error
    assert "'b'" in error and "Record the rows of a step in the same order" in error
