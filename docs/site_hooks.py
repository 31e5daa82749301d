"""What ``mkdocs build`` needs beyond mkdocs.yml: sources, outside pages, tables.

- The package's folders ``strategies`` and ``simulations`` lie outside it, so the API
  reference is read from a copy in which they are in their places.
- A few documents lie outside ``docs``, the notebooks of ``examples`` among them; they
  become pages, and links to them are led there. A link to any other file of the
  repository becomes plain text.
- The tables of commands and settings are made from the code.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "simulations/deployment/README.md": "deployment.md",
}
NOTEBOOKS = {
    f"examples/{path.name}": f"examples/{path.stem}.md"
    for path in sorted((ROOT / "examples").glob("*.ipynb"))
}
MAPPED = ("strategies", "simulations")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_DEFAULT = re.compile(r"^( *[\w, *]+ : .+) \(default: .*\)$", re.MULTILINE)
_staged: list[str] = []


@event_priority(100)  # before mkdocstrings looks at its settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let the API reference be read from a copy of the package."""
    folder = tempfile.mkdtemp(prefix="flower-vfl-docs-")
    _staged.append(folder)
    package = Path(folder) / "flower_vfl"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "flower_vfl", package, ignore=ignore)
    for name in MAPPED:
        shutil.copytree(ROOT / name, package / name, ignore=ignore)
    for file in package.rglob("*.py"):  # the signature has every default already
        file.write_text(_DEFAULT.sub(r"\1", file.read_text()))
    handlers: dict[str, Any] = config.plugins["mkdocstrings"].config["handlers"]
    handlers["python"]["paths"] = [folder]
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """Remove the copy."""
    _remove_staged()


def on_build_error(error: Exception) -> None:
    """Remove the copy."""
    _remove_staged()


def _remove_staged() -> None:
    while _staged:
        shutil.rmtree(_staged.pop(), ignore_errors=True)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents that lie outside `docs`."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for source, page in NOTEBOOKS.items():
        text = "\n\n".join(_notebook(json.loads((ROOT / source).read_text())))
        files.append(File.generated(config, page, content=text))
    return files


def _notebook(document: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a notebook and their stored outputs as Markdown."""
    for cell in document["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/html" in data:
                # The theme's tables have no class.
                yield "".join(data["text/html"]).replace(' class="dataframe"', "")
            else:
                text = "".join(output.get("text") or data["text/plain"]).rstrip()
                yield f"```text\n{text}\n```"


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Lead links to where the site has their targets, and fill in tables."""
    uri = page.file.src_uri
    parts = _FENCE.split(markdown)  # every other part is a block of code
    parts[::2] = [_with_links(part, uri, files) for part in parts[::2]]
    filled = "".join(parts)
    if uri == "reference/commands.md":
        filled = filled.replace("<!-- commands -->", "\n".join(_commands()))
    if uri == "reference/settings.md":
        filled = filled.replace("<!-- settings -->", "\n".join(_settings()))
    return filled


def _with_links(text: str, uri: str, files: Files) -> str:
    """Return the text of a page with links as the site has their targets."""
    pages = (
        {f"docs/{file.src_uri}": file.src_uri for file in files} | OUTSIDE | NOTEBOOKS
    )
    sources = {there: source for source, there in (OUTSIDE | NOTEBOOKS).items()}
    folder = posixpath.dirname(sources.get(uri, f"docs/{uri}"))

    def lead(match: re.Match[str]) -> str:
        shown, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        wanted = posixpath.normpath(posixpath.join(folder, path))
        if wanted in pages:
            there = posixpath.relpath(pages[wanted], posixpath.dirname(uri) or ".")
            return f"[{shown}]({there}{hash_}{anchor})"
        # Files of the repository have no page; anything else is for mkdocs to find.
        return shown if (ROOT / wanted).exists() else match[0]

    return _LINK.sub(lead, text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "&#124;").replace("<", "&lt;")


def _settings() -> Iterator[str]:
    from flower_vfl.simulations.cli.options import registered
    from flower_vfl.simulations.config import ABOUT, RunConfig, key

    yield "| key | default | what it does |"
    yield "|---|---|---|"
    for field in fields(RunConfig):
        help_ = ABOUT[field.name]["help"].format(**registered())
        yield f"| `{key(field.name)}` | {_default(field.default)} | {_cell(help_)} |"


def _default(value: object) -> str:
    if value is None or value == "" or value == []:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _commands() -> Iterator[str]:
    from flower_vfl.simulations.cli.main import app

    os.environ["FLOWER_VFL_PLUGINS"] = ""  # a builder's own methods are not ours
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    for name, command in group.commands.items():
        yield f"## flower-vfl {name}\n"
        text = f"{command.help}\n".replace("example:\n", "example:\n\n")
        yield re.sub("^flower-vfl", "    flower-vfl", text, flags=re.MULTILINE)
        loaded = command.make_context(name, [], resilient_parsing=True).command
        yield from _parameters(loaded.params)
        yield ""


def _parameters(parameters: list[click.Parameter]) -> Iterator[str]:
    panels: dict[str, list[click.Parameter]] = {}
    for parameter in parameters:
        panel = getattr(parameter, "rich_help_panel", None) or ""
        panels.setdefault(panel, []).append(parameter)
    for panel, members in panels.items():
        if panel:
            yield f"\n**{panel}**\n"
        yield "| option | default | what it does |"
        yield "|---|---|---|"
        for member in members:
            named = member.opts if isinstance(member, click.Option) else [member.name]
            options = ", ".join(f"`{name}`" for name in named)
            help_ = _cell(getattr(member, "help", None) or "")
            yield f"| {options} | {_default(member.default)} | {help_} |"
