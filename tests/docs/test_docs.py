"""The documentation does what it says: its examples run, its links and tables hold."""

from __future__ import annotations

import inspect
import logging
import random
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from cli_cases import undrawn
from docs_cases import (
    ROOT,
    TOLERANCE,
    blocks_of,
    named,
    plugins_put_back,
    prose_of,
    run_document,
    same_output,
    shortened,
    slugs_of,
    table_of,
)

from flower_vfl import randomness
from flower_vfl.alignment import groups
from flower_vfl.grids.resident import Limits, ResidentGrid
from flower_vfl.protocol.messages import Verb
from flower_vfl.simulations.cli import options
from flower_vfl.simulations.cli import report as report_command
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.datasets import dataset_names
from flower_vfl.simulations.datasets.registry import SOURCES
from flower_vfl.simulations.runtime.engines import ENGINES, run_in_process
from flower_vfl.strategies import alignment as aligning

README = ROOT / "README.md"
HOW_TO = ROOT / "docs" / "how-to"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
RESIDENT = ROOT / "docs" / "resident.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("flower_vfl", "strategies", "simulations", "benchmarks", "tests", "docs")


# --- examples ---------------------------------------------------------------------


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An empty folder and namespace; what examples change is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    for engine in ("ray", "flower"):  # their own tests start Flower
        monkeypatch.setitem(ENGINES, engine, run_in_process)
    # An alignment puts rows into a random order, a defense adds random noise, and what
    # is trained follows: each document has the same draws in every run of the tests.
    drawn = random.Random(0)
    known = SimpleNamespace(
        randbelow=drawn.randrange,
        randbits=drawn.getrandbits,
        token_bytes=drawn.randbytes,
    )
    for drawing in (groups, aligning, randomness):
        monkeypatch.setattr(drawing, "secrets", known)
    module = ModuleType("documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    level = logging.getLogger("flwr").level
    with plugins_put_back(monkeypatch):
        yield module
    logging.getLogger("flwr").setLevel(level)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


WITH_EXAMPLES = [path for path in DOCUMENTS if blocks_of(path.read_text())]
NEVER = {"docs/results.md": "hours", "docs/how-to/cluster.md": "needs a cluster"}
NEVER |= {"docs/benchmark.md": "half an hour"}
# Their trainings last one epoch here, so that numbers which follow from them differ by
# up to so much; test_examples_run_at_full_length compares them.
LONG = {"docs/tutorial.md": TOLERANCE, "docs/experiments.md": 0.2}
# What is in these must not get lost; any other document with blocks has one at least.
RUN_AT_LEAST = {
    "README.md": 6,
    "docs/how-to/python.md": 3,
    "docs/existing-deployments.md": 9,
    "docs/tutorial.md": 9,
}
RUN_AT_LEAST |= {"docs/attacks.md": 5, "docs/objectives.md": 4, "docs/resident.md": 3}
RUN_AT_LEAST |= {"docs/defenses.md": 3, "docs/how-to/extend.md": 5}


# Several trainings each, even if these are short.
MANY = {*LONG, "docs/how-to/choose-a-defense.md"}
EXAMPLES = [
    pytest.param(
        path, id=short(path), marks=[pytest.mark.long] if short(path) in MANY else []
    )
    for path in WITH_EXAMPLES
]


@pytest.mark.parametrize("document", EXAMPLES)
def test_examples_run_and_print_what_is_shown(
    document: Path,
    workshop: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = short(document)
    # The report of a study has tests of its own.
    monkeypatch.setattr(options, "write_report", undrawn)
    if name != "docs/report.md":
        monkeypatch.setattr(report_command, "write_report", undrawn)
    blocks = shortened(blocks_of(document.read_text()), every=name in LONG)
    never = NEVER.get(name)
    near = LONG.get(name, TOLERANCE)
    count = run_document(blocks, name, capsys, workshop, never, near)
    assert count >= RUN_AT_LEAST.get(name, 0 if never else 1)


def is_shortened(document: Path) -> bool:
    blocks = blocks_of(document.read_text())
    return shortened(blocks, every=short(document) in LONG) != blocks


LONGER = [path for path in WITH_EXAMPLES if is_shortened(path)]


@pytest.mark.extra
@pytest.mark.parametrize("document", LONGER, ids=short)
def test_examples_run_at_full_length(
    document: Path, workshop: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks, name = blocks_of(document.read_text()), short(document)
    run_document(blocks, name, capsys, workshop, NEVER.get(name))


def test_the_readme_is_shortened() -> None:
    assert README in LONGER


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 180


def test_no_document_with_examples_has_lost_them() -> None:
    assert set(RUN_AT_LEAST) <= {short(path) for path in WITH_EXAMPLES}


def test_the_readme_shows_what_make_demo_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^demo:.*\n((\t.+\n)+)", makefile, flags=re.MULTILINE)
    assert recipe is not None
    commands = re.findall(r"(?:\$\(BIN\)/|@)((?:flower-vfl|head) .+)", recipe[1])
    assert commands
    shown = [line for b in blocks_of(README.read_text()) for line in b.code.split("\n")]
    for command in commands:
        assert command in shown


@pytest.mark.parametrize(
    "text",
    [
        "```python\nraise ValueError\n```",
        "```python\nimport flower_vfl.nothing\n```",
        "```python\nprint(0.5)\n```\n```text\n0.6\n```",
        "```text\nof nothing\n```",
        "```sh\nflower-vfl run --dataset nothing\n```",
        "```sh\nflower-vfl run --no-such-option\n```",
        "```sh\nmake nothing\n```",
        "```sh\nrm -r .\n```",
        "```sh\npip install '.[nothing]'\n```",
        "```sh\nflwr run simulations/label_leakage --federation-config "
        "num-supernodes=3 --run-config 'nothing=1'\n```",
        "```sh\nflwr run simulations/label_leakage --federation-config "
        "num-supernodes=2\n```",
        "```nothing\n```",
        "```python",
        "<!-- not run: but it must be Python -->\n```python\n1 +\n```",
        "<!-- not run: but it must exist -->\n```sh\nflower-vfl sweep --nothing 1\n```",
        "<!-- not run: so it has no output -->\n```sh\nmake test\n```\n```text\n```",
        "- a list\n\n    ```python\n    1\n    ```",
    ],
)
def test_a_wrong_example_is_found(
    text: str, workshop: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((Exception, SystemExit)):
        run_document(blocks_of(text), "wrong.md", capsys, workshop)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("AUC 0.990, 114 rows", "AUC  0.985, 114\nrows", True),
        ("AUC 0.990, 114 rows", "AUC 0.930, 114 rows", False),
        ("AUC 0.990, 114 rows", "AUC 0.990, 113 rows", False),
        ("AUC 0.990", "AUC 0.990 rows", False),
        ("test AUC −0.001.", "test AUC −0.006.", True),
        ("test AUC −0.031.", "test AUC 0.031.", False),
        ("1.8 s, 2.40 ms per step", "9.8 s, 7.77 ms per step", True),
        ("1.8 s per step", "1.8 s per epoch", False),
        ("aligned in 1.8 s. Written:", "aligned in 9.8 s. Written:", True),
        ("saved in …/runs/demo", "saved in /some/where/runs/demo", True),
        ("saved in …/runs/demo", "saved in /some/where/runs/other", False),
        ("1.00× as long, ±0.010", "3.21× as long, ±0.020", True),
        ("±0.010", "0.010", False),
        ("first\n…\nlast 0.50", "first\nsecond\nthird\nlast 0.51", True),
        ("first\n…\nlast", "first\nlast\nsecond", False),
        ("…\nlast", "first\nlast", True),
        ("first\n…", "first\nlast", True),
        ("first\n…\nthird\n…", "first\nsecond\nlast", False),
    ],
)
def test_how_outputs_are_compared(shown: str, printed: str, same: bool) -> None:
    if same:
        same_output(shown, printed)
    else:
        with pytest.raises(AssertionError):
            same_output(shown, printed)


# --- links, files, paths ----------------------------------------------------------


def broken_links(text: str, folder: Path, own: set[str]) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)]+)\)", prose_of(text)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        if path and not (folder / path).is_file():
            broken.append(target)
        elif anchor:
            slugs = slugs_of((folder / path).read_text()) if path else own
            if anchor not in slugs:
                broken.append(target)
    return broken


