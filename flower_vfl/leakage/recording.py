"""What parties of any split-learning system sent and got, in files for an audit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError

if TYPE_CHECKING:
    from flower_vfl.transform import Batch

Array = NDArray[Any]
MATRICES, VALUES = ("gradient", "embedding"), ("label", "row", "step", "prediction")
PARTY, ONE_PARTY = "party", "passive-1"
_PATTERNS = ("*.npz", "*.parquet")


class Recorder:
    """Writes gradients, labels and embeddings into a folder, batch by batch.

    In plain PyTorch, :meth:`watch` an embedding before the top model. It is also a
    gradient transform that changes nothing: put it behind a defense to record what
    leaves. A step that is sent again is recorded once. For a Flower app, see
    :func:`flower_vfl.record_grid` and :func:`flower_vfl.record_mod`.

    Parameters
    ----------
    folder : str | Path
        Where the files go. The first batch must find no recording there.
    every : int (default: 100)
        Batches of a party in one file; 1 writes each batch at once.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> recorder = Recorder(folder.name)
    >>> embedding = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> watched = recorder.watch(embedding, label=[0, 1])
    >>> watched.sum().backward()
    >>> recorder.save()
    >>> recording = read_recording(folder.name)
    >>> recording.parties["passive-1"]["gradient"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    requires_labels = True
    sees_embeddings = True

    def __init__(self, folder: str | Path, every: int = 100) -> None:
        self.folder, self.every = Path(folder), every
        self._kept: dict[str, list[dict[str, Array]]] = {}
        self._steps: dict[str, int] = {}

    def add(
        self,
        gradient: ArrayLike | Tensor,
        label: ArrayLike | Tensor,
        *,
        row: ArrayLike | Tensor | None = None,
        step: int | None = None,
        party: str = ONE_PARTY,
        embedding: Tensor | None = None,
        prediction: ArrayLike | Tensor | None = None,
    ) -> None:
        """Record a batch of one party; steps are counted if they are not given."""
        if not self._steps:
            self._begin()
        self._steps[party] = self._steps.get(party, 0) + 1 if step is None else step
        parts = {"gradient": gradient, "label": label, "row": row}
        parts |= {"embedding": embedding, "prediction": prediction}
        batch = {n: _host(part) for n, part in parts.items() if part is not None}
        for name in batch.keys() & {*MATRICES}:
            batch[name] = batch[name].reshape(len(batch[name]), -1)
        if not (rows := len(batch["gradient"])):
            return
        if wrong := [name for name, part in batch.items() if len(part) != rows]:
            sizes = ", ".join(f"{len(batch[name])} of {name}" for name in wrong)
            raise ConfigError(f"a batch has {rows} rows of gradients and {sizes}")
        batch["step"] = np.full(rows, self._steps[party])
        kept = self._kept.setdefault(party, [])
        kept.append(batch)
        if len(kept) >= self.every:
            self._write(party)

    def watch(
        self,
        embedding: Tensor,
        label: ArrayLike | Tensor,
        *,
        row: ArrayLike | Tensor | None = None,
        party: str = ONE_PARTY,
    ) -> Tensor:
        """Return the embedding, whose gradient is recorded once it is computed."""
        watched = embedding.view_as(embedding)

        def keep(gradient: Tensor) -> None:
            self.add(gradient, label, row=row, party=party, embedding=embedding)

        watched.register_hook(keep)  # type: ignore[no-untyped-call]
        return watched

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        """Record the gradient for a party, and return it as it is."""
        assert batch.labels is not None  # required
        if batch.step <= self._steps.get(batch.party, 0):
            return gradient  # sent again
        known = {"row": batch.rows, "embedding": batch.embedding}
        self.add(gradient, batch.labels, step=batch.step, party=batch.party, **known)
        return gradient

    def save(self) -> None:
        """Write what is not written yet."""
        for party in [party for party, kept in self._kept.items() if kept]:
            self._write(party)

    def _write(self, party: str) -> None:
        kept, self._kept[party] = self._kept[party], []
        names = [n for n in kept[0] if all(n in batch for batch in kept)]
        parts: dict[str, Any] = {n: np.concatenate([b[n] for b in kept]) for n in names}
        # Named by its step: a client may have a process for every message.
        name = f"{re.sub('[^a-zA-Z0-9_-]', '_', party)}-{parts['step'][0]:06d}"
        same = len(list(self.folder.glob(f"{name}*.npz")))
        name += f"-{same}.npz" if same else ".npz"
        np.savez_compressed(self.folder / name, **parts, party=np.array(party))

    def _begin(self) -> None:
        """Make the folder; refuse one that holds a recording."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(found for pattern in _PATTERNS for found in self.folder.glob(pattern)):
            raise ConfigError(f"'{self.folder}' holds a recording already; use another")

    def state_dict(self) -> dict[str, Any]:
        """Return the last step of each party; what was recorded is in files."""
        return {"steps": dict(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on recording, not before the last step."""
        for party, step in state.get("steps", {}).items():
            self._steps[party] = max(step, self._steps.get(party, 0))


def _host(values: ArrayLike | Tensor) -> Array:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return np.array(values)


@dataclass(frozen=True)
class Recording:
    """The arrays of each party by name, in the order of its steps."""

    parties: Mapping[str, Mapping[str, Array]]

    @property
    def labels(self) -> Array:
        """The labels of all rows of all steps, of every party."""
        return np.concatenate([own["label"] for own in self.parties.values()])

    def batches(self) -> Iterator[tuple[int, dict[str, dict[str, Tensor]]]]:
        """Yield each step with the arrays of the parties that have it."""
        found: dict[int, dict[str, dict[str, Tensor]]] = {}
        for party, own in self.parties.items():
            steps, starts = np.unique(own["step"], return_index=True)
            parts = np.split(np.arange(len(own["step"])), starts[1:])
            for step, rows in zip(steps, parts, strict=True):
                batch = {n: torch.from_numpy(part[rows]) for n, part in own.items()}
                found.setdefault(int(step), {})[party] = batch
        yield from sorted(found.items())


def read_recording(path: str | Path) -> Recording:
    """Read a recording: an ``.npz`` or Parquet file, or a folder of them.

    Parameters
    ----------
    path : str | Path
        Each file has ``gradient`` (rows × columns) and ``label``, and where known
        ``row``, ``step``, ``party``, ``embedding`` and ``prediction``. A matrix in
        Parquet is a column of lists, or columns ``gradient_0``, ``gradient_1``, ...

    Returns
    -------
    Recording
        Where steps are missing, a row that occurs again begins the next one.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(file for p in _PATTERNS for file in path.glob(p))
    if not files or not path.exists():
        raise ConfigError(f"'{path}' is no .npz or Parquet file, and no folder of them")
    parts: dict[str, list[dict[str, Array]]] = {}
    for file in files:
        found = _read(file)
        named = found.pop(PARTY, np.array(ONE_PARTY))
        for party in np.unique(named):
            own = found if named.ndim == 0 else _of(found, named == party)
            parts.setdefault(str(party), []).append(own)
    return Recording({party: _whole(party, own) for party, own in parts.items()})


def _read(file: Path) -> dict[str, Array]:
    """Return the arrays of one file, checked."""
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as content:
                found = {name: content[name] for name in content.files}
        else:
            found = _from_table(pd.read_parquet(file))
    except (OSError, ValueError, KeyError, ImportError, BadZipFile) as error:
        raise ConfigError(f"'{file}' cannot be read: {error}") from error
    if unknown := found.keys() - {*MATRICES, *VALUES, PARTY}:
        known = ", ".join((*MATRICES, *VALUES, PARTY))
        raise ConfigError(f"'{file}' has '{min(unknown)}'; a recording has {known}")
    if missing := {"gradient", "label"} - found.keys():
        raise ConfigError(f"'{file}' has no '{min(missing)}', which an audit needs")
    rows = len(found["gradient"])
    for name, part in found.items():
        if name == PARTY and part.ndim == 0:
            continue
        where, numeric = f"'{file}': '{name}' has", part.dtype.kind in "biuf"
        if part.ndim == 0 or len(part) != rows:
            size = "a single value" if part.ndim == 0 else f"{len(part)} rows"
            raise ConfigError(f"{where} {size}, the gradient {rows} rows")
        if name != PARTY and not (numeric and np.isfinite(part).all()):
            raise ConfigError(f"{where} values that are no finite numbers")
    for name in found.keys() & {*MATRICES}:
        found[name] = found[name].reshape(rows, -1).astype(np.float32)
    for name in found.keys() & {"row", "step"}:
        found[name] = found[name].astype(np.int64)
    return found


def _from_table(table: pd.DataFrame) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name in table.columns.str.replace(r"_\d+$", "", regex=True).unique():
        pattern = re.compile(rf"{re.escape(name)}(_\d+)?")
        own = [column for column in map(str, table) if pattern.fullmatch(column)]
        own.sort(key=lambda column: (len(column), column))
        values = table[own].to_numpy()
        if name in MATRICES and own == [name]:
            values = np.stack([np.asarray(row, dtype=float) for row in table[name]])
        found[name] = values if name in MATRICES else values[:, 0]
    return found


def _of(found: Mapping[str, Array], rows: Array) -> dict[str, Array]:
    return {name: part[rows] for name, part in found.items()}


def _whole(party: str, parts: list[dict[str, Array]]) -> dict[str, Array]:
    """Return all that is known of one party, sorted by step."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    widths = {part["gradient"].shape[1] for part in parts}
    if len(widths) > 1:
        both = " and ".join(map(str, sorted(widths)))
        raise ConfigError(f"the gradients of '{party}' have {both} columns")
    found = {name: np.concatenate([part[name] for part in parts]) for name in names}
    rows = pd.Series(found.get("row", np.arange(len(found["label"]))))
    if "step" not in found:
        found["step"] = rows.groupby(rows).cumcount().to_numpy() + 1
    found = _of(found, np.argsort(found["step"], kind="stable"))
    if "row" not in found:
        found["row"] = _rows(found["step"], found["label"])
    return found


def _rows(steps: Array, labels: Array) -> Array:
    """Return row numbers: the same ones in each step if its labels are the same."""
    counts = np.unique(steps, return_counts=True)[1]
    size = counts[0]
    if (counts == size).all() and (labels.reshape(-1, size) == labels[:size]).all():
        return np.tile(np.arange(size), len(counts))
    return np.arange(len(steps))
