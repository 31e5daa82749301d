"""Build the parties of a run at their nodes."""

from dataclasses import dataclass, replace
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.supercore import log
from numpy.typing import NDArray

from flower_vfl import Imputation
from flower_vfl.alignment import NORMALISERS, encode_ids
from flower_vfl.errors import ConfigError, TableError
from flower_vfl.objectives import OptimizerFactory, Task
from flower_vfl.parties.base import Party
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.parties.schedule import TEST, TRAIN, split_rows
from flower_vfl.randomness import derive_seed
from flower_vfl.strategies import build_defense
from flower_vfl.strategies.alignment import NONE

from .config import RunConfig, parts
from .datasets import Dataset, infer_task, load_dataset, party_files, read_party_file
from .datasets.party_files import PartyFile, label_warnings, order_by_ids
from .datasets.prepare import TableFit, prepare_table
from .datasets.types import PartyData
from .datasets.vertical import party_columns, prepare_party
from .models.registry import build_bottom, build_optimizer
from .objectives import objective_for

FIT = "fit"  # tag of what a node stores for predictions
FIT_FILE = f"{FIT}.pt"


@dataclass(frozen=True)
class PartyRows:
    """One party's rows; `absent` marks those of the run that it lacks."""

    data: PartyData
    ids: NDArray[Any]
    codes: NDArray[np.int8]
    labels: NDArray[Any] | None = None
    task: Task | None = None
    classes: tuple[str, ...] = ()
    absent: NDArray[np.bool_] | None = None
    aligned: bool = False

    @property
    def split(self) -> NDArray[np.int8] | None:
        """The split of the rows; None if the strategy decides it."""
        return None if self.aligned else self.codes

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Training rows that the party holds."""
        training: NDArray[np.bool_] = self.codes == TRAIN
        return training if self.absent is None else training & ~self.absent


def divided_dataset(
    config: RunConfig,
) -> tuple[Dataset, NDArray[np.int8], list[tuple[str, ...]]]:
    """Return a run's dataset, the split of its rows, and the columns of each party."""
    dataset = load_dataset(
        config.dataset,
        data_dir=Path(config.data_dir) if config.data_dir else None,
        target=config.target or None,
        limit=config.limit or None,
    )
    codes, division = dataset.split(*_split(config)), (config.split, config.label_share)
    return dataset, codes, party_columns(dataset, codes, config.parties, *division)


def _split(config: RunConfig) -> tuple[int, float, float]:
    """Return the seed that divides the rows, and the held-out shares."""
    seed = config.seed if config.split_seed < 0 else config.split_seed
    return seed, config.test_fraction, config.valid_fraction


def load_rows(config: RunConfig, index: int, file: str | None = None) -> PartyRows:
    """Load the rows of one party."""
    if file or config.label_party:
        files = [config.label_party, *config.passive_files()]
        return _rows_of_file(config, file or files[index], index == 0)
    dataset, codes, columns = divided_dataset(config)
    absent = _absent_rows(config, codes, index)
    # Nothing is fitted on rows that the party lacks.
    fitted = codes if absent is None else np.where(absent, TEST, codes).astype(np.int8)
    data = prepare_party(dataset, fitted, columns[index])
    rows = PartyRows(data, dataset.ids, codes, absent=absent)
    if not index:
        labels, task, classes = dataset.labels, dataset.task, dataset.classes
        rows = replace(rows, labels=labels, task=task, classes=classes)
    return rows if config.alignment == NONE else _held(rows)


def _absent_rows(
    config: RunConfig, codes: NDArray[np.int8], index: int
) -> NDArray[np.bool_] | None:
    """Return which training rows a simulated party lacks, as FLORIST's experiments."""
    share = config.absent_features if index else config.absent_labels
    if not share:
        return None
    training = np.flatnonzero(codes == TRAIN)
    stream = np.random.default_rng(derive_seed(config.seed, "absent", index))
    # One permutation for all shares: a larger share contains a smaller one.
    chosen = stream.permutation(training)[: round(share * len(training))]
    return np.isin(np.arange(len(codes)), chosen)


def _held(rows: PartyRows) -> PartyRows:
    """Return only the rows that the party holds, for an alignment of ids."""
    if rows.absent is None:
        return rows
    kept = np.flatnonzero(~rows.absent)
    inputs = tuple(part[torch.from_numpy(kept)] for part in rows.data.inputs)
    return replace(
        rows,
        data=replace(rows.data, inputs=inputs),
        ids=rows.ids[kept],
        codes=rows.codes[kept],
        labels=None if rows.labels is None else rows.labels[kept],
        absent=None,
    )


def _read_file(
    config: RunConfig, file: str, is_label: bool = False, new: bool = False
) -> PartyFile:
    """Read a file as the settings say."""
    if is_label and not config.label_column:
        raise ConfigError(f"set label-column: the label of '{file}'")
    path = Path(file)
    written = path.stat() if path.is_file() else None
    rows = _read_once(
        written and (written.st_ino, written.st_mtime_ns, written.st_size),
        file,
        config.id_column,
        config.label_column if is_label else None,
        tuple(parts(config.drop)),
        tuple(parts(config.missing)),
        config.task or None,
        "id" if new else "all",
    )
    if not config.normalise or config.alignment != NONE:  # an alignment does it
        return rows
    try:
        encode_ids(map(str, rows.ids), config.normalise)  # checks them
    except ConfigError as error:
        raise TableError(f"'{file}', column '{config.id_column}': {error}") from None
    change = NORMALISERS[config.normalise]
    return rows._replace(ids=np.array([change(str(each)) for each in rows.ids]))