def missing_files(text: str) -> list[str]:
    pattern = rf"(?:{'|'.join(FOLDERS)})/[\w./-]*"
    quoted = (name for name in named(prose_of(text)) if re.fullmatch(pattern, name))
    return [name for name in quoted if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_links_and_files_exist(document: Path) -> None:
    text = document.read_text()
    assert broken_links(text, document.parent, slugs_of(text)) == []
    assert missing_files(text) == []


def test_a_broken_link_is_found() -> None:
    text = (
        "# A heading, with `code`\n[a](#a-heading-with-code) [b](#nothing) "
        "[c](README.md#install) [d](README.md#nothing) [e](nothing.md) "
        "`flower_vfl/parties/base.py` `flower_vfl/nothing.py`"
    )
    wrong = ["#nothing", "README.md#nothing", "nothing.md"]
    assert broken_links(text, ROOT, slugs_of(text)) == wrong
    assert missing_files(text) == ["flower_vfl/nothing.py"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=short)
def test_nothing_of_one_machine_is_shown(document: Path) -> None:
    assert not re.search(r"/(work|root|home|tmp|Users)/", document.read_text())


def test_the_picture_can_be_read() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "training-step.svg").getroot()
    sizes = {e.get("font-size") for e in picture.iter()} - {None}
    assert min(float(size) for size in sizes if size) >= 16
    words = " ".join("".join(e.itertext()) for e in picture.iter() if "text" in e.tag)
    for word in ("passive party", "VerticalStrategy", "label party", "transforms"):
        assert word in words


