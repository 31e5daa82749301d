"""The report of a folder: what it says, what it draws, and what it must not let in."""

from __future__ import annotations

import json
import shutil
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import call
from PIL import Image
from sklearn.calibration import calibration_curve

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.capture import CAPTURE_FILE, CLASSES
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.engines import run_and_attack
from flower_vfl.simulations.measures import worst_leaks
from flower_vfl.simulations.report import PICTURES_FOLDER, write_report
from flower_vfl.simulations.report.axes import Scale, shown, tick_texts
from flower_vfl.simulations.report.calibration import reliability
from flower_vfl.simulations.report.curves import short_party, thinned
from flower_vfl.simulations.report.markup import Markup, element
from flower_vfl.simulations.report.raster import dashed
from flower_vfl.simulations.report.runs import load_report
from flower_vfl.simulations.report.scene import COLOURS, MARKERS, SERIES, shape_path
from flower_vfl.simulations.report.tradeoff import stairs
from flower_vfl.simulations.study import Study, Trial, run_study

BASE = RunConfig(
    epochs=2,
    batch_size=64,
    width=4,
    attack="norm,mean",
    capture=40,
    reproducible_noise=True,
)
DEFENSES = ("none", "marvell:s=1", "marvell:s=4", "iso:t=1")


class Reader(HTMLParser):
    """Collects the elements of a page and the text of its tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small study of real runs."""
    folder = tmp_path_factory.mktemp("study")
    trials = [
        Trial(
            {"defense": defense, "seed": str(seed)},
            replace(BASE, defense="" if defense == "none" else defense, seed=seed),
        )
        for seed in (0, 1)
        for defense in DEFENSES
    ]
    study = run_study(folder, "compare", "breast-cancer, 4 defenses", trials, bar=False)
    assert len(study.documents) == 8 and not study.errors
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Return a copy of the study that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "study"))


def read(path: Path) -> tuple[str, Reader]:
    page = path.read_text(encoding="utf-8")
    return page, Reader(page)


# --- what it says -----------------------------------------------------------------


def test_summary_is_that_of_the_documents(folder: Path) -> None:
    _, page = read(write_report(folder))
    study = Study.load(folder)
    heads = next(row for row in page.rows if "leak norm" in row)
    for defense in DEFENSES:
        name = "no defense" if defense == "none" else defense
        row = dict(zip(heads, next(r for r in page.rows if r[0] == name), strict=True))
        documents = [
            study.documents[t["key"]]
            for t in study.trials
            if t["labels"]["defense"] == defense
        ]
        aucs = [document["final"]["test_auc"] for document in documents]
        assert row["test AUC"] == (
            f"{statistics.mean(aucs):.3f} ± {statistics.stdev(aucs):.3f}"
        )
        assert (row["worst"], row["best"]) == (f"{min(aucs):.3f}", f"{max(aucs):.3f}")
        for attack in ("norm", "mean"):
            leaks = [worst_leaks(document)[attack] for document in documents]
            text = f"{statistics.mean(leaks):.3f} ± {statistics.stdev(leaks):.3f}"
            assert row[f"leak {attack}"] == text
        assert bool(row["bound"]) == defense.startswith("marvell")
    assert next(r for r in page.rows if r[0] == "no defense")[-1] == "1.00"


def test_every_section_is_there_and_the_file_is_small(folder: Path) -> None:
    path = write_report(folder)
    _, page = read(path)
    sections = [a["id"] for tag, a in page.elements if tag == "section"]
    assert sections == [
        *("summary", "tradeoff", "leak", "utility", "gradients", "embeddings"),
        *("calibration", "cost", "settings"),
    ]
    assert not any("missing" in (a.get("class") or "") for _, a in page.elements)
    charts = [a for tag, a in page.elements if tag == "figure"]
    # 1 trade-off, 2 attacks x 2 parties, 1 utility, 4 x 2 gradients, 4 x 2 embeddings,
    # 1 calibration, time and bytes
    assert len(charts) == 1 + 4 + 1 + 8 + 8 + 1 + 2
    assert path.stat().st_size < 1_000_000
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
    assert "The predictions are values" in text
    assert any("test Pearson" in cell for row in page.rows for cell in row)


def test_gradients_of_one_column_stand_against_predictions(tmp_path: Path) -> None:
    run_and_attack(replace(BASE, width=1, out=str(tmp_path)), "in-process")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert ">prediction</text>" in text and ">gradient</text>" in text


