"""``flower-vfl scale``: leakage and cost as the number of passive parties grows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import pandas as pd
import typer
from click.core import ParameterSource
from rich.console import Console

from flower_vfl.errors import ConfigError
from flower_vfl.privacy.accountant import RUN_AUC_BOUND
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import divided_dataset
from flower_vfl.simulations.printing import markdown_table, metric_name, text_tables
from flower_vfl.simulations.results import RUN as KEY
from flower_vfl.simulations.runtime.engines import can_watch_memory, set_log
from flower_vfl.simulations.studies import run_metrics as metrics
from flower_vfl.simulations.studies.study import Study, run_study
from flower_vfl.simulations.studies.trials import Trial
from flower_vfl.specs import build_from_spec

from .options import finish, source_of, takes_settings

PARTIES, PART, SEED = "parties", "part", "seed"  # labels of a trial
LEAKAGE, COST = "leakage", "cost"  # its parts
# Datasets that a number of parties can share, by their columns.
COLUMNS = {"breast-cancer": 30, "criteo": 39, "spambase": 57, "digits": 64}
COLUMNS |= {"imdb": 500, "ag-news": 1000, "synthetic": 1024}
DEFAULT = RunConfig(dataset="digits", attack="norm,mean:held_out=true", width=4)
DEFAULT = replace(DEFAULT, coalitions="all")
_WIDEST = "synthetic"  # instead of the default, for more parties than it has columns
_FILES = ("passive", "label_party", "id_column", "label_column", "task", "missing")


Leaks = dict[str, tuple[float, float, float]]  # mean, worst and coalition, by attack


@dataclass(frozen=True)
class Size:
    """What was found with one number of passive parties, mean over seeds."""

    parties: int
    columns: tuple[int, int]
    metric: str
    utility: float
    leaks: Leaks
    seconds: float
    traffic: float
    memory: float | None
    attacked: float = 0.0  # seconds of a step with the attacks
    beyond: Leaks = field(default_factory=dict)  # of stale attacks: beyond the model
    bound: float | None = None  # AUC bound of the whole training


@takes_settings(DEFAULT, without=("parties", "split", "watch_memory", "drop", *_FILES))
def scale(
    config: RunConfig,
    context: typer.Context,
    parties: str = "1,2,4,8,16",
    uneven: str = "",
    seeds: int = 1,
    engine: str = "",
    out: Path | None = None,
    markdown: bool = False,
    as_json: bool = False,
) -> None:
    """Measure leakage and cost per step as the number of parties grows.

    Each number of parties is run twice: with the attacks, and for fewer epochs without
    them to measure time, bytes and memory. Finished runs are not repeated. More than 64
    parties share the dataset 'synthetic' and compute on the engine 'stacked', unless
    others are given.
    """
    set_log(verbose=False)
    sizes = sizes_of(parties)
    config = replace(config, split=division_of(uneven))
    many = sizes[-1] > COLUMNS[DEFAULT.dataset]
    if many and context.get_parameter_source("dataset") is ParameterSource.DEFAULT:
        config = replace(config, dataset=_WIDEST)
    engine = engine or ("stacked" if many else "in-process")
    columns_of(config, sizes[-1])  # refuses too few columns before anything runs
    source = source_of(config)
    study = run_study(
        out or Path("runs") / f"scale-{source}",
        "scale",
        f"{source}, passive parties: {', '.join(map(str, sizes))}",
        scale_trials(config, sizes, seeds, engine),
        bar=not as_json,
        extra={"parties": sizes, "uneven": uneven, "engine": engine},
    )
    found = found_sizes(study)
    factors = growth(found) if found else {}
    document = {"sizes": [asdict(size) for size in found], "growth": factors}
    show = partial(_show, found, f"{source}, {engine}", markdown)
    finish(study, document, as_json, show)


def dirichlet(alpha: float = 0.5, seed: int = 0) -> str:
    """Return the setting of a division by shares from a Dirichlet distribution."""
    return f"dirichlet={alpha},{seed}"


def division_of(text: str) -> str:
    """Return the setting ``split`` that a config string stands for."""
    known = {"dirichlet": dirichlet}
    return build_from_spec("division", text, known) if text else "even"


def sizes_of(text: str) -> list[int]:
    """Return the numbers of parties that an option lists."""
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"'{text}' are not numbers of parties like 1,2,4,8")
    return sorted(set(sizes))


def scale_trials(
    config: RunConfig, sizes: Sequence[int], seeds: int, engine: str = "in-process"
) -> list[Trial]:
    """Return the runs of a study: leakage, and cost without the attacks."""
    trials = []
    epochs = min(config.epochs, 2)  # enough for a mean over steps
    bare = replace(config, epochs=epochs, watch_memory=can_watch_memory(), attack="")
    bare = replace(bare, coalitions="", leak_limit=0.0)
    bare = replace(bare, leak_baseline=False, leak_layers=False)
    for parties in sizes:
        together = config.coalitions if parties > 1 else ""
        leaking = replace(config, coalitions=together)
        for part, made in ((LEAKAGE, leaking), (COST, bare)):
            for seed in range(config.seed, config.seed + seeds):
                labels = {PARTIES: str(parties), PART: part, SEED: str(seed)}
                run = replace(made, parties=parties, seed=seed)
                trials.append(Trial(labels, run, engine))
    return trials


def columns_of(config: RunConfig, parties: int) -> tuple[int, int]:
    """Return the fewest and the most columns of a passive party."""
    try:
        _, _, divided = divided_dataset(replace(config, parties=parties))
    except ConfigError as error:
        enough = [f"{n} ({c})" for n, c in COLUMNS.items() if c >= parties]
        known = ", ".join(enough) or "no known dataset has as many"
        raise ConfigError(f"{error}. Datasets with enough columns: {known}") from error
    widths = [len(columns) for columns in divided[1:]]
    return min(widths), max(widths)


def found_sizes(study: Study) -> list[Size]:
    """Return what a study found, by the number of parties."""
    records, labels = study.records(), study.labels().loc[study.finished]
    sizes = []
    for _, own in labels.groupby(labels[PARTIES].astype(int)):
        leaking, bare = (own.index[own[PART] == part] for part in (LEAKAGE, COST))
        if len(leaking) and len(bare):
            config = RunConfig(**study.documents[leaking[0]]["config"])
            both = (records[records[KEY].isin(keys)] for keys in (leaking, bare))
            sizes.append(_size(config, *both))
    return sizes


def _size(config: RunConfig, leaking: pd.DataFrame, bare: pd.DataFrame) -> Size:
    memory = metrics.whole_run(bare, "memory_peak")
    trained = metrics.over_training(leaking)
    return Size(
        parties=config.parties,
        columns=columns_of(config, config.parties),
        metric=metrics.main_metric(leaking),
        utility=float(metrics.utilities(leaking)["value"].mean()),
        leaks=_leaks(leaking, "leak"),
        beyond=_leaks(leaking, "beyond"),
        bound=trained[RUN_AUC_BOUND].mean() if RUN_AUC_BOUND in trained else None,
        seconds=float(metrics.whole_run(bare, "seconds_step").mean()),
        attacked=float(metrics.whole_run(leaking, "seconds_step").mean()),
        traffic=float(metrics.whole_run(bare, "bytes_step").mean()),
        memory=None if memory.empty else float(memory.mean()),
    )


def _leaks(records: pd.DataFrame, column: str) -> Leaks:
    """Return mean, worst and coalition of each attack, mean over the runs."""
    found = metrics.leaks(records).query("layer == '' and not random")
    found = found.dropna(subset=column)
    by = [KEY, "attack"]
    single = found[~found["coalition"]].groupby(by, sort=False)[column]
    joint = found[found["coalition"]].groupby(by)[column].max()
    # without a coalition the best that anybody can do is what one party does
    both = single.agg(["mean", "max"]).assign(together=joint)
    both = both.assign(together=both["together"].fillna(both["max"]))
    means = both.groupby("attack", sort=False).mean()
    return {str(row[0]): (row[1], row[2], row[3]) for row in means.itertuples()}


def growth(sizes: Sequence[Size]) -> dict[str, float]:
    """Return how much each cost grew from the fewest to the most parties."""
    first, last = sizes[0], sizes[-1]
    factors = {
        "parties": last.parties / first.parties,
        "seconds": last.seconds / first.seconds,
        "seconds with attacks": last.attacked / first.attacked,
        "bytes": last.traffic / first.traffic,
    }
    if first.memory and last.memory:
        factors["memory"] = last.memory / first.memory
    return factors


def _show(found: Sequence[Size], title: str, markdown: bool) -> None:
    if not found:
        return
    head, rows = table_of(found)
    if markdown:
        print(markdown_table(head, rows, left=0))
    else:
        console = Console(highlight=False)
        console.print(title, markup=False)
        console.print(*text_tables(head, rows, left=0))
    print("leak AUC: mean over the parties / the party that learns most / all together")
    print("per party: ms per party and step, with attacks")
    if len(found) > 1:
        print(growth_text(found))


def table_of(found: Sequence[Size]) -> tuple[list[str], list[list[str]]]:
    """Return the table of a study as texts."""
    first = found[0]
    head = ["parties", "columns", metric_name(first.metric)]
    head += [attack.replace(":", ": ") for attack in first.leaks]
    names = metrics.WHOLE_RUN
    head += [f"{attack}, {names[metrics.BEYOND_MODEL]}" for attack in first.beyond]
    shown = bool(first.beyond) and all(size.bound is not None for size in found)
    head += [names[RUN_AUC_BOUND]] if shown else []
    head += ["ms per step", "with attacks", "per party", "KiB per step", "MiB"]
    rows = []
    for size in found:
        few, many = size.columns
        cells = [str(size.parties), str(few) if few == many else f"{few}-{many}"]
        cells.append(f"{size.utility:.3f}")
        for own, known in ((size.leaks, first.leaks), (size.beyond, first.beyond)):
            cells += [" / ".join(f"{v:.2f}" for v in own[attack]) for attack in known]
        cells += [f"{size.bound:.2f}"] if shown else []
        each = size.attacked / size.parties
        cells += [f"{s * 1e3:.2f}" for s in (size.seconds, size.attacked, each)]
        cells.append(f"{size.traffic / 1024:.1f}")
        cells.append("" if size.memory is None else f"{size.memory / 2**20:.0f}")
        rows.append(cells)
    return head, rows


def growth_text(found: Sequence[Size]) -> str:
    """Return how cost grew, in words."""
    factors = growth(found)
    parties = factors.pop("parties")
    grown = [f"{k} ×{v:.2f} ({v / parties:.2f} of linear)" for k, v in factors.items()]
    few, many = found[0].parties, found[-1].parties
    return f"from {few} to {many} parties (×{parties:g}): {', '.join(grown)}"