# --- tables that repeat what the code says ----------------------------------------


def test_the_protocol_table_is_the_protocol() -> None:
    rows = table_of(ARCHITECTURE.read_text(), "verb")
    shown = [(*named(row[0]), *named(row[1])) for row in rows]
    assert shown == [(verb.name, verb.value) for verb in Verb]


def test_the_settings_of_resident_are_the_codes() -> None:
    text = RESIDENT.read_text()
    parameters = inspect.signature(ResidentGrid).parameters
    settings = {
        name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY
    }
    limits = {field.name: field.default for field in fields(Limits)}
    for heading, known in (("ResidentGrid(grid, …)", settings), ("Limits(…)", limits)):
        rows = table_of(text, f"`{heading}`")
        shown = {named(row[0])[0]: eval(named(row[1])[0]) for row in rows}
        assert shown == known


def test_every_dataset_and_where_it_comes_from_is_listed() -> None:
    rows = table_of((HOW_TO / "datasets.md").read_text(), "names")
    bundled, fetched, own = (set(named(row[0])) for row in rows)
    assert bundled | fetched | own == set(dataset_names())
    files = {name: source.file for name, source in SOURCES.items()}
    assert bundled == {n for n, file in files.items() if file is None or file.bundled}
    assert fetched == {n for n, file in files.items() if file and file.fetch}


def test_every_engine_is_listed() -> None:
    rows = table_of((HOW_TO / "engines.md").read_text(), "`--engine`")
    assert [named(row[0])[0] for row in rows] == list(ENGINES)


def test_run_config_keys_of_resident_exist() -> None:
    paragraph = RESIDENT.read_text().partition("In the app of this project")[2]
    keys = named(paragraph.partition("\n\n")[0])[1:]
    assert "certificate" in keys
    assert set(keys) <= set(RunConfig().to_run_config())
