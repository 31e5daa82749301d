"""``flower-vfl predict``: predictions of a saved run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import Context

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.parties.schedule import SPLITS
from flower_vfl.protocol.client_app import vertical_client_app
from flower_vfl.simulations import parties
from flower_vfl.simulations.app import make_strategy
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import PartyRows
from flower_vfl.simulations.results import PARTIES_FOLDER, load_result
from flower_vfl.simulations.runtime.engines import set_log
from flower_vfl.strategies.alignment import NONE


def predict(
    run_folder: Path,
    split: str = "test",
    label_party: str = "",
    passive: list[str] | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Predict with the saved model of a run."""
    set_log(verbose=False)
    files = [label_party, *(passive or [])] if label_party or passive else []
    frame = predict_saved(run_folder, split, files)
    if as_json:
        print(frame.to_json(orient="records"))
    else:
        text = frame.to_csv(index=False)
        print(text, end="") if out is None else out.write_text(text, "utf-8")


def predict_saved(
    folder: Path, split: str = "test", files: list[str] | None = None
) -> pd.DataFrame:
    """Return the predictions of a saved run, with the id of each row.

    Parameters
    ----------
    folder : Path
        The ``--out`` folder of the run.
    split : str (default: "test")
        Rows to predict: ``"test"``, ``"valid"`` or ``"train"``.
    files : list[str] | None (default: None)
        Files with new rows, the label party's first; None predicts rows of the run.

    Examples
    --------
    >>> predict_saved(Path("runs/bank"))  # doctest: +SKIP
    """
    check_name("split", split, SPLITS)
    config = RunConfig(**load_result(folder)["config"])
    if config.alignment != NONE and not files:
        text = "only the parties of a run that aligned ids know its rows"
        raise ConfigError(f"{text}; pass files with new rows, with the same ids in all")
    state_dir = folder / PARTIES_FOLDER  # the folder may have been moved
    config = replace(config, state_dir=str(state_dir), out=str(folder), resume=False)
    # All parties are in this process.
    config = replace(config, track="", alignment=NONE, sealed=False)
    if files and not config.label_party:
        text = f"'{folder}' is a run on the dataset '{config.dataset}', not on files"
        raise ConfigError(f"{text}; leave out --label-party and --passive")
    if files and len(files) != config.parties + 1:
        text = f"the run has passive parties: {config.parties}, new files for"
        raise ConfigError(f"{text} them: {len(files) - 1}; give --passive for each")
    names = ["label", *(f"passive-{i + 1}" for i in range(config.parties))]
    for name in names:
        if "final" not in DirectoryStore(state_dir / name).tags():
            raise ConfigError(f"'{folder}' has no trained module of party '{name}'")
    known = parties.read_known(state_dir / "label" / parties.FIT_FILE)
    if files and not files[0] and known["fit"] is not None:
        text = f"the label party trained with columns of its own: {known['columns']}"
        raise ConfigError(f"{text}; give their new rows with --label-party FILE")
    if files:  # a label party without features has none
        given = [file or files[1] for file in files]
        fits = [state_dir / name / parties.FIT_FILE for name in names]
        pairs = zip(given, fits, strict=True)
        loaded = [parties.new_rows(config, file, fit) for file, fit in pairs]
    else:
        loaded = [parties.load_rows(config, index) for index in range(len(names))]

    def passive(context: Context) -> PassiveParty:
        rows = loaded[int(context.node_config["partition-id"])]
        return parties.make_passive(config, rows)

    def label(context: Context) -> LabelParty:
        # The server is this process, which reads all files.
        return parties.make_label(config, loaded[0], trust_server=True)

    client_app = vertical_client_app(passive, label)
    with InProcessGrid(client_app, len(names), config.to_run_config()) as grid:
        strategy = make_strategy(config, progress=False)
        strategy.connect(grid).restore("final")
        values = strategy.predict(split)
    return _table(values, loaded[0], split, known)


def _table(
    values: np.ndarray, rows: PartyRows, split: str, known: dict[str, Any]
) -> pd.DataFrame:
    ids, task = rows.ids[rows.codes == SPLITS[split]], known["task"]
    if task == "regression":
        return pd.DataFrame({"id": ids, "prediction": values})
    classes, binary = np.asarray(known["classes"]), task == "binary"
    chosen = (values > 0.5).astype(int) if binary else values.argmax(axis=1)
    names = [f"probability of {name}" for name in (classes[1:] if binary else classes)]
    frame = pd.DataFrame(values.reshape(len(values), -1), columns=names)
    frame.insert(0, "id", ids)
    frame.insert(1, "prediction", classes[chosen])
    return frame
