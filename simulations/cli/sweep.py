"""``flower-vfl sweep``: every combination of some values, and what they trade."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.printing import metric_name, text_table, text_tables
from flower_vfl.simulations.studies.run_metrics import shown_whole
from flower_vfl.simulations.studies.study import TABLES, run_study
from flower_vfl.simulations.studies.tradeoff import comparison, tradeoff, verdict
from flower_vfl.simulations.studies.trials import check_trials, default_attacks

from ..studies.methods import VANILLA, parse_method, parse_values, sweep_trials
from .options import finish, source_of, takes_settings


@takes_settings(without=("defense",))
def sweep(
    config: RunConfig,
    context: typer.Context,
    values: list[str] | None = None,
    defenses: list[str] | None = None,
    engine: str = "in-process",
    workers: int = 1,
    ray_address: str = "",
    gpus: float = 0.0,
    out: Path | None = None,
    format: str = "csv",
    as_json: bool = False,
) -> None:
    """Run a grid of settings, in parallel if you like; resumes if interrupted.

    For example:
    flower-vfl sweep --defense marvell --set marvell.s=1,4,16 --set seed=0,1,2
    flower-vfl sweep --set batch_size=64,256 --set width=4,16 --workers 2
    """
    check_name("format", format, TABLES)
    if not values:
        raise ConfigError("nothing to vary; give values with --set defense.s=0.1,1,4")
    if not config.attack:
        config = replace(config, attack=default_attacks(config))
    varied = parse_values(values)
    chosen = [*(defenses or []), *varied.pop("defense", [])]
    chosen = chosen or [(context.default_map or {}).get("defense") or VANILLA]
    methods = [parse_method(text) for text in dict.fromkeys(chosen)]
    trials = sweep_trials(config, methods, varied, engine)
    check_trials(trials)
    source = source_of(config)
    folder = out or Path("runs") / f"sweep-{source}"
    title = f"{source}: {', '.join(['defense', *varied])}"
    how: Any = {"workers": workers, "ray_address": ray_address, "gpus": gpus}
    study = run_study(folder, "sweep", title, trials, bar=not as_json, **how)
    found = study.extra["tradeoff"] = tradeoff(study)
    study.save()
    found = found | {"verdict": list(verdict(comparison(study)))}
    table = str(study.write_table(format))
    document = {"title": study.title, **found, "results": table}
    finish(study, document, as_json, partial(_show, found, table))


def _show(found: dict[str, Any], table: str) -> None:
    """Print the points of every curve, the area under each, and the table's path."""
    listed = [point for curve in found["curves"].values() for point in curve["points"]]
    whole = shown_whole(listed)
    heads = ["defense", "setting", metric_name(found["metric"]), "largest leak"]
    heads += ["privacy", "utility", *whole.values()]
    points, areas = [], []
    for defense, curve in found["curves"].items():
        areas.append([defense, f"{curve['area']:.3f}"])
        for point in curve["points"]:
            setting = ", ".join(f"{n}={v}" for n, v in point["labels"].items())
            setting += "\n(did not train)" if "did_not_train" in point else ""
            attack = max(point["leaks"], key=point["leaks"].__getitem__)
            leak = f"{point['leaks'][attack]:.3f}\n{attack.partition(':')[0]}"
            figures = [f"{point[name]:.3f}" for name in ("x", "y")]
            figures += [f"{point[n]:.3f}" if n in point else "" for n in whole]
            points.append([defense, setting, f"{point['utility']:.3f}", leak, *figures])
    console = Console(highlight=False)
    console.print(*text_tables(heads, points, left=2))
    console.print(text_table(["defense", "area under the curve"], areas))
    legend = "privacy 1: no attack beats a guess; utility 1: no errors; mean over seeds"
    console.print(legend)
    for sentence in found["verdict"]:
        console.print(sentence, style="bold", markup=False)
    print(table)
