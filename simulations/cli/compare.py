"""``flower-vfl compare``: several defenses on one dataset, over seeds, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flower_vfl.errors import ConfigError
from flower_vfl.objectives import Task
from flower_vfl.simulations.checks import check_trials, default_attacks, task_of
from flower_vfl.simulations.config import DEFENSE, RUN, RunConfig
from flower_vfl.simulations.objectives import OBJECTIVES
from flower_vfl.simulations.plugins import added
from flower_vfl.simulations.studies.comparison import (
    legend,
    markdown_table,
    screen_tables,
    table_document,
)
from flower_vfl.simulations.studies.methods import VANILLA, Method, parse_method
from flower_vfl.simulations.studies.study import Study, run_study
from flower_vfl.simulations.studies.trials import Trial

from .options import takes_settings
from .study_options import (
    AsJson,
    AsMarkdown,
    Engine,
    Gpus,
    Out,
    RayAddress,
    Workers,
    finish,
    source_of,
)

DEFAULTS: dict[Task, tuple[str, ...]] = {
    "binary": (
        "none",
        "max-norm",
        "iso:t=4",
        "marvell:s=4",
        "gc:keep=0.1",
        "objective=gafm + width=1 + aggregation=mean",
        "preset=ladsg",
    ),
    "multiclass": (
        "none",
        "max-norm",
        "iso:t=4",
        "marvell:s=4",
        "gc:keep=0.1",
        "preset=ladsg",
    ),
    "regression": ("none", "max-norm", "iso:t=4", "objective=gafm-original"),
}
_CAPTURED = 200  # rows of the first seed, for the report's pictures


@takes_settings(RunConfig(capture=_CAPTURED), without=("defense", "objective"))
def compare(
    config: RunConfig,
    context: typer.Context,
    defenses: Annotated[
        list[str] | None,
        typer.Option(
            "--defense",
            help="What to compare; once for each. A defense as for 'run', or "
            "objective=gafm:delta=0.05, or preset=ladsg, or parts and other settings "
            f"together: 'objective=gafm + marvell:s=4'. '{VANILLA}' is always there.",
            rich_help_panel=DEFENSE,
        ),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(
            help="How many, from --seed on; or which ones: 0,5,7.", rich_help_panel=RUN
        ),
    ] = "3",
    engine: Engine = "in-process",
    workers: Workers = 1,
    ray_address: RayAddress = "",
    gpus: Gpus = 0.0,
    out: Out = None,
    markdown: AsMarkdown = False,
    as_json: AsJson = False,
) -> None:
    """Compare defenses: what each costs in utility and time, and what still leaks."""
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
    found = table_document(study)
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
        fitting = [n for n in added("OBJECTIVES", 1) if task in OBJECTIVES[n]]
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


def _show(study: Study, document: dict[str, Any], markdown: bool) -> None:
    if markdown:
        print(markdown_table(document))
        return
    console = Console(highlight=False)
    console.print(*screen_tables(document))
    console.print(legend(study, document))
