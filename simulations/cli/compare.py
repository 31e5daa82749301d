"""``flower-vfl compare``: several defenses on one dataset, over seeds, in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import Task
from flower_vfl.simulations.config import DEFENSE, RunConfig
from flower_vfl.simulations.objectives import OBJECTIVES
from flower_vfl.simulations.plugins import added
from flower_vfl.simulations.printing import markdown_table, metric_name, text_table
from flower_vfl.simulations.studies.methods import VANILLA, Method, parse_method
from flower_vfl.simulations.studies.run_metrics import (
    WHOLE_RUN,
    shown_whole,
    utilities,
)
from flower_vfl.simulations.studies.study import Study, run_study
from flower_vfl.simulations.studies.trials import (
    Trial,
    check_trials,
    default_attacks,
    task_of,
)
from flower_vfl.simulations.studies.verdict import comparison, verdict

from .options import (
    AsJson,
    AsMarkdown,
    Engine,
    Gpus,
    Out,
    RayAddress,
    Workers,
    finish,
    option,
    source_of,
    takes_settings,
)

_TRANSFORMS = ("none", "max-norm", "iso:t=4", "marvell:s=4", "gc:keep=0.1")
DEFAULTS: dict[Task, tuple[str, ...]] = {
    "binary": (
        *_TRANSFORMS,
        "objective=gafm + width=1 + aggregation=mean",
        "preset=ladsg",
    ),
    "multiclass": (*_TRANSFORMS, "preset=ladsg"),
    "regression": ("none", "max-norm", "iso:t=4", "objective=gafm-original"),
}
Row = Mapping[str, Any]
_COLUMNS = 4  # attacks side by side, so that 80 characters are enough
_NAME_WIDTH = 20
_CAPTURED = 200  # rows of the first seed, for the report's pictures


@takes_settings(RunConfig(capture=_CAPTURED), without=("defense", "objective"))
def compare(
    config: RunConfig,
    context: typer.Context,
    defenses: Annotated[
        list[str] | None,
        option(
            "What to compare; once for each. A defense as for 'run', or "
            "objective=gafm:delta=0.05, or preset=ladsg, or parts and other settings "
            f"together: 'objective=gafm + marvell:s=4'. '{VANILLA}' is always there.",
            "--defense",
            panel=DEFENSE,
        ),
    ] = None,
    seeds: Annotated[
        str, option("How many, from --seed on; or which ones: 0,5,7.")
    ] = "3",
    engine: Engine = "in-process",
    workers: Workers = 1,
    ray_address: RayAddress = "",
    gpus: Gpus = 0.0,
    out: Out = None,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Compare defenses: what each costs in utility and time, and what still leaks.

    For example:
    flower-vfl compare --dataset digits --seeds 5
    flower-vfl compare --defense marvell:auc=0.65 --defense preset=ladsg
    """
    if not config.attack:
        config = replace(config, attack=default_attacks(config))
    methods = methods_of(defenses or _of_file(context), task_of(config))
    trials = compare_trials(config, methods, seeds_of(seeds, config.seed), engine)
    check_trials(trials)
    source = source_of(config)
    study = run_study(
        out or Path("runs") / f"compare-{source}",
        "compare",
        f"{source}: {len(methods)} methods",
        trials,
        workers=workers,
        ray_address=ray_address,
        gpus=gpus,
        bar=not as_json,
    )
    found = comparison(study)
    found["verdict"] = list(verdict(found))
    finish(study, found, as_json, partial(_show, study, found, markdown))


def _of_file(context: typer.Context) -> list[str]:
    """Return the method that the file of ``--config`` names, if there is one."""
    known = context.default_map or {}
    parts = [f"objective={known['objective']}"] if known.get("objective") else []
    parts += [known["defense"]] if known.get("defense") else []
    return [" + ".join(parts)] if parts else []


