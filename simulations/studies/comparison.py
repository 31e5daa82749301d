"""The table of a comparison: utility, leakage and time of each method over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from .methods import VANILLA
from .run_metrics import completions_in, is_regression, utility_of, worst_leaks
from .study import Study
from .tradeoff import DEFENSE

_COLUMNS = 4  # attacks side by side, so that 80 characters are enough
_NAME_WIDTH = 20


@dataclass
class Row:
    """What the runs of one method found, one value for each seed."""

    method: str
    utility: list[float] = field(default_factory=list)
    leaks: dict[str, list[float]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)


def rows_of(study: Study) -> list[Row]:
    """Return one row for each method that has a finished run."""
    rows: dict[str, Row] = {}
    for trial in study.trials:
        document = study.documents.get(trial["key"])
        if document is None:
            continue
        method = trial["labels"][DEFENSE]
        row = rows.setdefault(method, Row(method))
        row.utility.append(utility_of(document)[1])
        row.steps.append(document["seconds"]["step"])
        for attack, leak in {**worst_leaks(document), **_completed(document)}.items():
            row.leaks.setdefault(attack, []).append(leak)
    return list(rows.values())


def _completed(document: Mapping[str, Any]) -> dict[str, float]:
    found = completions_in(document).items()
    return {
        name.removeprefix("completion_").removesuffix("_test"): success
        for name, success in found
        if name.endswith("_test")
    }


def time_ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Return how many times as long as vanilla a step takes, None if it is not known."""
    for vanilla in rows:
        if vanilla.method == VANILLA and statistics.median(vanilla.steps) > 0:
            return statistics.median(row.steps) / statistics.median(vanilla.steps)
    return None


def table_document(study: Study) -> dict[str, Any]:
    """Return the table for a program."""
    rows = rows_of(study)
    documents = list(study.documents.values())
    return {
        "title": study.title,
        "metric": utility_of(documents[0])[0] if documents else "",
        "rows": [
            {
                "defense": row.method,
                "runs": len(row.utility),
                "utility": _summary(row.utility),
                "leaks": {attack: _summary(v) for attack, v in row.leaks.items()},
                "seconds_per_step": statistics.median(row.steps),
                "time_ratio": time_ratio(row, rows),
            }
            for row in rows
        ],
        "errors": list(study.errors.values()),
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": statistics.mean(values),
        "sd": _spread(values),
        "min": min(values),
        "max": max(values),
    }


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def attacks_in(rows: Sequence[Row]) -> list[str]:
    """Return the attacks of all rows."""
    return list(dict.fromkeys(attack for row in rows for attack in row.leaks))


def screen_tables(study: Study) -> Iterator[Table]:
    """Yield the table for a terminal of 80 columns, in parts if there are many attacks."""
    rows = rows_of(study)
    attacks = attacks_in(rows)
    for start in range(0, max(len(attacks), 1), _COLUMNS):
        yield _part(study, rows, attacks[start : start + _COLUMNS], start == 0)


def _part(
    study: Study, rows: Sequence[Row], attacks: Sequence[str], first: bool
) -> Table:
    table = Table(show_lines=True)
    table.add_column("defense", overflow="fold", max_width=_NAME_WIDTH)
    if first:
        table.add_column(f"{_metric(study)}\nworst–best", justify="right")
    for attack in attacks:
        table.add_column(attack, justify="right", overflow="fold")
    if first:
        table.add_column("time", justify="right")
    for row in rows:
        cells = [row.method]
        if first:
            ends = f"{min(row.utility):.3f}–{max(row.utility):.3f}"
            cells.append(f"{statistics.mean(row.utility):.3f}\n{ends}")
        cells += [_folded(row.leaks.get(attack)) for attack in attacks]
        if first:
            cells.append(_times(row, rows))
        table.add_row(*cells)
    return table


def _metric(study: Study) -> str:
    document = next(iter(study.documents.values()))
    return utility_of(document)[0].replace("_", " ").replace("auc", "AUC")


def _folded(values: Sequence[float] | None) -> str:
    if not values:
        return ""
    spread = f"\n±{_spread(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def _times(row: Row, rows: Sequence[Row]) -> str:
    ratio = time_ratio(row, rows)
    return "" if ratio is None else f"{ratio:.2f}×"


def markdown_table(study: Study) -> str:
    """Return the table in Markdown."""
    rows = rows_of(study)
    attacks = attacks_in(rows)
    heads = ["defense", _metric(study), "worst", "best", *attacks, "time"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        utility = statistics.mean(row.utility), min(row.utility), max(row.utility)
        method = row.method.replace("|", "\\|")
        cells = [f"`{method}`", *(f"{value:.3f}" for value in utility)]
        for attack in attacks:
            cells.append(_folded(row.leaks.get(attack)).replace("\n±", " ± "))
        lines.append("| " + " | ".join([*cells, _times(row, rows)]) + " |")
    return "\n".join(lines)


def legend(study: Study) -> str:
    """Return what the figures of the table are."""
    rows = rows_of(study)
    runs = max(len(row.utility) for row in rows)
    document = next(iter(study.documents.values()))
    leak = "|ρ|, 0" if is_regression(document) else "leak AUC, 0.5"
    at_once = max(d.get("workers", 1) for d in study.documents.values())
    parallel = f"; {at_once} runs at a time, which slows them" if at_once > 1 else ""
    seeds = f"mean over {runs} seeds" if runs > 1 else "1 seed"
    return (
        f"{seeds}; {leak}: nothing leaks, ± sd, at the party that learns most; time of "
        f"a step, attacks included, beside '{VANILLA}'{parallel}"
    )