def test_unfinished_runs_are_named(folder: Path) -> None:
    study = Study.load(folder)
    lost = study.trials[1]["key"]
    shutil.rmtree(study.run_folder(lost))
    study.errors[lost] = {"error": "party 'passive-1' <lost>"}
    study.save()
    text, _ = read(write_report(folder))
    assert "marvell:s=1, 0: party &#x27;passive-1&#x27; &lt;lost&gt;" in text


def test_along_a_setting(tmp_path: Path) -> None:
    trials = [
        Trial({"parties": str(n), "seed": "0"}, replace(BASE, parties=n, capture=0))
        for n in (1, 2, 4)
    ]
    run_study(tmp_path, "scale", "more parties", trials, bar=False)
    text, page = read(write_report(tmp_path))
    assert "Along parties" in text
    tips = [a["data-tip"] or "" for _, a in page.elements if "data-tip" in a]
    assert sum(tip.startswith("parties=4: ") for tip in tips) >= 4


def test_a_paper_stands_beside_ours(folder: Path) -> None:
    study = Study.load(folder)
    study.extra = {
        "note": "HAM10000 stands in for ISIC",
        "columns": ["AUC"],
        "paper": [{"labels": ["marvell"], "figures": {"AUC": "0.93 ± 0.01"}}],
        "ours": [{"labels": ["marvell"], "figures": {"AUC": "0.91"}}],
    }
    study.save()
    text, page = read(write_report(folder))
    assert "HAM10000 stands in for ISIC" in text
    assert ["row", "AUC, ours", "AUC, paper"] in page.rows
    assert ["marvell", "0.91", "0.93 ± 0.01"] in page.rows


# --- what it must not let in --------------------------------------------------------

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def test_text_of_a_folder_is_never_markup(folder: Path) -> None:
    study = Study.load(folder)
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
    text, page = read(write_report(folder, pictures=True))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1 and not {"img", "b"} & set(tags)
    names = {name for _, attributes in page.elements for name in attributes}
    assert not [name for name in names if name.startswith("on")]
    assert "<script>alert" not in text and text.count("&lt;script&gt;") > 20
    for picture in (folder / PICTURES_FOLDER).glob("*.svg"):
        tree = ElementTree.parse(picture)
        assert not [e for e in tree.iter() if e.tag.endswith(("script", "img"))]


