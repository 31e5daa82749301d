"""The Flower app that ``flwr run simulations/label_leakage`` runs."""

import time
from collections.abc import Callable
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, cast

import numpy as np
import sklearn.impute  # noqa: F401 (now, and not while others wait for a first reply)
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log
from flwr.supercore.constant import TaskType

from flower_vfl import strategies
from flower_vfl.alignment import AlignmentSettings
from flower_vfl.errors import ConfigError
from flower_vfl.grids.resident import Limits, ResidentGrid, resident
from flower_vfl.metrics import METRICS
from flower_vfl.parties.checkpoints import DirectoryStore, open_store, writing
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.parties.schedule import TRAIN
from flower_vfl.protocol.client_app import vertical_client_app
from flower_vfl.protocol.replay import node_name, node_role
from flower_vfl.specs import split_specs
from flower_vfl.strategies import VerticalStrategy
from flower_vfl.strategies.alignment import NONE
from flower_vfl.strategies.setup import read_node_table

from .attacks import completions_of, leakage_of, optimizer_of
from .capture import check_capture
from .config import PRIVACY, RunConfig, parse_rates
from .parties import FIT, PartyRows, load_rows, make_label, make_passive
from .plugins import load_plugins
from .results import result_document, save_result

server_app = ServerApp()
# Settings that the strategy has under the same name.
_SAME = "batch_size seed aggregation test_fraction valid_fraction evaluate_every "
_SAME += "threads pipeline sealed local_steps"
_LONGEST_OPENING = 120.0  # seconds; a SuperNode notices a killed client after a minute


def rows_at(context: Context) -> tuple[RunConfig, PartyRows]:
    """Return a node's settings and rows; store what prediction needs later."""
    load_plugins()  # a client process starts here
    config = RunConfig.from_run_config(context.run_config)
    file = context.node_config.get("data")
    number = context.node_config.get("partition-id")
    if file is None and number is None:
        remedy = "start its SuperNode with --node-config '... data=\"/path/file.csv\"'"
        raise ConfigError(f"this node has no data; {remedy}")
    index = 0
    if node_role(context) == "passive":
        index = 1 if number is None else max(int(number), 1)
    rows = load_rows(config, index, None if file is None else str(file))
    store = open_store(context, node_name(context))
    known_already = config.resume and FIT in store.tags()
    if isinstance(store, DirectoryStore) and not known_already:
        fit = rows.data.fit.state_dict() if rows.data.fit is not None else None
        known: dict[str, Any] = {"fit": fit, "columns": list(rows.data.columns)}
        known |= {"task": rows.task, "classes": list(rows.classes)}
        with writing(node_name(context), FIT):
            store.save(FIT, known)
    return config, rows


def passive_at(context: Context) -> PassiveParty:
    """Return the passive party of a node."""
    config, rows = rows_at(context)
    number = context.node_config.get("partition-id")
    if number is None or not _simulated(context):
        return make_passive(config, rows)
    # Only a simulated party attacks because the run config says so.
    return make_passive(config, rows, optimizer_of(config, int(number)), True)


def label_at(context: Context) -> LabelParty:
    """Return the label party of a node."""
    rows, own = rows_at(context)[1], context.node_config
    private = {k: own[k] for k in PRIVACY if k in own}  # wins over the run's settings
    if not _simulated(context):  # a server names no files, and changes no labels
        folder = own.get("state-dir")
        kept = str(Path(str(folder)) / "label-ledger.json") if folder else ""
        private = {"label-ledger": kept, "canaries": 0, **private}
    config = RunConfig.from_run_config({**context.run_config, **private})
    return make_label(config, rows, _simulated(context))


def aligning_at(context: Context) -> AlignmentSettings:
    """Return a node's alignment settings; a simulated node trusts the server."""
    own = AlignmentSettings.from_node(context.node_config)
    config = RunConfig.from_run_config(context.run_config)
    normalise = own.normalise or config.normalise or None
    trust = own.trust_server or _simulated(context)
    return replace(own, normalise=normalise, trust_server=trust)


def _simulated(context: Context) -> bool:
    return not {"role", "data"} & set(context.node_config)


client_app = resident(vertical_client_app(passive_at, label_at, alignment=aligning_at))


