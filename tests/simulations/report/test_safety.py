"""What a report must not let in: markup, scripts, files of others."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_cases import read

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.capture import CAPTURE_FILE, CLASSES
from flower_vfl.simulations.report import PICTURES_FOLDER, write_report
from flower_vfl.simulations.studies.study import Study

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def test_text_of_a_folder_is_never_markup(study_folder: Path) -> None:
    study = Study.load(study_folder)
    study.title, study.kind = EVIL, EVIL
    study.extra = {
        "note": EVIL,
        "columns": [EVIL],
        "paper": [{"labels": [EVIL], "figures": {EVIL: EVIL}}],
    }
    for trial in study.trials:
        trial["labels"] = {"defense": EVIL + trial["labels"]["defense"], EVIL: EVIL}
        document = study.documents[trial["key"]]
        document["versions"] = {EVIL: EVIL}
        document["engine"] = document["config"]["dataset"] = EVIL
        for name in ("leakage", "series"):
            text = json.dumps(document[name])
            document[name] = json.loads(text.replace("passive-1", "passive-1<b>"))
        path = study.run_folder(trial["key"])
        (path / "result.json").write_text(json.dumps(document))
        with np.load(path / CAPTURE_FILE) as kept:
            arrays = {name: kept[name] for name in kept}
        arrays[CLASSES] = np.asarray([EVIL, EVIL])
        np.savez(path / CAPTURE_FILE, **arrays)
    study.save()
    text, page = read(write_report(study_folder, pictures=True))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1 and not {"img", "b"} & set(tags)
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    assert "<script>alert" not in text and text.count("&lt;script&gt;") > 20
    for picture in (study_folder / PICTURES_FOLDER).glob("*.svg"):
        tree = ElementTree.parse(picture)
        assert not [e for e in tree.iter() if e.tag.endswith(("script", "img"))]


def test_nothing_is_fetched_and_no_other_script_may_run(study_folder: Path) -> None:
    text, page = read(write_report(study_folder))
    policy = next(a for t, a in page.elements if t == "meta" and "http-equiv" in a)
    assert policy["content"] is not None
    assert policy["content"].startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy["content"]
    for _, attributes in page.elements:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in text and "@import" not in text


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"epochs": None}, "not what flower-vfl writes"),
        ({"series": {"leak_norm/a": {"steps": ["<b>"], "values": [1]}}}, "numbers"),
        ({"final": {"test_auc": "0.9"}}, "numbers"),
        ({"format": 99}, "format 99"),
    ],
)
def test_a_broken_result_is_an_error(
    tmp_path: Path, made_study: Path, broken: dict[str, Any], said: str
) -> None:
    run = next((made_study / "runs").iterdir())
    document = json.loads((run / "result.json").read_text()) | broken
    (tmp_path / "result.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=said):
        write_report(tmp_path)


def test_other_folders_are_errors(tmp_path: Path, study_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no result\.json"):
        write_report(tmp_path / "nowhere")
    study = Study.load(study_folder)
    kept = study.run_folder(study.trials[0]["key"]) / CAPTURE_FILE
    kept.write_bytes(b"PK no archive")
    with pytest.raises(ConfigError, match=CAPTURE_FILE):
        write_report(study_folder)
    study.trials[0]["key"] = "../elsewhere"
    study.save()
    with pytest.raises(ConfigError, match="not the name of a run"):
        write_report(study_folder)
    study.trials = [{"key": "a", "labels": {"defense": "none"}}]
    study.save()
    with pytest.raises(ConfigError, match=r"no run .* is finished"):
        write_report(study_folder)
