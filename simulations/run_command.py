"""``flower-vfl run``: one run, from the command line or a TOML file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from flower_vfl.attacks import SCORE_ATTACKS
from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.strategies import DEFENSES

from .attacking import COMPLETIONS
from .config import RunConfig
from .config_file import use_as_defaults
from .datasets import dataset_names
from .engines import ENGINES, run_and_attack
from .models import BOTTOM_MODELS, TOP_MODELS
from .objectives import OBJECTIVES
from .optimizers import OPTIMIZERS
from .presets import PRESETS, preset
from .results import PARTIES_FOLDER
from .show import show_result

DEFAULT = RunConfig()
_DATA, _MODEL, _TRAIN, _FILES, _RUN = "Data", "Model", "Training", "Own files", "Run"
_DEFENSE, _ATTACK = "Defense", "Attacks"


def run(
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="TOML file with any of these settings; what the command line says "
            "comes first.",
            callback=use_as_defaults,
            is_eager=True,
            rich_help_panel=_RUN,
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="A dataset by name: " + ", ".join(dataset_names()) + ".",
            rich_help_panel=_DATA,
        ),
    ] = DEFAULT.dataset,
    target: Annotated[
        str,
        typer.Option(
            help="Another target of a dataset that has several.", rich_help_panel=_DATA
        ),
    ] = DEFAULT.target,
    limit: Annotated[
        int, typer.Option(help="Use so many rows only; 0: all.", rich_help_panel=_DATA)
    ] = DEFAULT.limit,
    data_dir: Annotated[
        str,
        typer.Option(
            help="Folder of the dataset files, if not the usual one.",
            rich_help_panel=_DATA,
        ),
    ] = DEFAULT.data_dir,
    parties: Annotated[
        int,
        typer.Option(help="Number of passive parties.", rich_help_panel=_DATA),
    ] = DEFAULT.parties,
    split: Annotated[
        str,
        typer.Option(
            help="How columns are divided: even, fractions=0.3,0.7, "
            "widths=10,20 or columns=age+income|height.",
            rich_help_panel=_DATA,
        ),
    ] = DEFAULT.split,
    label_share: Annotated[
        str,
        typer.Option(
            help="Columns that the label party keeps: a fraction, or names "
            "joined by +.",
            rich_help_panel=_DATA,
        ),
    ] = DEFAULT.label_share,
    test_fraction: Annotated[
        float, typer.Option(help="Share of rows for the test.", rich_help_panel=_DATA)
    ] = DEFAULT.test_fraction,
    valid_fraction: Annotated[
        float,
        typer.Option(help="Share of rows for early stopping.", rich_help_panel=_DATA),
    ] = DEFAULT.valid_fraction,
    label_party: Annotated[
        str,
        typer.Option(
            help="CSV or Parquet file of the party that holds the labels.",
            rich_help_panel=_FILES,
        ),
    ] = "",
    label_column: Annotated[
        str, typer.Option(help="Its label column.", rich_help_panel=_FILES)
    ] = "",
    passive: Annotated[
        list[str] | None,
        typer.Option(
            help="File of a passive party; once for each.", rich_help_panel=_FILES
        ),
    ] = None,
    id_column: Annotated[
        str,
        typer.Option(
            help="Column with the ids that all files share.", rich_help_panel=_FILES
        ),
    ] = DEFAULT.id_column,
    task: Annotated[
        str,
        typer.Option(
            help="binary, multiclass or regression; found out if not given.",
            rich_help_panel=_FILES,
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            help="Bottom model of every party, with parameters as in "
            "mlp:hidden=64+32: auto, " + ", ".join(BOTTOM_MODELS) + ".",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT.bottom,
    top: Annotated[
        str,
        typer.Option(
            help="Top model: " + ", ".join(TOP_MODELS) + ".", rich_help_panel=_MODEL
        ),
    ] = DEFAULT.top,
    width: Annotated[
        int,
        typer.Option(help="Width of each party's cut layer.", rich_help_panel=_MODEL),
    ] = DEFAULT.width,
    aggregation: Annotated[
        str,
        typer.Option(
            help="How embeddings are joined: concat, sum, mean, max or product.",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT.aggregation,
    objective: Annotated[
        str,
        typer.Option(
            help="What the label party optimises, as in gafm:delta=0.05: auto, "
            + ", ".join(OBJECTIVES)
            + ".",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT.objective,
    preset_name: Annotated[
        str,
        typer.Option(
            "--preset",
            help="Objective and defense that belong together, instead of --objective "
            "and --defense: " + ", ".join(PRESETS) + "; ladsg:substitute=false leaves "
            "a part out.",
            rich_help_panel=_DEFENSE,
        ),
    ] = "",
    defense: Annotated[
        str,
        typer.Option(
            help="What is done to each gradient before it leaves, with parameters as "
            "in marvell:s=4: " + ", ".join(DEFENSES) + ". 'a | b' applies two in "
            "order, '@1 none @5 iso' begins with epoch 5, 'passive-1=iso:t=9; *=iso' "
            "is by party.",
            rich_help_panel=_DEFENSE,
        ),
    ] = DEFAULT.defense,
    defense_at: Annotated[
        str,
        typer.Option(
            help="Where the defense runs: strategy or label.", rich_help_panel=_DEFENSE
        ),
    ] = DEFAULT.defense_at,
    attack: Annotated[
        list[str] | None,
        typer.Option(
            help="Attacks, also several with commas. On every gradient: "
            + ", ".join(SCORE_ATTACKS)
            + ". On the trained bottom model: "
            + ", ".join(COMPLETIONS)
            + ", as in passive:labels=40,party=1,seeds=3.",
            rich_help_panel=_ATTACK,
        ),
    ] = None,
    leak_limit: Annotated[
        float,
        typer.Option(
            help="What the leak AUC of no score attack may exceed; 0: no limit.",
            rich_help_panel=_ATTACK,
        ),
    ] = DEFAULT.leak_limit,
    leak_action: Annotated[
        str,
        typer.Option(
            help="What happens then: warn, stop or raise (the defense's strength).",
            rich_help_panel=_ATTACK,
        ),
    ] = DEFAULT.leak_action,
    leak_window: Annotated[
        int,
        typer.Option(help="Steps over which it is averaged.", rich_help_panel=_ATTACK),
    ] = DEFAULT.leak_window,
    leak_every: Annotated[
        int,
        typer.Option(help="Steps between two measurements.", rich_help_panel=_ATTACK),
    ] = DEFAULT.leak_every,
    coalitions: Annotated[
        str,
        typer.Option(
            help="Parties that attack together: passive-1+passive-2, several with "
            "commas, or all.",
            rich_help_panel=_ATTACK,
        ),
    ] = DEFAULT.coalitions,
    leak_baseline: Annotated[
        bool,
        typer.Option(
            "--leak-baseline",
            help="Attack random gradients too, for comparison.",
            rich_help_panel=_ATTACK,
        ),
    ] = DEFAULT.leak_baseline,
    leak_layers: Annotated[
        bool,
        typer.Option(
            "--leak-layers",
            help="Measure every layer of the bottom models.",
            rich_help_panel=_ATTACK,
        ),
    ] = DEFAULT.leak_layers,
    epochs: Annotated[
        int, typer.Option(help="Number of epochs.", rich_help_panel=_TRAIN)
    ] = DEFAULT.epochs,
    batch_size: Annotated[
        int, typer.Option(help="Rows of a batch; 0: all.", rich_help_panel=_TRAIN)
    ] = DEFAULT.batch_size,
    optimizer: Annotated[
        str,
        typer.Option(
            help="Optimizer of every party: " + ", ".join(OPTIMIZERS) + ".",
            rich_help_panel=_TRAIN,
        ),
    ] = DEFAULT.optimizer,
    learning_rate: Annotated[
        str,
        typer.Option(
            help="For all parties (0.01) or by name (label=0.01,passive-1=0.001).",
            rich_help_panel=_TRAIN,
        ),
    ] = "",
    patience: Annotated[
        int,
        typer.Option(
            help="Stop after so many evaluations without improvement on the "
            "validation rows; 0: never.",
            rich_help_panel=_TRAIN,
        ),
    ] = DEFAULT.patience,
    evaluate_every: Annotated[
        int, typer.Option(help="Epochs between evaluations.", rich_help_panel=_TRAIN)
    ] = DEFAULT.evaluate_every,
    seed: Annotated[
        int,
        typer.Option(help="Decides everything that is random.", rich_help_panel=_TRAIN),
    ] = DEFAULT.seed,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            help="Steps between checkpoints; 0: none.", rich_help_panel=_TRAIN
        ),
    ] = DEFAULT.checkpoint_every,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest checkpoint in --out.",
            rich_help_panel=_TRAIN,
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            help="in-process: all parties in this process, fast. ray: as Flower "
            "clients under 'flwr run', kept in memory by Ray actors. flower: the same "
            "with one ordinary Flower message for each request, slow.",
            rich_help_panel=_RUN,
        ),
    ] = "in-process",
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda, ...", rich_help_panel=_RUN)
    ] = DEFAULT.device,
    threads: Annotated[
        int,
        typer.Option(
            help="Threads of each party. Sums depend on it.", rich_help_panel=_RUN
        ),
    ] = DEFAULT.threads,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for result.json and the trained modules.", rich_help_panel=_RUN
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the result as JSON and nothing else.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show Flower's log.", rich_help_panel=_RUN),
    ] = False,
) -> None:
    """Train one model over several parties and report how good it is."""
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if resume and out is None:
        raise ConfigError("--resume needs the --out folder of the run to continue")
    if preset_name and (defense or objective != DEFAULT.objective):
        raise ConfigError(
            "--preset stands for --objective and --defense: give it alone"
        )
    if preset_name:
        settings = preset(preset_name)
        objective, defense = settings["objective"], settings["defense"]
    files = passive or []
    folder = "" if out is None else str(out.resolve())
    config = RunConfig(
        dataset=dataset,
        target=target,
        limit=limit,
        data_dir=str(Path(data_dir).resolve()) if data_dir else "",
        label_party=str(Path(label_party).resolve()) if label_party else "",
        passive=",".join(str(Path(file).resolve()) for file in files),
        id_column=id_column,
        label_column=label_column,
        task=task,
        parties=len(files) or parties,
        split=split,
        label_share=label_share,
        bottom=model,
        top=top,
        width=width,
        aggregation=aggregation,
        objective=objective,
        optimizer=optimizer,
        learning_rate=learning_rate,
        defense=defense,
        defense_at=defense_at,
        reproducible_noise=True,  # every engine of this command is a simulation
        attack=",".join(attack or []),
        leak_limit=leak_limit,
        leak_action=leak_action,
        leak_window=leak_window,
        leak_every=leak_every,
        coalitions=coalitions,
        leak_baseline=leak_baseline,
        leak_layers=leak_layers,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        test_fraction=test_fraction,
        valid_fraction=valid_fraction,
        evaluate_every=evaluate_every,
        patience=patience,
        device=device,
        threads=threads,
        checkpoint_every=checkpoint_every,
        resume=resume,
        state_dir=str(Path(folder) / PARTIES_FOLDER) if folder else "",
        out=folder,
        transport="plain" if engine == "flower" else "resident",
    )
    try:
        document = run_and_attack(config, engine, verbose, not as_json)
    except KeyboardInterrupt:  # typer would end without a word
        hint = "; the same command with --resume continues it" if folder else ""
        print(f"flower-vfl: interrupted{hint}", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(document))
    else:
        show_result(document)