def methods_of(texts: Sequence[str], task: Task) -> list[Method]:
    """Return what is compared, vanilla first."""
    if not texts:
        fitting = [n for n in added("OBJECTIVES", 1) if task in OBJECTIVES[n][1]]
        own = [f"objective={name}" for name in fitting]
        own += [f"preset={name}" for name in added("PRESETS")]
        texts = [*DEFAULTS[task], *added("DEFENSES"), *own]
    return [parse_method(text) for text in dict.fromkeys([VANILLA, *texts])]


def seeds_of(text: str, first: int) -> list[int]:
    """Return the seeds that an option stands for."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or ("," not in text and numbers[0] < 1):
        raise ConfigError(f"'{text}' are no seeds; write how many, or 0,5,7")
    if "," in text:
        return list(dict.fromkeys(numbers))
    return list(range(first, first + numbers[0]))


def compare_trials(
    config: RunConfig, methods: Sequence[Method], seeds: Sequence[int], engine: str
) -> list[Trial]:
    """Return the runs of a comparison, all methods of one seed before the next seed."""
    trials = []
    for seed in seeds:
        captures = seed == seeds[0] and engine == "in-process"
        for method in methods:
            captured = config.capture if captures else 0
            run = replace(method.over(config, {}), seed=seed, capture=captured)
            labels = {"defense": method.text, "seed": str(seed)}
            trials.append(Trial(labels, run, engine))
    return trials


def _attacks(rows: Sequence[Row]) -> list[str]:
    """Return the heads of the columns of attacks, and of figures of whole runs."""
    heads = [attack for row in rows for attack in row["leaks"]]
    return list(dict.fromkeys([*heads, *shown_whole(rows).values()]))


def screen_tables(document: Row) -> Iterator[Table]:
    """Yield the table for a terminal of 80 columns, four attacks in each part."""
    attacks, rows = _attacks(document["rows"]), document["rows"]
    for start in range(0, max(len(attacks), 1), _COLUMNS):
        part = attacks[start : start + _COLUMNS]
        cells = [[_name(row), *(_leak(row, each) for each in part)] for row in rows]
        heads = ["defense", *part]
        if start == 0:
            heads[1:1] = [f"{metric_name(document['metric'])}\nworst–best"]
            heads.append("time")
            for row, own in zip(rows, cells, strict=True):
                mean, worst, best = _utility(row)
                own[1:1] = [f"{mean}\n{worst}–{best}"]
                own.append(_time(row))
        table = text_table(heads, cells, lines=True)
        table.columns[0].max_width = _NAME_WIDTH
        yield table


def comparison_markdown(document: Row) -> str:
    """Return the table in Markdown."""
    attacks = _attacks(document["rows"])
    metric = metric_name(document["metric"])
    heads = ["defense", metric, "worst", "best", *attacks, "time"]
    rows = []
    for row in document["rows"]:
        leaks = [_leak(row, attack).replace("\n±", " ± ") for attack in attacks]
        name = _name(row).replace(row["defense"], f"`{row['defense']}`")
        rows.append([name.replace("\n", " "), *_utility(row), *leaks, _time(row)])
    return markdown_table(heads, rows)


def _name(row: Row) -> str:
    mark = "\n(did not train)" if row["untrained"] else ""
    return f"{row['defense']}{mark}"


def _utility(row: Row) -> list[str]:
    return [f"{row['utility'][name]:.3f}" for name in ("mean", "min", "max")]


def _leak(row: Row, attack: str) -> str:
    known = row["leaks"] | {head: row.get(name) for name, head in WHOLE_RUN.items()}
    if not (found := known.get(attack)):
        return ""
    return f"{found['mean']:.3f}" + (f"\n±{found['sd']:.3f}" if row["runs"] > 1 else "")


def _time(row: Row) -> str:
    return "" if row["time_ratio"] is None else f"{row['time_ratio']:.2f}×"


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


def _show(study: Study, document: dict[str, Any], markdown: bool) -> None:
    console = Console(highlight=False)
    if markdown:
        print(f"{comparison_markdown(document)}\n\n{' '.join(document['verdict'])}")
        return
    console.print(*screen_tables(document))
    console.print(legend(study, document))
    for sentence in document["verdict"]:
        console.print(sentence, style="bold", markup=False)
