"""The table of a comparison: utility, leakage and time of each method over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
from rich.table import Table

from flower_vfl.simulations.results import RUN

from .methods import VANILLA
from .run_metrics import completions, largest_leaks, main_metric, utilities, whole_run
from .study import Study
from .tradeoff import DEFENSE

Row = Mapping[str, Any]
_COLUMNS = 4  # attacks side by side, so that 80 characters are enough
_NAME_WIDTH = 20


def table_document(study: Study) -> dict[str, Any]:
    """Return the table: one row for each method that has a finished run."""
    records, methods = study.records(), study.labels()[DEFENSE]
    done = completions(records).query("split == 'test'")
    found = largest_leaks(records).rename(columns={"leak": "value"})
    found = pd.concat([found, done]).assign(method=lambda part: part[RUN].map(methods))
    steps = whole_run(records, "seconds_step").rename("step").to_frame()
    # a run without an evaluation has a utility that is not a number
    runs = steps.join(utilities(records)["value"]).join(methods.rename("method"))
    vanilla = runs["step"][runs["method"] == VANILLA].median()
    rows = []
    for method, own in runs.groupby("method", sort=False):
        attacks = found[found["method"] == method].groupby("attack", sort=False)[
            "value"
        ]
        step = float(own["step"].median())
        row = {
            "defense": method,
            "runs": len(own),
            "utility": _summary(own["value"]),
            "leaks": {attack: _summary(values) for attack, values in attacks},
            "seconds_per_step": step,
            "time_ratio": step / float(vanilla) if vanilla > 0 else None,
        }
        rows.append(row)
    errors = list(study.errors.values())
    metric = main_metric(records)
    return {"title": study.title, "metric": metric, "rows": rows, "errors": errors}


def _summary(values: pd.Series[float]) -> dict[str, float]:
    found = values.agg(["mean", "std", "min", "max"]).rename({"std": "sd"})
    return {
        str(name): float(value) for name, value in found.fillna({"sd": 0.0}).items()
    }


def _attacks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(attack for row in rows for attack in row["leaks"]))


def screen_tables(document: Row) -> Iterator[Table]:
    """Yield the table for a terminal of 80 columns, four attacks in each part."""
    attacks = _attacks(document["rows"])
    for start in range(0, max(len(attacks), 1), _COLUMNS):
        yield _part(document, attacks[start : start + _COLUMNS], start == 0)


def _part(document: Row, attacks: Sequence[str], first: bool) -> Table:
    table = Table(show_lines=True)
    table.add_column("defense", overflow="fold", max_width=_NAME_WIDTH)
    utility = [f"{_metric(document)}\nworst–best"] if first else []
    for name in [*utility, *attacks, *(["time"] if first else [])]:
        table.add_column(name, justify="right", overflow="fold")
    for row in document["rows"]:
        cells = [_leak(row, attack) for attack in attacks]
        if first:
            found = row["utility"]
            ends = f"{found['min']:.3f}–{found['max']:.3f}"
            cells = [f"{found['mean']:.3f}\n{ends}", *cells, _time(row)]
        table.add_row(row["defense"], *cells)
    return table


def _metric(document: Row) -> str:
    return str(document["metric"]).replace("_", " ").replace("auc", "AUC")


def _leak(row: Row, attack: str) -> str:
    if attack not in row["leaks"]:
        return ""
    found = row["leaks"][attack]
    return f"{found['mean']:.3f}" + (f"\n±{found['sd']:.3f}" if row["runs"] > 1 else "")


def _time(row: Row) -> str:
    return "" if row["time_ratio"] is None else f"{row['time_ratio']:.2f}×"


def markdown_table(document: Row) -> str:
    """Return the table in Markdown."""
    attacks = _attacks(document["rows"])
    heads = ["defense", _metric(document), "worst", "best", *attacks, "time"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in document["rows"]:
        method = row["defense"].replace("|", "\\|")
        utility = [f"{row['utility'][name]:.3f}" for name in ("mean", "min", "max")]
        leaks = [_leak(row, attack).replace("\n±", " ± ") for attack in attacks]
        cells = [f"`{method}`", *utility, *leaks, _time(row)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def legend(study: Study, document: Row) -> str:
    """Return what the figures of the table are."""
    runs = max(row["runs"] for row in document["rows"])
    regression = utilities(study.records())["regression"].any()
    leak = "|ρ|, 0" if regression else "leak AUC, 0.5"
    at_once = max(d.get("workers", 1) for d in study.documents.values())
    parallel = f"; {at_once} runs at a time, which slows them" if at_once > 1 else ""
    seeds = f"mean over {runs} seeds" if runs > 1 else "1 seed"
    return (
        f"{seeds}; {leak}: nothing leaks, ± sd, at the party that learns most; time of "
        f"a step, attacks included, beside '{VANILLA}'{parallel}"
    )
