"""The page ``docs/benchmark.md``: what a finished matrix found, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.printing import markdown_table, metric_name
from flower_vfl.simulations.results import tables

from .matrix import ALL, REPORTED, STAGE, TUNING, cells, ranking
from .methods import VANILLA
from .run_metrics import main_metric
from .study import Study

_SCORES = ["DCS", "mean leak", "largest leak", "utility", "change"]
_READING = """\
- **Leak** is the leak AUC of an attack, 0.5 for a guess and 1 for all labels, at
  the party that learns most: the mean over the measured steps, or for an attack on
  an epoch that of the last epoch. `passive` is model completion by the first
  passive party, with 40 known labels: the AUC of its guesses for the other training
  rows. *Mean leak* is the mean over all attacks, *largest leak* that of the attack
  that finds most.
- **Utility** is the AUC of the test rows, with more than two classes their
  accuracy; *change* is the difference from training without a defense with the same
  seeds.
- **DCS** is the defense capability score of VFLAIR, 1/(1 + √(½·(AP − 0.5)² + ½·(MP*
  − MP)²)), with the leak AUC AP, the utility MP and the utility without a defense
  MP*. A difference below 0 counts as 0: a better model is not punished. It is
  computed for each attack and each seed, then averaged. Methods are ranked by it,
  first those that trained in all runs. `flower-vfl matrix --beta 0.8` weighs the
  utility by 0.8 instead of ½.
