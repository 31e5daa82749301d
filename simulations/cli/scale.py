"""``flower-vfl scale``: leakage and cost as the number of passive parties grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flower_vfl.errors import unknown_name
from flower_vfl.simulations.config import DATA, RUN, RunConfig
from flower_vfl.simulations.runtime.engines import ENGINES, set_log
from flower_vfl.simulations.studies.scaling import (
    Size,
    columns_of,
    division_of,
    found_sizes,
    growth,
    scale_trials,
    sizes_of,
)
from flower_vfl.simulations.studies.study import run_study

from .options import takes_settings
from .show import text_table
from .study_options import AsJson, AsMarkdown, Engine, Out, finish, source_of

DEFAULT = RunConfig(
    dataset="digits", attack="norm,mean:held_out=true", coalitions="all", width=4
)
_FILES = ("passive", "label_party", "id_column", "label_column", "task")


@takes_settings(DEFAULT, without=("parties", "split", "watch_memory", *_FILES))
def scale(
    config: RunConfig,
    parties: Annotated[
        str,
        typer.Option(
            help="Numbers of passive parties, separated by commas.",
            rich_help_panel=DATA,
        ),
    ] = "1,2,4,8,16",
    uneven: Annotated[
        str,
        typer.Option(
            help="Divide columns unevenly: dirichlet:alpha=0.5, and seed=1 for other "
            "shares.",
            rich_help_panel=DATA,
        ),
    ] = "",
    seeds: Annotated[
        int, typer.Option(help="How often each is run.", min=1, rich_help_panel=RUN)
    ] = 1,
    engine: Engine = "in-process",
    out: Out = None,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Measure what parties learn about labels, and what a step costs, as they grow.

    Each number of parties is run twice: with the attacks, and shortly without them for
    time, bytes and memory. A finished run is not repeated.
    """
    set_log(verbose=False)
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    sizes = sizes_of(parties)
    config = replace(config, split=division_of(uneven))
    columns_of(config, sizes[-1])  # too few are told before anything runs
    source = source_of(config)
    study = run_study(
        out or Path("runs") / f"scale-{source}",
        "scale",
        f"{source}: {sizes[0]} to {sizes[-1]} passive parties",
        scale_trials(config, sizes, seeds, engine),
        bar=not as_json,
        extra={"parties": sizes, "uneven": uneven, "engine": engine},
    )
    found = found_sizes(study)
    document = {
        "sizes": [asdict(size) for size in found],
        "growth": growth(found) if found else {},
    }

    def show() -> None:
        if found:
            _show(found, source, engine, markdown)

    finish(study, document, as_json, show)


def _show(found: Sequence[Size], source: str, engine: str, markdown: bool) -> None:
    head, rows = table_of(found)
    if markdown:
        print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
        for row in rows:
            print(f"| {' | '.join(row)} |")
    else:
        console = Console(highlight=False)
        console.print(f"{source}, {engine}", markup=False)
        console.print(text_table(head, rows, left=0))
    print(
        "leak AUC: mean over the parties / the party that it tells most / all together"
    )
    print(growth_text(found))


def table_of(found: Sequence[Size]) -> tuple[list[str], list[list[str]]]:
    """Return the table of a study as texts."""
    first = found[0]
    metric = first.metric.replace("_", " ")
    head = ["parties", "columns", metric, *(a.replace(":", ": ") for a in first.leaks)]
    head += ["ms per step", "KiB per step", "MiB"]
    rows = []
    for size in found:
        few, many = size.columns
        cells = [str(size.parties), str(few) if few == many else f"{few}-{many}"]
        cells.append(f"{size.utility:.3f}")
        cells += [" / ".join(f"{v:.2f}" for v in size.leaks[a]) for a in first.leaks]
        cells += [f"{size.seconds * 1e3:.2f}", f"{size.traffic / 1024:.1f}"]
        cells.append("" if size.memory is None else f"{size.memory / 2**20:.0f}")
        rows.append(cells)
    return head, rows


def growth_text(found: Sequence[Size]) -> str:
    """Return how cost grew, in words."""
    factors = growth(found)
    parties = factors.pop("parties")
    listed = ", ".join(
        f"{name} ×{factor:.2f} ({factor / parties:.2f} of linear)"
        for name, factor in factors.items()
    )
    few, many = found[0].parties, found[-1].parties
    return f"from {few} to {many} parties (×{parties:g}): {listed}"
