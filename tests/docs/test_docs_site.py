"""The documentation site is built without a warning, is complete and self-contained."""

from __future__ import annotations

import importlib
import logging
import re
import runpy
from dataclasses import fields
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from docs_cases import ROOT

from flower_vfl.simulations import plugins
from flower_vfl.simulations.cli import main as cli
from flower_vfl.simulations.config import RunConfig, key

PACKAGES = [
    "flower_vfl",
    "flower_vfl.alignment",
    "flower_vfl.leakage.attacks",
    "flower_vfl.objectives",
    "flower_vfl.grids.resident",
    "flower_vfl.strategies",
    "flower_vfl.parties.imputation",
    "flower_vfl.privacy",
    "flower_vfl.simulations.datasets",
    "flower_vfl.simulations.models",
    "flower_vfl.simulations.report",
]
NEEDED = ("mkdocs", "material", "mkdocstrings_handlers.python")
# What a browser loads by itself, as the attribute that says from where.
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


@pytest.fixture(scope="module")
def needed() -> None:
    """Skip where the parts that build the site are not installed."""
    missing = [name for name in NEEDED if _is_missing(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install '.[docs]'")


@pytest.fixture(scope="module")
def site(needed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: any warning is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    logging.disable(logging.NOTSET)  # mkdocs counts its warnings in the log
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.setenv(plugins.VARIABLE, "")
        config = load_config(
            str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)
        )
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
        config.plugins.on_shutdown()
    return folder


def _is_missing(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True


class Loads(HTMLParser):
    """What a page loads, and where its anchors and links are."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        address = given.get(LOADED.get(tag, ""))
        if address and given.get("rel") not in ("next", "prev"):
            self.loaded.append(address)


def missing_in(reference: set[str]) -> list[str]:
    """Return the public names that a reference does not have."""
    missing = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            home = getattr(getattr(module, name), "__module__", package)
            places = {f"{each}.{name}" for each in (*PACKAGES, home)}
            if not places & reference:
                missing.append(f"{package}.{name}")
    return missing


def test_every_public_name_is_in_the_reference() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    text = "\n".join(page.read_text() for page in pages)
    reference = set(re.findall(r"(?:^::: |{ #)([\w.]+)", text, flags=re.MULTILINE))
    assert missing_in(reference) == []
    assert missing_in(reference - {"flower_vfl.LabelParty"}) == [
        "flower_vfl.LabelParty"
    ]


@pytest.mark.usefixtures("needed")
def test_the_tables_of_the_reference_have_every_command_and_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "")
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    commands, settings = (list(hooks[name]()) for name in ("_commands", "_settings"))
    group = typer.main.get_command(cli.app)
    for name in group.commands:  # type: ignore[attr-defined]
        assert f"## flower-vfl {name}\n" in commands
    for field in fields(RunConfig):
        assert any(row.startswith(f"| `{key(field.name)}` |") for row in settings)
    for name in ("commands", "settings"):
        page = ROOT / "docs" / "reference" / f"{name}.md"
        assert f"\n<!-- {name} -->\n" in page.read_text()


@pytest.mark.extra
@pytest.mark.slow
def test_every_public_name_is_on_the_site(site: Path) -> None:
    ids: set[str] = set()
    for page in (site / "reference").glob("*.html"):
        ids |= Loads(page).ids
    assert missing_in(ids) == []


@pytest.mark.extra
@pytest.mark.slow
def test_every_command_and_setting_is_on_the_site(site: Path) -> None:
    commands = Loads(site / "reference" / "commands.html")
    group = typer.main.get_command(cli.app)
    for name in group.commands:  # type: ignore[attr-defined]
        assert f"flower-vfl-{name}" in commands.ids
    settings = (site / "reference" / "settings.html").read_text()
    for field in fields(RunConfig):
        assert f"<code>{key(field.name)}</code>" in settings


@pytest.mark.extra
@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for address in Loads(page).loaded:
            assert not re.match(r"(https?:)?//", address), f"{page.name}: {address}"
            if not address.startswith("data:"):
                target = address.partition("?")[0].partition("#")[0]
                root = site if page.name == "404.html" else page.parent
                assert (root / target.lstrip("/")).is_file(), f"{page.name}: {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text())


def test_the_navigation_has_four_parts_and_every_page() -> None:
    yaml = pytest.importorskip(
        "yaml", reason="mkdocs, which reads it, is not installed"
    )

    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml without making the objects that it names."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    parts = [title for entry in nav for title in entry]
    assert parts == ["Start", "Tutorial", "How to", "Explanation", "Reference"]
    listed = set(re.findall(r"[\w/-]+\.md", str(nav)))
    documents = (ROOT / "docs").rglob("*.md")
    there = {path.relative_to(ROOT / "docs").as_posix() for path in documents}
    assert there <= listed