- A model that predicts well reveals the labels to whoever holds a part of it.
  Attacks on embeddings and trained models therefore find more than 0.5 wherever a
  bottom model of one party is useful by itself."""
_TUNING = """\
Each setting below was run once on each dataset, with seed {seed} and the attacks
{attacks}. Of each method and dataset the setting with the largest mean DCS over
these attacks was chosen, with the utility of the **validation** rows; a setting
that did not train only if none of that method did. The chosen settings were then
run with the seeds {seeds} and all attacks, and scored on the **test** rows. All
runs divide the rows in the same way: no test row was part of tuning. Every method
has as many settings{fixed}."""


def benchmark_page(study: Study) -> str:
    """Return the page of a matrix that has finished runs."""
    found = cells(study)
    if found.empty:
        raise ConfigError(f"'{study.folder}' has no finished run to report yet")
    ranked = ranking(found)
    parts = [
        "# Benchmark",
        "\n".join(
            f"{i}. {text}" for i, text in enumerate(_sentences(found, ranked), 1)
        ),
        f"```sh\n{study.extra.get('command', 'flower-vfl matrix')}\n```",
        _cost(study),
        "## Over all datasets",
        f"Mean over {_listed(_shared(ranked))}.",
        _table(ranked[ranked["dataset"] == ALL], ["method"]),
        "## What each attack finds",
        "Leak AUC, mean over datasets and seeds.",
        _attack_table(found, ranked),
        *_datasets(study, ranked),
        "## What the figures are",
        _READING,
        "## How settings were tuned",
        _tuning(study, found),
    ]
    return "\n\n".join(parts) + "\n"


def _listed(names: Any) -> str:
    *first, last = [f"`{name}`" for name in names]
    return " and ".join(filter(None, [", ".join(first), last]))


def _signed(change: float) -> str:
    return f"{round(change, 3) + 0.0:+.3f}".replace("-", "−")  # there is no −0


def _shared(ranked: pd.DataFrame) -> list[str]:
    """Return the datasets on which all methods were run, all if there is none."""
    own = ranked[ranked["dataset"] != ALL]
    counts = own.groupby("dataset", sort=False)["method"].nunique()
    shared = counts.index[counts == own["method"].nunique()]
    return [str(name) for name in (shared if len(shared) else counts.index)]


def _sentences(found: pd.DataFrame, ranked: pd.DataFrame) -> Iterator[str]:
    """Yield three sentences to quote."""
    whole = ranked[ranked["dataset"] == ALL].set_index("method")
    plain, trained = whole.loc[VANILLA], whole[whole["untrained"] == ""]
    best = trained.drop(index=VANILLA, errors="ignore").iloc[:1]
    datasets, attacks = len(_shared(ranked)), found["attack"].nunique()
    where = f"over {datasets} datasets, {attacks} attacks and {found['seed'].nunique()}"
    if best.empty:
        yield f"No defense trained in all runs {where} seeds."
    else:
        row, name = best.iloc[0], best.index[0]
        yield (
            f"Of {len(whole) - 1} defenses `{name}` has the best defense capability "
            f"score (DCS) {where} seeds: {row['dcs']:.3f}, against {plain['dcs']:.3f} "
            "without a defense."
        )
        change = _signed(row["utility"] - row["utility_none"])
        yield (
            "Without a defense the strongest attack on a dataset has a leak AUC of "
            f"{plain['largest_leak']:.2f} on average; with `{name}` it has "
            f"{row['largest_leak']:.2f}, and utility changes by {change}."
        )
    defended = found[(found["method"] != VANILLA) & (found["untrained"] == "")]
    means = defended.groupby("attack")["leak"].mean()
    if len(means):
        attack = str(means.idxmax())
        mine = found[(found["attack"] == attack) & (found["method"] == VANILLA)]
        yield (
            f"The attack that defenses stop least is `{attack}`: its leak AUC is "
            f"{means.max():.2f} on average over all defenses that trained, and "
            f"{mine['leak'].mean():.2f} without a defense."
        )


def _cost(study: Study) -> str:
    """Return what the runs are, and what they took."""
    stages = study.labels().loc[study.finished, STAGE].value_counts()
    spent = [study.documents[key]["seconds"] for key in study.finished]
    total = sum(each["total"] + each.get("completion", 0.0) for each in spent) / 60.0
    wall = study.extra.get("wall_seconds", 0.0) / 60.0
    known = study.documents[study.finished[0]]
    config, versions = known["config"], known["versions"]
    rows = f"up to {config['limit']:,}" if config["limit"] else "all"
    at_once = study.extra.get("workers", 1)
    return (
        f"The command wrote this page. It made {stages.get(TUNING, 0)} runs for tuning "
        f"and {stages.get(REPORTED, 0)} for the figures, {at_once} at a time, in "
        f"{wall:.1f} minutes; the times of all runs sum to {total:.1f} minutes. "
        f"A run has {rows} rows, {config['parties']} passive parties, "
        f"{config['epochs']} epochs and batches of {config['batch_size']}; "
        f"{config['test_fraction']:.0%} of the rows are test rows unless the dataset "
        f"has its own, and {config['valid_fraction']:.0%} validation rows. Versions: "
        f"{', '.join(f'{name} {text}' for name, text in versions.items())}."
    )


def _table(ranked: pd.DataFrame, names: list[str]) -> str:
    """Return the methods of one dataset, the best first."""
    rows = []
    for row in ranked.to_dict("records"):
        mark = " (did not train)" if row["untrained"] else ""
        left = [f"`{row[name]}`" for name in names]
        left[0] += mark
        largest = f"{row['largest_leak']:.2f}"
        largest += f" `{row['largest_attack']}`" if row["largest_attack"] else ""
        change = _signed(row["utility"] - row["utility_none"])
        figures = [f"{row['dcs']:.3f}", f"{row['leak']:.2f}", largest]
        figures += [f"{row['utility']:.3f}", change]
        rows.append([str(row["rank"]), *left, *figures])
    return markdown_table(["", *names, *_SCORES], rows, left=1 + len(names))


def _attack_table(found: pd.DataFrame, ranked: pd.DataFrame) -> str:
    """Return the mean leak of every attack on every method, the best method first."""
    order = ranked.loc[ranked["dataset"] == ALL, "method"]
    wide = found.groupby(["method", "attack"], sort=False)["leak"].mean().unstack()
    wide = wide.loc[order, found["attack"].unique()]
    rows = [
        [f"`{method}`", *(f"{value:.2f}" if value == value else "" for value in row)]
        for method, row in zip(wide.index, wide.to_numpy(), strict=True)
    ]
    return markdown_table(["method", *(f"`{name}`" for name in wide)], rows)


def _datasets(study: Study, ranked: pd.DataFrame) -> Iterator[str]:
    """Yield a section for each dataset."""
    labels = study.labels().loc[study.finished]
    for dataset, own in ranked[ranked["dataset"] != ALL].groupby("dataset", sort=False):
        first = labels.index[labels["dataset"] == dataset][0]
        records = tables({str(first): study.documents[str(first)]})
        yield f"## {dataset}"
        yield f"Utility: {metric_name(main_metric(records))}."
        yield _table(own, ["method", "setting"])
        reasons = study.extra.get("left_out", {}).get(dataset, {})
        if reasons:
            yield "\n".join(
                f"- `{name}` is left out: {why}." for name, why in reasons.items()
            )


def _tuning(study: Study, found: pd.DataFrame) -> str:
    """Return how the settings were chosen, and which were tried."""
    labels = study.labels()
    tuned = labels[labels[STAGE] == TUNING]
    tried = tuned.groupby("method", sort=False)["defense"].unique().drop(VANILLA)
    fixed = [m for m in found["method"].unique() if m not in tried and m != VANILLA]
    text = _TUNING.format(
        seed=tuned["seed"].iloc[0],
        attacks=_listed(cells(study, TUNING)["attack"].unique()),
        seeds=", ".join(map(str, sorted(found["seed"].unique()))),
        fixed=f", but {_listed(fixed)} has no parameter to tune" if fixed else "",
    )
    rows = [[f"`{name}`", _listed(settings)] for name, settings in tried.items()]
    return f"{text}\n\n{markdown_table(['method', 'settings'], rows, left=2)}"
