"""``flower-vfl new``: a Flower app of one's own."""

import importlib.util
import keyword
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from flower_vfl.errors import ConfigError

_TEMPLATE = Path(__file__).parents[1] / "templates" / "my-app"
_LICENSE = Path(__file__).parents[1] / "label_leakage" / "LICENSE"


def new(
    name: Annotated[
        str, typer.Argument(help="Name of the app: letters, digits and hyphens.")
    ],
    publisher: Annotated[
        str, typer.Option(help="Publisher of the app on Flower's hub.")
    ] = "your-name",
    folder: Annotated[
        Path, typer.Option(help="Where to write the app's folder.")
    ] = Path(),
) -> None:
    """Write a Flower app of your own that trains over three parties.

    Run it with 'flwr run NAME'; its README has the whole command.
    """
    package = name.lower().replace("-", "_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,31}", name):  # as Flower wants it
        rule = "use a letter, then letters, digits and hyphens, at most 32 characters"
        raise ConfigError(f"'{name}' cannot be the name of a Flower app: {rule}")
    if keyword.iskeyword(package) or importlib.util.find_spec(package):
        raise ConfigError(f"Python has a module '{package}' already; choose a name")
    target = folder / name
    if target.exists():
        raise ConfigError(f"'{target}' exists already; choose another name")
    for source in sorted(_TEMPLATE.rglob("*")):
        if source.is_dir() or source.suffix == ".pyc":
            continue
        path = target / str(source.relative_to(_TEMPLATE)).replace("my_app", package)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text("utf-8").replace("my-app", name)
        text = text.replace("my_app", package).replace("your-name", publisher)
        path.write_text(text, encoding="utf-8")
    shutil.copyfile(_LICENSE, target / "LICENSE")
    print(f"wrote {target}; next: see {target / 'README.md'}")
