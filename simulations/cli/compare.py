"""``flower-vfl compare``: several defenses on one dataset, over seeds, in one table."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import Task
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.objectives import OBJECTIVES
from flower_vfl.simulations.plugins import added
from flower_vfl.simulations.printing import markdown_table, metric_name, text_tables
from flower_vfl.simulations.studies.methods import VANILLA, Method, parse_method
from flower_vfl.simulations.studies.run_metrics import WHOLE_RUN, shown_whole, utilities
from flower_vfl.simulations.studies.study import Study, run_study
from flower_vfl.simulations.studies.target import find_settings
from flower_vfl.simulations.studies.tradeoff import comparison, verdict

from ..studies.trials import Trial, check_trials, default_attacks, task_of
from .options import finish, source_of, takes_settings

_TRANSFORMS = ["none", "max-norm", "iso:t=4", "marvell:s=4", "gc:keep=0.1,by_row=true"]
DEFAULTS: dict[Task, tuple[str, ...]] = {
    "binary": (*_TRANSFORMS, "gafm", "ladsg"),
    "multiclass": (*_TRANSFORMS, "ladsg"),
    "regression": ("none", "max-norm", "iso:t=4", "gafm-original"),
}
Row = Mapping[str, Any]
_CAPTURED = 200  # rows of the first seed, for the report's pictures


@takes_settings(RunConfig(capture=_CAPTURED), without=("defense", "objective"))
def compare(
    config: RunConfig,
    context: typer.Context,
    defenses: list[str] | None = None,
    seeds: str = "3",
    target_leak: float = 0.0,
    engine: str = "in-process",
    workers: int = 1,
    ray_address: str = "",
    gpus: float = 0.0,
    out: Path | None = None,
    markdown: bool = False,
    as_json: bool = False,
) -> None:
    """Compare defenses: utility, time and remaining leakage, and which to choose.

    For example:
    flower-vfl compare --dataset digits --seeds 5
    flower-vfl compare --target-leak 0.65 --defense marvell --defense ladsg
    """
    if not config.attack:
        config = replace(config, attack=default_attacks(config))
    task, chosen = task_of(config), seeds_of(seeds, config.seed)
    methods = methods_of(defenses or _of_file(context), task, bool(target_leak))
    source = source_of(config)
    folder = out or Path("runs") / f"compare-{source}"
    how: Any = {"workers": workers, "ray_address": ray_address, "gpus": gpus}

    def run(methods: Sequence[Method], all_seeds: bool = True) -> Study:
        used = chosen if all_seeds else chosen[:1]
        title = f"{source}: {len(methods)} methods"
        trials = compare_trials(config, methods, used, engine)
        return run_study(folder, "compare", title, trials, bar=not as_json, **how)

    check_trials(compare_trials(config, methods, chosen, engine))
    if target_leak:
        study, found = _search(methods, target_leak, task, run)
    else:
        found = comparison(study := run(methods))
        found["verdict"] = list(verdict(found))
    finish(study, found, as_json, partial(_show, study, found, markdown))


def _search(
    methods: Sequence[Method], target: float, task: Task, run: Callable[..., Study]
) -> tuple[Study, dict[str, Any]]:
    """Find settings that keep a target; return the study of them and their table."""
    least = 0.0 if task == "regression" else 0.5
    if not least < target < 1.0:
        raise ConfigError(f"--target-leak must be from {least:g} to 1, got {target:g}")
    studies: list[Study] = []

    def measure(asked: Sequence[Method], all_seeds: bool) -> dict[str, float]:
        studies.append(run(asked, all_seeds))
        rows = comparison(studies[-1])["rows"]
        return {row["defense"]: row.get("largest_leak", math.inf) for row in rows}

    def rank(row: Row) -> tuple[bool, bool, float]:
        """Sort by utility: after vanilla, before what leaks more or did not train."""
        bad = row["untrained"] != "" or row.get("largest_leak", math.inf) > target
        return row["defense"] != VANILLA, bad, -row["utility"]["mean"]

    tried = {s.method.text: s.tried for s in find_settings(methods, target, measure)}
    study = studies[-1]
    study.extra = {"target_leak": target, "tried": tried}
    study.save()
    found = comparison(study) | study.extra
    found["rows"].sort(key=rank)
    found["verdict"] = list(verdict(found, target))
    return study, found


def _of_file(context: typer.Context) -> list[str]:
    """Return the method that the file of ``--config`` names, if there is one."""
    known = context.default_map or {}
    parts = [f"objective={known['objective']}"] if known.get("objective") else []
    parts += [known["defense"]] if known.get("defense") else []
    return [" + ".join(parts)] if parts else []


def methods_of(
    texts: Sequence[str], task: Task, with_privacy: bool = False
) -> list[Method]:
    """Return what is compared, vanilla first; by default perhaps private labels too."""
    if not texts:
        fitting = [n for n in added("OBJECTIVES", 1) if task in OBJECTIVES[n][1]]
        private = ["label_dp=epsilon=1"] if with_privacy else []
        texts = [*DEFAULTS[task], *(private if task != "regression" else [])]
        texts += [*added("DEFENSES"), *(f"objective={name}" for name in fitting)]
        texts += [f"preset={name}" for name in added("PRESETS")]
    return [parse_method(text) for text in dict.fromkeys([VANILLA, *texts])]


def seeds_of(text: str, first: int) -> list[int]:
    """Return the seeds that an option stands for."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or ("," not in text and numbers[0] < 1):
        raise ConfigError(f"'{text}' are no seeds; give their number or a list: 0,5,7")
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


