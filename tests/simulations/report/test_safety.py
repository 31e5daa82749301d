"""What a report must not let in: markup, scripts, files of others."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import TOLD, Page, draw, middle
from report_cases import read

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.capture import CAPTURE_FILE, CLASSES
from flower_vfl.simulations.report import (
    PICTURES_FOLDER,
    REPORT_FILE,
    write_report,
)
from flower_vfl.simulations.report.data import load_report
from flower_vfl.simulations.report.page import (
    contents,
    script,
    write_page,
    write_pictures,
)
from flower_vfl.simulations.studies.study import Study

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def test_text_of_a_folder_is_never_markup(study_folder: Path) -> None:
    study = Study.load(study_folder)
    study.title, study.kind = EVIL, EVIL
    study.extra = {
        "note": EVIL,
        "columns": [EVIL],
        "paper": [{"labels": [EVIL], "figures": [EVIL]}],
    }
    for trial in study.trials:
        trial["labels"] = {"defense": EVIL + trial["labels"]["defense"], EVIL: EVIL}
        document = study.documents[trial["key"]]
        document["versions"] = {EVIL: EVIL}
        document["engine"] = document["config"]["dataset"] = EVIL
        text = json.dumps(document["records"])
        text = text.replace("passive-1", "passive-1<b>").replace(
            "norm", "norm</script>"
        )
        document["records"] = json.loads(text)
        path = study.run_folder(trial["key"])
        (path / "result.json").write_text(json.dumps(document))
        if trial is not study.trials[0]:  # pictures take time
            (path / CAPTURE_FILE).unlink()
    kept = study.run_folder(study.trials[0]["key"]) / CAPTURE_FILE
    with np.load(kept) as file:
        arrays = {name: file[name] for name in file}
    arrays[CLASSES] = np.asarray([EVIL, EVIL])
    np.savez(kept, **arrays)
    study.save()
    report = load_report(study_folder)
    sections = contents(report)
    write_page(report, sections, study_folder / REPORT_FILE)
    text, page = read(study_folder / REPORT_FILE)
    tags = [tag for tag, _ in page.elements]
    # One script runs; the other is data.
    assert tags.count("script") == 2 and not {"img", "b"} & set(tags)
    types = [
        attributes.get("type") for tag, attributes in page.elements if tag == "script"
    ]
    assert types == ["application/json", None]
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    assert "<script>alert" not in text and text.count("&lt;script&gt;") > 20
    assert len(re.findall("</script", text, re.IGNORECASE)) == 2
    first = {name: (drawn[:1], []) for name, (drawn, _) in sections.items()}
    write_pictures(first, study_folder / PICTURES_FOLDER)
    pictures = list((study_folder / PICTURES_FOLDER).glob("*.svg"))
    assert len(pictures) > 5
    for picture in pictures:
        tree = ElementTree.parse(picture)
        assert not [e for e in tree.iter() if e.tag.endswith(("script", "img"))]


def test_tooltips_and_legends_show_text_only(study_folder: Path, browser: Page) -> None:
    study = Study.load(study_folder)
    for trial in study.trials:
        trial["labels"] = {"defense": EVIL + trial["labels"]["defense"]}
    study.save()
    draw(browser, write_report(study_folder))
    browser.move(*middle(browser, "#tradeoff .role-mark [aria-label]"))
    browser.wait(f"{TOLD}.includes('<script>alert(1)')")
    assert browser.run("document.querySelectorAll('img, script').length") == 2
    assert browser.problems == []


def test_text_of_a_folder_is_never_an_expression(study_folder: Path) -> None:
    study = Study.load(study_folder)
    code = "'] + alert(1) + datum['"
    for trial in study.trials:
        trial["labels"] = {"defense": code + trial["labels"]["defense"], code: code}
        if trial is not study.trials[0]:  # pictures of rows take time
            (study.run_folder(trial["key"]) / CAPTURE_FILE).unlink()
    study.save()
    sections = contents(load_report(study_folder)).values()
    for figure in (figure for figures, _ in sections for figure in figures):
        spec = figure.chart.to_dict()
        assert code not in json.dumps(list(expressions(spec)))


def expressions(spec: Any) -> Iterator[Any]:
    """Yield what Vega evaluates in a specification."""
    if isinstance(spec, dict):
        for key, value in spec.items():
            if key in ("filter", "calculate", "expr", "test", "signal", "update"):
                yield value
            yield from expressions(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from expressions(value)


def test_nothing_is_fetched_and_no_other_script_may_run(made_report: Path) -> None:
    text, page = read(made_report)
    policy = next(a for t, a in page.elements if t == "meta" and "http-equiv" in a)
    assert policy["content"] is not None
    assert policy["content"].startswith("default-src 'none'")
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy["content"]
    assert f"<script>{script()}</script>" in text
    for _, attributes in page.elements:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    written = text.replace(script(), "")
    assert "url(" not in written and "@import" not in written


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"config": None}, "not what flower-vfl writes"),
        ({"records": None}, "not what flower-vfl writes"),
        ({"seconds": {"step": "<b>"}}, "not what flower-vfl writes"),
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
