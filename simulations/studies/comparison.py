"""The table of a comparison: utility, leakage and time of each method over seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.table import Table

from flower_vfl.simulations.results import RUN

from .methods import VANILLA
from .run_metrics import completions, largest_leaks, main_metric, utilities, whole_run
from .study import Study
from .tradeoff import DEFENSE

_COLUMNS = 4  # attacks side by side, so that 80 characters are enough
_NAME_WIDTH = 20
_STATISTICS = {"mean": "mean", "sd": "std", "min": "min", "max": "max"}


@dataclass(frozen=True)
class Comparison:
    """What a study found about each method.

    `utility` has one row for each method, `leaks` one for each method and attack; both
    have mean, sd, min and max over the seeds. `steps` are median seconds of a step.
    """

    metric: str
    utility: pd.DataFrame
    leaks: pd.DataFrame
    steps: pd.Series[float]

    @property
    def attacks(self) -> list[str]:
        """The attacks of all methods."""
        return list(self.leaks.index.unique("attack"))

    @property
    def methods(self) -> list[str]:
        """The methods that have a finished run."""
        return list(self.steps.index)

    def time_ratio(self, method: str) -> float | None:
        """Return the time of a step relative to vanilla, or None if it is unknown."""
        vanilla = self.steps.get(VANILLA, 0.0)
        return float(self.steps[method] / vanilla) if vanilla > 0 else None


def comparison(study: Study) -> Comparison:
    """Return what a study found about each method."""
    records = study.records()
    methods = study.labels()[DEFENSE]
    done = completions(records).query("split == 'test'")
    found = largest_leaks(records).rename(columns={"leak": "value"})
    found = pd.concat([found, done])[[RUN, "attack", "value"]]
    found = found.assign(method=found[RUN].map(methods))
    steps = whole_run(records, "seconds_step")
    # a run without an evaluation has a utility that is not a number
    utility = utilities(records)["value"].reindex(steps.index)
    return Comparison(
        main_metric(records),
        _summary(utility.groupby(steps.index.map(methods), sort=False)),
        _summary(found.groupby(["method", "attack"], sort=False)["value"]),
        steps.groupby(steps.index.map(methods), sort=False).median(),
    )


def _summary(groups: Any) -> pd.DataFrame:
    found: pd.DataFrame = groups.agg(runs="size", **_STATISTICS)
    return found.fillna({"sd": 0.0})  # of a single run


def table_document(study: Study) -> dict[str, Any]:
    """Return the table for a program."""
    found = comparison(study)
    return {
        "title": study.title,
        "metric": found.metric,
        "rows": [
            {
                "defense": method,
                "runs": int(found.utility["runs"][method]),
                "utility": _numbers(found.utility.loc[method]),
                "leaks": {
                    attack: _numbers(found.leaks.loc[method, attack])
                    for attack in found.attacks
                    if (method, attack) in found.leaks.index
                },
                "seconds_per_step": float(found.steps[method]),
                "time_ratio": found.time_ratio(method),
            }
            for method in found.methods
        ],
        "errors": list(study.errors.values()),
    }


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(row[name]) for name in _STATISTICS}


def screen_tables(study: Study) -> Iterator[Table]:
    """Yield the table for a terminal of 80 columns, four attacks in each part."""
    found = comparison(study)
    for start in range(0, max(len(found.attacks), 1), _COLUMNS):
        yield _part(found, found.attacks[start : start + _COLUMNS], start == 0)


def _part(found: Comparison, attacks: list[str], first: bool) -> Table:
    table = Table(show_lines=True)
    table.add_column("defense", overflow="fold", max_width=_NAME_WIDTH)
    if first:
        table.add_column(f"{_metric(found)}\nworst–best", justify="right")
    for attack in attacks:
        table.add_column(attack, justify="right", overflow="fold")
    if first:
        table.add_column("time", justify="right")
    for method in found.methods:
        cells = [_leak(found, method, attack) for attack in attacks]
        if first:
            row = found.utility.loc[method]
            ends = f"{row['min']:.3f}–{row['max']:.3f}"
            cells = [f"{row['mean']:.3f}\n{ends}", *cells, _time(found, method)]
        table.add_row(method, *cells)
    return table


def _metric(found: Comparison) -> str:
    return found.metric.replace("_", " ").replace("auc", "AUC")


def _leak(found: Comparison, method: str, attack: str) -> str:
    if (method, attack) not in found.leaks.index:
        return ""
    row = found.leaks.loc[method, attack]
    return f"{row['mean']:.3f}" + (f"\n±{row['sd']:.3f}" if row["runs"] > 1 else "")


def _time(found: Comparison, method: str) -> str:
    ratio = found.time_ratio(method)
    return "" if ratio is None else f"{ratio:.2f}×"


def markdown_table(study: Study) -> str:
    """Return the table in Markdown."""
    found = comparison(study)
    heads = ["defense", _metric(found), "worst", "best", *found.attacks, "time"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for method in found.methods:
        escaped = method.replace("|", "\\|")
        utility = found.utility.loc[method, ["mean", "min", "max"]]
        cells = [f"`{escaped}`", *(f"{value:.3f}" for value in utility)]
        leaks = [_leak(found, method, attack) for attack in found.attacks]
        cells += [text.replace("\n±", " ± ") for text in leaks]
        lines.append("| " + " | ".join([*cells, _time(found, method)]) + " |")
    return "\n".join(lines)


def legend(study: Study) -> str:
    """Return what the figures of the table are."""
    records = study.records()
    runs = int(comparison(study).utility["runs"].max())
    regression = utilities(records)["regression"].any()
    leak = "|ρ|, 0" if regression else "leak AUC, 0.5"
    at_once = max(d.get("workers", 1) for d in study.documents.values())
    parallel = f"; {at_once} runs at a time, which slows them" if at_once > 1 else ""
    seeds = f"mean over {runs} seeds" if runs > 1 else "1 seed"
    return (
        f"{seeds}; {leak}: nothing leaks, ± sd, at the party that learns most; time of "
        f"a step, attacks included, beside '{VANILLA}'{parallel}"
    )