@lru_cache(maxsize=8)  # each run of a study reads the same files
def _read_once(written: object, *arguments: Any) -> PartyFile:
    """Read a file; `written` tells whether it has changed since."""
    return read_party_file(*arguments)


def check_files(config: RunConfig) -> list[str]:
    """Return what a run's files were read as; stop if they cannot be used together."""
    if not config.label_party:
        return []
    paths = [config.label_party, *config.passive_files()]
    files = {path: _read_file(config, path, path == paths[0]) for path in paths}
    names = {column.name for rows in files.values() for column in rows.columns}
    if unknown := set(parts(config.drop)) - names:
        raise ConfigError(f"no file has the column '{min(unknown)}' to drop")
    if not config.normalise:
        party_files.check_spelling({path: rows.ids for path, rows in files.items()})
    lines = [line for file in files.items() for line in party_files.summary(*file)]
    found = infer_task(files[paths[0]].labels, config.task or None)  # type: ignore[arg-type]
    normalise = config.normalise if config.alignment != NONE else ""
    return [*lines, *label_warnings(files, found, normalise)]


def _rows_of_file(config: RunConfig, file: str, is_label: bool) -> PartyRows:
    if config.absent_labels or config.absent_features:
        raise ConfigError("absent-labels, absent-features are for datasets, not files")
    rows = order_by_ids(_read_file(config, file, is_label))
    aligned, ids = config.alignment != NONE, rows.ids
    if aligned:
        ids = ids.astype(str)  # numbers in one file may be text in another
        codes = np.full(len(ids), TRAIN, dtype=np.int8)
    else:
        codes = split_rows(len(ids), *_split(config))
    data = PartyData((), None, ())
    if rows.features.shape[1]:
        data = prepare_table(rows.features, codes)
    if rows.labels is None:
        return PartyRows(data, ids, codes, aligned=aligned)
    found = infer_task(rows.labels, config.task or None)  # type: ignore[arg-type]
    for line in label_warnings({file: rows}, found):
        log(WARNING, "%s", line)
    task, classes, labels = found
    return PartyRows(data, ids, codes, labels, task, classes, aligned=aligned)


def new_rows(config: RunConfig, file: str, fit: Path) -> PartyRows:
    """Load new rows for prediction."""
    rows = order_by_ids(_read_file(config, file, new=True))
    codes = np.full(len(rows.ids), TEST, dtype=np.int8)
    known = read_known(fit)
    data = PartyData((), None, ())
    if known["fit"] is not None:
        table = TableFit.from_state_dict(known["fit"])
        try:
            inputs = table.apply(rows.features)
        except ConfigError as error:
            raise TableError(f"'{file}': {error}") from None
        data = PartyData(inputs, table.spec, known["columns"])
    classes = tuple(known["classes"])
    return PartyRows(data, rows.ids, codes, task=known["task"], classes=classes)


def read_known(fit: Path) -> dict[str, Any]:
    """Return what a party's node stored about its columns and classes."""
    if not fit.is_file():
        remedy = "predict rows of the run, or train again with --out"
        raise ConfigError(f"'{fit}' is missing; {remedy}")
    return DirectoryStore(fit.parent).load(FIT)


def make_passive(
    config: RunConfig,
    rows: PartyRows,
    optimizer: OptimizerFactory | None = None,
    trust_server: bool = False,
) -> PassiveParty:
    """Return a passive party."""
    if rows.data.spec is None:
        raise ConfigError("a passive party needs at least one feature column")
    party = PassiveParty(
        rows.data.inputs,
        build_bottom(config.bottom, rows.data.spec, config.width),
        optimizer=optimizer or build_optimizer(config.optimizer),
        **_common(config, rows, trust_server),
    )
    _place(config, party, rows.absent)
    return party


def _common(config: RunConfig, rows: PartyRows, trust_server: bool) -> dict[str, Any]:
    """Return what the party of either role is built with."""
    imputation = Imputation(
        features=config.synthetic_features,
        labels=config.synthetic_labels,
        calibration=config.calibration,
        # None: the party's own secret
        secret=config.seed if config.reproducible_noise and trust_server else None,
    )
    placed = {"ids": rows.ids, "split": rows.split, "device": config.device}
    return {**placed, "imputation": imputation}


def make_label(
    config: RunConfig, rows: PartyRows, trust_server: bool = False
) -> LabelParty:
    """Return the label party."""
    spec = rows.data.spec
    chosen = config.label_bottom or config.bottom, config.label_width or config.width
    own = None if spec is None else build_bottom(chosen[0], spec, chosen[1])
    party = LabelParty(
        rows.labels,
        objective_for(config, rows),
        features=rows.data.inputs or None,
        model=own,
        optimizer=build_optimizer(config.optimizer),
        rows=len(rows.ids),
        trust_server=trust_server,
        build_defense=build_defense,
        label_privacy=config.label_privacy(),
        **_common(config, rows, trust_server),
    )
    _place(config, party, rows.absent)
    return party


def _place(config: RunConfig, party: Party, absent: NDArray[np.bool_] | None) -> None:
    """Give a party all rows of the run, marking those that it lacks."""
    if config.alignment != NONE:  # the alignment places the party
        return
    if not config.absent_features and not config.absent_labels:
        return
    names = [f"passive-{number + 1}" for number in range(config.parties)]
    shares = dict.fromkeys(names, 1.0 - config.absent_features)
    shares["label"] = 1.0 - config.absent_labels
    local = torch.arange(party.own_rows)
    if absent is not None:
        local[torch.from_numpy(absent)] = -1
    party.place(RowIndex(local, shares))