def _cells(rows: Sequence[Row]) -> tuple[list[str], list[tuple[list[str], list[str]]]]:
    """Return the heads of all leaks; for each row its utilities, and leaks and time."""
    found = [attack for row in rows for attack in row["leaks"]]
    heads = list(dict.fromkeys([*found, *shown_whole(rows).values()]))
    cells = []
    for row in rows:
        values = [row["utility"][name] for name in ("mean", "min", "max")]
        reached = ["" if math.isnan(value) else f"{value:.3f}" for value in values]
        known = row["leaks"] | {head: row.get(name) for name, head in WHOLE_RUN.items()}
        spread = "{mean:.3f}\n±{sd:.3f}" if row["runs"] > 1 else "{mean:.3f}"
        leaks = [spread.format(**known[h]) if known.get(h) else "" for h in heads]
        ratio = row["time_ratio"]
        cells.append((reached, [*leaks, "" if ratio is None else f"{ratio:.2f}×"]))
    return [*heads, "time"], cells


def screen_tables(document: Row) -> Iterator[Table]:
    """Yield the table for a terminal of 80 columns, in parts if it is wider."""
    heads, cells = _cells(document["rows"])
    lines = []
    for row, ((mean, worst, best), leaks) in zip(document["rows"], cells, strict=True):
        name = row["defense"] + ("\n(did not train)" if row["untrained"] else "")
        spread = f"\n{worst}–{best}" if mean and row["runs"] > 1 else ""
        lines.append([name, f"{mean}{spread}", *leaks])
    several = any(row["runs"] > 1 for row in document["rows"])
    metric = metric_name(document["metric"]) + ("\nworst–best" if several else "")
    yield from text_tables(["defense", metric, *heads], lines, lines=True)


def comparison_markdown(document: Row) -> str:
    """Return the table in Markdown."""
    heads, cells = _cells(document["rows"])
    lines = []
    for row, (reached, leaks) in zip(document["rows"], cells, strict=True):
        name = f"`{row['defense']}`" + (" (did not train)" if row["untrained"] else "")
        figures = [leak.replace("\n±", " ± ") for leak in leaks]
        lines.append([name, *reached, *figures])
    metric = metric_name(document["metric"])
    return markdown_table(["defense", metric, "worst", "best", *heads], lines)


def legend(study: Study, document: Row) -> str:
    """Return what the figures of the table are."""
    runs = max(row["runs"] for row in document["rows"])
    regression = utilities(study.records())["regression"].any()
    leak = "|ρ|, 0" if regression else "leak AUC, 0.5"
    at_once = max(d.get("workers", 1) for d in study.documents.values())
    parallel = f"; {at_once} runs at a time, which slows each" if at_once > 1 else ""
    seeds = f"mean over {runs} seeds" if runs > 1 else "1 seed"
    spread = ", ± sd" if runs > 1 else ""
    return (
        f"{seeds}; {leak}: nothing leaks{spread}, at the party that learns most; time "
        f"per step, attacks included, relative to '{VANILLA}'{parallel}"
    )


def _show(study: Study, document: dict[str, Any], markdown: bool) -> None:
    console = Console(highlight=False)
    if markdown:
        print(f"{comparison_markdown(document)}\n\n{' '.join(document['verdict'])}")
        return
    console.print(*screen_tables(document))
    console.print(legend(study, document))
    for method, tried in document.get("tried", {}).items():
        if len(tried) > 1:
            listed = ", ".join(f"{text} {leak:.2f}" for text, leak in tried.items())
            console.print(f"tried for {method}: {listed}", markup=False)
    for sentence in document["verdict"]:
        console.print(sentence, style="bold", markup=False)
