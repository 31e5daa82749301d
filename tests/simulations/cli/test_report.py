"""The report of a folder: what it says, its pictures, and the command."""

from __future__ import annotations

import json
import shutil
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import call
from PIL import Image
from report_cases import BASE, DEFENSES, read

from flower_vfl.leakage.meter import LEAK
from flower_vfl.simulations.capture import CAPTURE_FILE
from flower_vfl.simulations.cli import report as report_command
from flower_vfl.simulations.papers.experiments import load_experiment
from flower_vfl.simulations.papers.reproduce import KIND
from flower_vfl.simulations.report import (
    PICTURES_FOLDER,
    REPORT_FILE,
    figures,
    write_report,
)
from flower_vfl.simulations.report.charts import COLOURS, SERIES
from flower_vfl.simulations.report.data import load_report
from flower_vfl.simulations.report.figures import (
    leak_figures,
    tradeoff_figures,
    utility_figures,
    varied_figures,
)
from flower_vfl.simulations.results import ALONE, RUN, tables
from flower_vfl.simulations.runtime.engines import run_and_attack
from flower_vfl.simulations.studies.run_metrics import largest_leaks
from flower_vfl.simulations.studies.study import Study, Trial, run_study


@pytest.fixture
def plain_folder(study_folder: Path) -> Path:
    """The study with kept rows of its first run only: pictures of rows take time."""
    for trial in Study.load(study_folder).trials[1:]:
        (study_folder / "runs" / trial["key"] / CAPTURE_FILE).unlink()
    return study_folder


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the charts, which take most of the time, for what is said in words."""
    for kind in ("tradeoff", "leak", "privacy", "utility", "cost"):
        monkeypatch.setattr(figures, f"{kind}_figures", lambda report: [])
    monkeypatch.setattr(figures, "row_figures", lambda report, what: [])


# --- what it says -----------------------------------------------------------------


def test_summary_is_that_of_the_documents(made_report: Path) -> None:
    _, page = read(made_report)
    study = Study.load(made_report.parent)
    heads = next(row for row in page.rows if "leak norm" in row)
    for defense in DEFENSES:
        name = "no defense" if defense == "none" else defense
        row = dict(zip(heads, next(r for r in page.rows if r[0] == name), strict=True))
        keys = [t["key"] for t in study.trials if t["labels"]["defense"] == defense]
        documents = {key: study.documents[key] for key in keys}
        aucs = [document["final"]["test_auc"] for document in documents.values()]
        assert row["test AUC, worst–best"] == (
            f"{statistics.mean(aucs):.3f}\n{min(aucs):.3f}–{max(aucs):.3f}"
        )
        for attack, found in largest_leaks(tables(documents)).groupby("attack"):
            leaks = found.set_index(RUN).loc[keys, "leak"]
            text = f"{statistics.mean(leaks):.3f}\n±{statistics.stdev(leaks):.3f}"
            assert row[f"leak {attack}"] == text
        assert bool(row["bound"]) == defense.startswith("marvell")
    assert next(r for r in page.rows if r[0] == "no defense")[-1] == "1.00"


def test_a_leak_is_the_same_in_tables_and_charts(plain_folder: Path) -> None:
    study = Study.load(plain_folder)
    for key, document in study.documents.items():  # an attack that is always wrong
        records = document["records"]
        wrong = [
            metric == LEAK and attack == "norm"
            for metric, attack in zip(records["metric"], records["attack"], strict=True)
        ]
        values = zip(wrong, records["value"], strict=True)
        records["value"] = [0.3 if flip else value for flip, value in values]
        path = study.run_folder(key) / "result.json"
        path.write_text(json.dumps(document))
    report = load_report(plain_folder)
    assert report.largest_leaks["norm"].to_list() == pytest.approx([0.7] * 8)
    figures = [figure for figure in leak_figures(report) if figure.attack == "norm"]
    assert len(figures) == 2
    for figure in figures:
        data = max(figure.chart.to_dict()["datasets"].values(), key=len)
        assert {row["y"] for row in data} == {0.7}
        assert "mirrored: no defense, marvell:s=1" in figure.caption
    steps = report.leak_steps.groupby([RUN, "attack", "party"])["value"].mean()
    assert steps.groupby([RUN, "attack"]).max().to_list() == pytest.approx(
        largest_leaks(report.records).set_index([RUN, "attack"])["leak"].sort_index()
    )
    text, _ = read(write_report(plain_folder))
    assert "its whole curve is mirrored" in text


def test_runs_that_did_not_train_are_marked(
    plain_folder: Path, without_charts: None
) -> None:
    study = Study.load(plain_folder)
    for trial in study.trials:
        failed = {"iso:t=1": "01", "marvell:s=1": "1"}
        if trial["labels"]["seed"] in failed.get(trial["labels"]["defense"], ""):
            document = study.documents[trial["key"]]
            records = document["records"]
            pairs = zip(records["metric"], records["value"], strict=True)
            records["value"] = [0.4 if m == "auc" else value for m, value in pairs]
            path = study.run_folder(trial["key"]) / "result.json"
            path.write_text(json.dumps(document))
    report = load_report(plain_folder)
    marked = ["no defense", "marvell:s=1 (1 of 2 did not train)", "marvell:s=4"]
    assert list(report.settings.index) == [*marked, "iso:t=1 (did not train)"]
    text, page = read(write_report(plain_folder))
    row = next(row for row in page.rows if row[0] == "iso:t=1 (did not train)")
    assert row[2].startswith("0.400") and row[2].endswith("no better than a guess")
    first = text.index("iso:t=1 did not train on this data.")
    assert text.index("<h1>") < first < text.index("<nav")
    (figure,) = tradeoff_figures(report)
    spec = figure.chart.to_dict()
    points = max(spec["datasets"].values(), key=len)
    worst = min(points, key=lambda row: row["y"])
    assert worst["y"] == pytest.approx(0.4)  # below a guess, and in view
    domains = [
        layer["encoding"]["y"]["scale"]["domain"]
        for layer in spec["layer"]
        if "y" in layer["encoding"]
    ]
    assert all(low < 0.4 for low, _ in domains)
    labels = {
        row["label"]
        for data in spec["datasets"].values()
        for row in data
        if "label" in row
    }
    assert labels >= {"no defense", "marvell:s=4", "iso:t=1 (did not train)"}


def test_the_label_party_alone_is_a_line(tmp_path: Path, plain_folder: Path) -> None:
    assert load_report(plain_folder).alone is None
    run = next((plain_folder / "runs").iterdir())
    document = json.loads((run / "result.json").read_text())
    document[ALONE] = {"auc": 0.75, "accuracy": 0.6}
    (tmp_path / "result.json").write_text(json.dumps(document))
    report = load_report(tmp_path)
    assert report.alone == 0.75
    (figure,) = utility_figures(report)
    lines = figure.chart.to_dict()["datasets"].values()
    assert any([row["y"] for row in line] == [0.75, 0.75] for line in lines)
    assert "label party alone" in read(write_report(tmp_path))[0]


def test_files_are_shown_without_their_folders(
    tmp_path: Path, plain_folder: Path
) -> None:
    run = next((plain_folder / "runs").iterdir())
    document = json.loads((run / "result.json").read_text())
    files = {"label_party": "/secret/bank.csv", "passive": "/secret/a.csv,secret/b.csv"}
    document["config"] |= files
    (tmp_path / "result.json").write_text(json.dumps(document))
    page = read(write_report(tmp_path))[0]
    assert "bank.csv" in page and "a.csv, b.csv" in page and "secret" not in page


def test_every_section_is_there_and_the_file_is_small(made_report: Path) -> None:
    _, page = read(made_report)
    sections = [a["id"] for tag, a in page.elements if tag == "section"]
    assert sections == [
        *("summary", "tradeoff", "leak", "privacy", "utility", "gradients"),
        *("embeddings", "calibration", "cost", "settings"),
    ]
    assert not any("missing" in (a.get("class") or "") for _, a in page.elements)
    charts = [a for tag, a in page.elements if tag == "figure"]
    # 1 trade-off, 2 attacks x 2 parties, privacy, utility, 4 x 2 gradients, 4 x 2
    # embeddings, 1 calibration, time and bytes
    assert len(charts) == 1 + 4 + 1 + 1 + 8 + 8 + 1 + 2
    assert made_report.stat().st_size < 1_500_000
    area = next(row for row in page.rows if row[0] == "marvell")
    assert area[2] == "2"  # settings of one curve


def test_one_run_without_attacks_says_what_is_missing(tmp_path: Path) -> None:
    config = replace(BASE, attack="", capture=0, epochs=1, out=str(tmp_path))
    run_and_attack(config, "in-process")
    text, page = read(write_report(tmp_path))
    missing = [a for _, a in page.elements if a.get("class") == "missing"]
    assert len(missing) == 5
    assert "--capture" in text and "--attack" in text
    assert "breast-cancer: no defense" in text


def test_values_instead_of_classes(tmp_path: Path) -> None:
    config = replace(BASE, dataset="diabetes", attack="norm", out=str(tmp_path))
    run_and_attack(config, "in-process")
    text, page = read(write_report(tmp_path))
    assert "above the median" in text
    assert "The model predicts values" in text
    assert any("test Pearson" in cell for row in page.rows for cell in row)


def test_gradients_of_one_column_stand_against_predictions(tmp_path: Path) -> None:
    run_and_attack(replace(BASE, width=1, out=str(tmp_path)), "in-process")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert '"title": "prediction"' in text and '"title": "gradient"' in text


def test_unfinished_runs_are_named(plain_folder: Path, without_charts: None) -> None:
    study = Study.load(plain_folder)
    lost = study.trials[1]["key"]
    shutil.rmtree(study.run_folder(lost))
    study.errors[lost] = {"error": "party 'passive-1' <lost>"}
    study.save()
    text, _ = read(write_report(plain_folder))
    assert "marvell:s=1, 0: party &#39;passive-1&#39; &lt;lost&gt;" in text


def test_along_a_setting(tmp_path: Path, without_charts: None) -> None:
    trials = [
        Trial({"parties": str(n), "seed": "0"}, replace(BASE, parties=n, capture=0))
        for n in (1, 2, 4)
    ]
    run_study(tmp_path, "scale", "more parties", trials, bar=False)
    text, _ = read(write_report(tmp_path))
    assert "Effect of parties" in text
    figures = varied_figures(load_report(tmp_path))
    assert [figure.caption for figure in figures] == [
        *("test AUC", "largest leak AUC, norm", "mean leak AUC, norm"),
        *(
            "largest leak AUC, mean",
            "mean leak AUC, mean",
            "ms per step",
            "kB per step",
        ),
    ]
    for figure in figures:
        data = max(figure.chart.to_dict()["datasets"].values(), key=len)
        assert [row["x"] for row in data] == [1, 2, 4]
        assert [row["setting"] for row in data] == [f"parties={n}" for n in (1, 2, 4)]


def test_a_paper_stands_beside_ours(
    plain_folder: Path, without_charts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study.load(plain_folder)
    study.extra = {
        "note": "HAM10000 stands in for ISIC",
        "columns": ["AUC"],
        "paper": [{"labels": ["marvell"], "figures": ["0.93 ± 0.01"]}],
    }
    study.save()
    monkeypatch.setattr(
        "flower_vfl.simulations.report.tables._our_figures",
        lambda study: {("marvell",): ["0.91"]},
    )
    text, page = read(write_report(plain_folder))
    assert "HAM10000 stands in for ISIC" in text
    assert ["row", "AUC, ours", "AUC, paper"] in page.rows
    assert ["marvell", "0.91", "0.93 ± 0.01"] in page.rows


# --- what it draws ------------------------------------------------------------------


def test_pictures(
    plain_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--json", "--pictures")
    code, out, _ = call(capsys, monkeypatch, "report", str(plain_folder), *options)
    paths = json.loads(out)
    assert code == 0 and Path(paths["report"]).is_file()
    assert len(paths["pictures"]) == 28
    pictures = plain_folder / PICTURES_FOLDER
    vectors, rasters = sorted(pictures.glob("*.svg")), sorted(pictures.glob("*.png"))
    assert [p.stem for p in vectors] == [p.stem for p in rasters]
    assert len(vectors) == 14
    for vector, raster in zip(vectors, rasters, strict=True):
        root = ElementTree.parse(vector).getroot()
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        assert "var(" not in vector.read_text(encoding="utf-8")
        with Image.open(raster) as image:
            assert image.size == (round(2 * width), round(2 * height))
            colours = {c for _, c in image.convert("RGB").getcolors(1 << 24)}
        drawn = {e.attrib.get("fill") for e in root.iter()}
        drawn |= {e.attrib.get("stroke") for e in root.iter()}
        wanted = drawn & {COLOURS[name] for name in SERIES}
        assert wanted, vector
        solid = {tuple(bytes.fromhex(colour[1:])) for colour in wanted}
        if not vector.stem.startswith(("gradients", "embeddings")):  # see-through there
            assert solid <= colours, vector


def test_a_reproduced_table_stands_beside_the_paper(
    tmp_path: Path, without_charts: None
) -> None:
    experiment = load_experiment("gafm-original-table-3", quick=True)
    row = experiment.rows[0]
    labels = dict(zip(experiment.axes, row.labels, strict=True)) | {"seed": "0"}
    run_study(tmp_path, KIND, "a table", [Trial(labels, BASE)], bar=False)
    study = Study.load(tmp_path)
    study.extra = {
        "name": "gafm-original-table-3",
        "quick": True,
        "seeds": None,
        "note": "",
        "columns": [column.name for column in experiment.shown],
        "paper": [
            {"labels": list(labels), "figures": figures}
            for labels, figures in experiment.figures.items()
        ],
    }
    study.save()
    _, page = read(write_report(tmp_path))
    heads = next(row for row in page.rows if row[0] == "row")
    assert len(heads) == 1 + 2 * len(experiment.shown)
    for labels, printed in experiment.figures.items():
        found = next(row for row in page.rows if row[0] == " / ".join(labels))
        assert found[2::2] == [str(figure) for figure in printed]


def test_every_setting_has_a_look_of_its_own(plain_folder: Path) -> None:
    report = load_report(plain_folder)
    families = ["no defense", "marvell", "marvell", "iso"]
    assert list(report.settings["family"]) == families
    looks = list(zip(report.look.colours, report.look.shapes, strict=True))
    assert len(set(looks)) == 4
    assert looks[1][0] == looks[2][0]  # one defense


# --- the command --------------------------------------------------------------------


def test_command(
    plain_folder: Path,
    without_charts: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = next((plain_folder / "runs").iterdir())
    code, out, _ = call(capsys, monkeypatch, "report", str(run))
    assert code == 0 and out == f"{run / 'report.html'}\n"
    code, _, err = call(capsys, monkeypatch, "report", str(plain_folder / "runs"))
    assert code == 2 and "result.json" in err


def test_command_opens_the_report(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(report_command, "write_report", lambda f, _: f / REPORT_FILE)
    call(capsys, monkeypatch, "report", str(tmp_path), "--open")
    assert opened == [(tmp_path / "report.html").resolve().as_uri()]