def make_strategy(config: RunConfig, progress: bool | None = None) -> VerticalStrategy:
    """Return the strategy of a run."""
    if config.alignment != NONE:  # only the parties know labels by row number
        needing = {"train-metrics": config.train_metrics, "capture": config.capture}
        needing["model completion"] = bool(completions_of(config))
        for name, given in needing.items():
            if given:
                raise ConfigError(f"{name} is for runs whose ids are not aligned")
    privacy = config.label_privacy() is not None  # only its node knows true labels
    at = cast(strategies.Placement, "label" if privacy else config.defense_at)
    noise_seed = config.seed if config.reproducible_noise else None
    if config.reproducible_noise and config.defense:
        log(WARNING, "noise is drawn from the run's seed: for simulations only")
    patience = config.patience
    same: dict[str, Any] = {name: getattr(config, name) for name in _SAME.split()}
    return VerticalStrategy(
        **same,
        learning_rate=parse_rates(config.learning_rate),
        early_stopping=strategies.EarlyStopping(patience) if patience else None,
        leakage=leakage_of(config),
        parties=config.parties + 1,
        nodes=read_node_table(Path(config.nodes)) if config.nodes else None,
        progress=progress,
        trackers=_trackers(config),
        notes=config.to_run_config(),
        defense=strategies.Defense(config.defense, at=at, noise_seed=noise_seed),
        checkpoints=strategies.Checkpoints(
            config.checkpoint_every, config.state_dir or None, bool(config.out)
        ),
        compression=strategies.Compression(
            config.compress_embeddings, config.compress_gradients
        ),
        alignment=strategies.Alignment(
            config.alignment, group=config.group, padding=config.padding
        ),
    )


def _trackers(config: RunConfig) -> list[strategies.Tracker]:
    board = strategies.TensorBoard.__name__.lower()
    folder = f"{board}:folder={Path(config.out) / board}" if config.out else board
    specs = [folder if spec == board else spec for spec in split_specs(config.track)]
    return list(map(strategies.build_tracker, specs))


def train(
    grid: Grid,
    config: RunConfig,
    engine: str,
    progress: bool | None = None,
    then: Callable[[VerticalStrategy, RunConfig], None] | None = None,
) -> dict[str, Any]:
    """Train on a grid and return the result document; save it in ``out`` if set."""
    started = time.time()
    strategy = make_strategy(config, progress)
    result: strategies.VerticalResult = strategy.start(
        grid, num_rounds=config.epochs, timeout=config.timeout, resume=config.resume
    )
    seconds = time.time() - started
    trained = train_metrics(strategy, config) if config.train_metrics else {}
    document = result_document(config, engine, result, seconds, trained)
    known = strategy._running().participants
    everyone = {known.label.name: known.label, **known.passive}
    document["parties"] = {name: party.rows for name, party in everyone.items()}
    if then is not None:
        then(strategy, config)
    if config.out:
        save_result(document, Path(config.out))
    return document


def train_metrics(strategy: VerticalStrategy, config: RunConfig) -> dict[str, float]:
    """Return the metrics on the training rows; reads the labels in this process."""
    label = load_rows(config, 0)
    assert label.labels is not None and label.task is not None  # the label party's
    truth = label.labels[label.codes == TRAIN].astype(np.float64)
    scores = strategy.predict("train").astype(np.float64)
    return METRICS[label.task](scores, truth)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy on Flower's own grid."""
    load_plugins()
    config = RunConfig.from_run_config(context.run_config)
    check_capture(config, "flwr run")
    if completions_of(config):
        log(INFO, "model completion follows only if 'flower-vfl run' started this run")
    engine = "flower" if config.transport == "plain" else "ray"
    if grid.run.primary_task_type != TaskType.SIMULATION:
        engine = "deployment"
        if config.label_column:  # the nodes have files of their own
            config = replace(config, dataset="")
    if config.transport == "plain":
        train(grid, config, engine, progress=False)
        return
    with resident_grid(grid, config) as sessions:
        train(sessions, config, engine, progress=False)


def resident_grid(grid: Grid, config: RunConfig) -> ResidentGrid:
    """Return a grid that keeps the parties in memory."""
    names = ("certificate", "private_key", "root_certificate")
    files: Any = {n: Path(file) for n in names if (file := getattr(config, n))}
    return ResidentGrid(
        grid,
        **files,
        address=config.address,
        advertise=config.advertise or None,
        insecure=config.insecure,
        reopen=True,  # a party that lost its state says so and is restored
        open_timeout=min(config.timeout, _LONGEST_OPENING),
        limits=Limits(silence=config.silence),
    )