def test_nothing_is_fetched_and_no_other_script_may_run(folder: Path) -> None:
    text, page = read(write_report(folder))
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
    tmp_path: Path, made: Path, broken: dict[str, Any], said: str
) -> None:
    run = next((made / "runs").iterdir())
    document = json.loads((run / "result.json").read_text()) | broken
    (tmp_path / "result.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=said):
        write_report(tmp_path)


def test_other_folders_are_errors(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no result\.json"):
        write_report(tmp_path / "nowhere")
    study = Study.load(folder)
    kept = study.run_folder(study.trials[0]["key"]) / CAPTURE_FILE
    kept.write_bytes(b"PK no archive")
    with pytest.raises(ConfigError, match=CAPTURE_FILE):
        write_report(folder)
    study.trials[0]["key"] = "../elsewhere"
    study.save()
    with pytest.raises(ConfigError, match="not the name of a run"):
        write_report(folder)
    study.trials = [{"key": "a", "labels": {"defense": "none"}}]
    study.save()
    with pytest.raises(ConfigError, match=r"no run .* is finished"):
        write_report(folder)


# --- what it draws ------------------------------------------------------------------


def test_pictures(folder: Path) -> None:
    write_report(folder, pictures=True)
    pictures = folder / PICTURES_FOLDER
    vectors, rasters = sorted(pictures.glob("*.svg")), sorted(pictures.glob("*.png"))
    assert [p.stem for p in vectors] == [p.stem for p in rasters]
    assert len(vectors) == 25
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


def test_every_group_has_a_look_of_its_own(folder: Path) -> None:
    groups = load_report(folder).groups
    assert [group.family for group in groups] == [
        *("no defense", "marvell", "marvell", "iso")
    ]
    looks = [(g.style.colour, g.style.marker, g.style.dash) for g in groups]
    assert len(set(looks)) == 4
    assert groups[1].style.colour == groups[2].style.colour  # one defense


def test_markers_differ_and_are_of_one_size() -> None:
    shapes = [str(shape_path(marker, 0, 0, 1)) for marker in MARKERS]
    assert len(set(shapes)) == len(MARKERS)
    for marker in MARKERS:
        for line in shape_path(marker, 10, 10, 4):
            assert all(abs(x - 10) <= 5 and abs(y - 10) <= 5 for x, y in line)


def test_stairs_by_hand() -> None:
    # (0.5, 0.6) is beaten by (0.6, 0.8)
    x, y = stairs([(0.2, 0.9), (0.5, 0.6), (0.6, 0.8), (1.0, 0.1)])
    assert list(zip(x, y, strict=True)) == [
        *((0.0, 0.9), (0.2, 0.9), (0.2, 0.8), (0.6, 0.8), (0.6, 0.1), (1.0, 0.1))
    ]
    assert np.trapezoid(y, x) == pytest.approx(0.2 * 0.9 + 0.4 * 0.8 + 0.4 * 0.1)


def test_thinning_by_hand() -> None:
    assert thinned([(1, 0.5), (2, 0.7), (1, 0.7)]) == (
        [1, 2],
        [pytest.approx(0.6), 0.7],
    )
    x, y = thinned([(n, n % 2) for n in range(1000)], most=10)
    assert x == [pytest.approx(49.5 + 100 * n) for n in range(10)]
    assert y == [pytest.approx(0.5)] * 10


def test_reliability_is_that_of_sklearn() -> None:
    draw = np.random.default_rng(0)
    predictions = draw.random(1000)
    hits = (draw.random(1000) < predictions**2).astype(float)
    true, mean = calibration_curve(hits, predictions, n_bins=10, strategy="quantile")
    x, y = reliability(predictions, hits, 10)
    np.testing.assert_allclose(x, mean)
    np.testing.assert_allclose(y, true)


def test_axes() -> None:
    assert Scale(0.0, 1.0, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert Scale(0.41, 1.0, 0, 100)(0.705) == pytest.approx(50)
    assert Scale(0.0, 1.0, 0, 100)(7.0) == 100  # never beyond the axis
    log = Scale(1.0, 64.0, 0, 60, log=True)
    assert log.ticks() == [1, 4, 16, 64]
    assert log(8.0) == pytest.approx(30)
    assert [shown(v) for v in (0, 0.5, 1234.0, 0.00012)] == [
        "0",
        "0.5",
        "1234",
        "1.2e-4",
    ]


def test_steps_are_whole() -> None:
    assert Scale(0.9, 2.1, 0, 100, whole=True).ticks() == [1, 2]
    assert Scale(1.0, 12.0, 0, 100, whole=True).ticks() == [5, 10]


def test_ticks_can_be_told_apart() -> None:
    assert tick_texts([0.5, 0.6]) == ["0.5", "0.6"]
    assert tick_texts([0.99980, 0.99985]) == ["0.9998", "0.99985"]
    assert tick_texts([1e7, 2e7]) == ["1e7", "2e7"]


def test_dashes() -> None:
    pieces = list(dashed(((0, 0), (10, 0), (10, 5)), (4, 2)))
    assert pieces == [
        [(0, 0), (4, 0)],
        [(6, 0), (10, 0)],
        [(10, 2), (10, 5)],
    ]
    assert list(dashed(((0, 0), (1, 1)), ())) == [[(0, 0), (1, 1)]]


def test_markup_escapes() -> None:
    made = element("p", "a<b", Markup("<i></i>"), class_="x", data_y='"', hidden=False)
    assert made == '<p class="x" data-y="&quot;">a&lt;b<i></i></p>'


def test_names_of_coalitions() -> None:
    assert short_party("passive-1+passive-2") == "passive-1+passive-2"
    assert short_party("+".join(f"passive-{n}" for n in range(64))) == "coalition of 64"


# --- the command --------------------------------------------------------------------


def test_command(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, out, _ = call(capsys, monkeypatch, "report", str(folder))
    assert code == 0 and out == f"{folder / 'report.html'}\n"
    options = ("--json", "--pictures")
    code, out, _ = call(capsys, monkeypatch, "report", str(folder), *options)
    paths = json.loads(out)
    assert Path(paths["report"]).is_file() and len(paths["pictures"]) == 50
    code, _, err = call(capsys, monkeypatch, "report", str(folder / "runs"))
    assert code == 2 and "result.json" in err


def test_command_opens_the_report(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    call(capsys, monkeypatch, "report", str(folder), "--open")
    assert opened == [(folder / "report.html").resolve().as_uri()]
