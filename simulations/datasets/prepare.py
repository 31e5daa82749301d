"""Tables: numbers are standardised and categories numbered, as the TRAIN rows say."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TRAIN

from .inputs import InputSpec
from .types import PartyData


@dataclass(frozen=True)
class NumericColumn:
    """How one numeric column is prepared."""

    name: str
    log: bool
    median: float
    mean: float
    scale: float
    indicator: bool


@dataclass(frozen=True)
class CategoricalColumn:
    """How one categorical column is numbered."""

    name: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class TableFit:
    """What :func:`prepare_table` learned from the training rows.

    Parameters
    ----------
    numeric : tuple[NumericColumn, ...]
        The numeric columns.
    categorical : tuple[CategoricalColumn, ...]
        The categorical columns.
    """

    numeric: tuple[NumericColumn, ...]
    categorical: tuple[CategoricalColumn, ...]

    @property
    def numeric_names(self) -> tuple[str, ...]:
        """Name of each column of the numeric tensor; indicators come last."""
        missing = [f"{c.name} (missing)" for c in self.numeric if c.indicator]
        return (*(c.name for c in self.numeric), *missing)

    @property
    def spec(self) -> InputSpec:
        """The shape of what :meth:`apply` returns."""
        sizes = tuple(len(column.values) + 1 for column in self.categorical)
        return InputSpec(numeric=len(self.numeric_names), cardinalities=sizes)

    def apply(self, frame: pd.DataFrame) -> tuple[Tensor, ...]:
        """Prepare rows, old or new, as the training rows were."""
        frame = _named(frame)
        names = [c.name for c in self.numeric] + [c.name for c in self.categorical]
        absent = [name for name in names if name not in frame.columns]
        if absent:
            raise ConfigError(
                f"columns {absent} are missing from the table; it has "
                f"{[str(column) for column in frame.columns]}"
            )
        inputs: list[Tensor] = []
        if self.numeric:
            inputs.append(torch.from_numpy(self._numbers(frame)))
        if self.categorical:
            codes = [_encode(frame[c.name], c.values) for c in self.categorical]
            inputs.append(torch.from_numpy(np.stack(codes, axis=1)))
        return tuple(inputs)

    def _numbers(self, frame: pd.DataFrame) -> NDArray[np.float32]:
        out = np.empty((len(frame), len(self.numeric_names)), dtype=np.float32)
        position = len(self.numeric)
        for index, column in enumerate(self.numeric):
            values = _numbers(frame[column.name])
            missing = np.isnan(values)
            values = _signed_log(values) if column.log else values
            filled = np.where(missing, column.median, values)
            out[:, index] = (filled - column.mean) / column.scale
            if column.indicator:
                out[:, position] = missing
                position += 1
        return out

    def state_dict(self) -> dict[str, Any]:
        """Return the fit as plain lists and numbers, fit for JSON."""
        return {
            "numeric": [asdict(column) for column in self.numeric],
            "categorical": [
                {"name": column.name, "values": list(column.values)}
                for column in self.categorical
            ],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TableFit:
        """Return the fit that :meth:`state_dict` wrote."""
        return cls(
            tuple(NumericColumn(**column) for column in state["numeric"]),
            tuple(
                CategoricalColumn(column["name"], tuple(column["values"]))
                for column in state["categorical"]
            ),
        )


def prepare_table(
    frame: pd.DataFrame,
    codes: NDArray[np.int8],
    *,
    categorical: Collection[str] = (),
    log_columns: Collection[str] = (),
    min_count: int = 2,
) -> PartyData:
    """Prepare one party's own table for its bottom model.

    Only the party's columns and the shared split are used, so that a real party can
    do it alone, and only training rows are learned from. Numeric and boolean columns
    become ``float32``: heavy-tailed ones on the scale ``sign(x) log(1 + |x|)``,
    missing and infinite values replaced by the median, then standardised; a column
    with missing training values gets a 0/1 indicator column, after all the numbers.
    Other columns become ``int64`` codes, in which a missing value is a value of its
    own, and 0 stands for a rare or new value.

    Parameters
    ----------
    frame : pd.DataFrame
        The party's columns.
    codes : NDArray[np.int8]
        The split of each row.
    categorical : Collection[str] (default: ())
        Columns to be treated as categories although they hold numbers.
    log_columns : Collection[str] (default: ())
        Columns with a heavy tail, such as counts and amounts.
    min_count : int (default: 2)
        Number of training rows that must share a value for it to get a code.

    Returns
    -------
    PartyData
        The inputs, with the :class:`TableFit` that prepares new rows.
    """
    if len(frame) != len(codes):
        raise ConfigError(
            f"the table has {len(frame)} rows but the split has {len(codes)}"
        )
    if frame.shape[1] == 0:
        raise ConfigError("the table has no columns to prepare")
    frame = _named(frame)
    train = frame.loc[codes == TRAIN]
    if train.empty:
        raise ConfigError("the split has no training rows to learn from")
    numbers: list[NumericColumn] = []
    categories: list[CategoricalColumn] = []
    for name in frame.columns:
        column = train[name]
        if name in categorical or not _is_numeric(column):
            categories.append(_fit_categorical(name, column, min_count))
        else:
            numbers.append(_fit_numeric(name, column, name in log_columns))
    fit = TableFit(tuple(numbers), tuple(categories))
    return PartyData(fit.apply(frame), fit.spec, tuple(frame.columns), fit)


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table with text for column names, each of them once."""
    names = [str(name) for name in frame.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"the table has more than one column called {twice}")
    return frame.set_axis(names, axis="columns")


def _is_numeric(column: pd.Series[Any]) -> bool:
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        raise ConfigError(
            f"column '{column.name}' holds dates; turn them into a number first, for "
            "example days since a fixed date"
        )
    return bool(pd.api.types.is_numeric_dtype(column.dtype))


def _numbers(column: pd.Series[Any]) -> NDArray[np.float64]:
    if not pd.api.types.is_numeric_dtype(column.dtype):
        raise ConfigError(
            f"column '{column.name}' was numeric when the preparation was fitted, "
            f"but now holds {column.dtype}"
        )
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    return np.where(np.isinf(values), np.nan, values)


def _signed_log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``sign(x) log(1 + |x|)``: a logarithm that takes zero and negatives."""
    scaled: NDArray[np.float64] = np.sign(values) * np.log1p(np.abs(values))
    return scaled


def _fit_numeric(name: str, column: pd.Series[Any], log: bool) -> NumericColumn:
    values = _numbers(column)
    missing = np.isnan(values)
    values = _signed_log(values) if log else values
    median = 0.0 if missing.all() else float(np.median(values[~missing]))
    filled = np.where(missing, median, values)
    mean, scale = float(filled.mean()), float(filled.std())
    # Rounding leaves a constant column a tiny deviation, which must not blow it up.
    constant = scale <= 1e-12 * abs(mean)
    scale = 1.0 if constant else scale
    return NumericColumn(name, log, median, mean, scale, bool(missing.any()))


def _fit_categorical(
    name: str, column: pd.Series[Any], min_count: int
) -> CategoricalColumn:
    counts = _strings(column).value_counts()
    common = sorted(str(value) for value in counts[counts >= min_count].index)
    values: tuple[str | None, ...] = tuple(common)
    if int(column.isna().sum()) >= min_count:
        values = (None, *values)
    return CategoricalColumn(name, values)


def _encode(
    column: pd.Series[Any], values: tuple[str | None, ...]
) -> NDArray[np.int64]:
    known = {value: code for code, value in enumerate(values, start=1)}
    mapped = _strings(column).map(known).fillna(0)
    codes = np.array(mapped, dtype=np.int64)
    codes[column.isna().to_numpy()] = known.get(None, 0)
    return codes


def _strings(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return the present values as text; 1 and 1.0 are the same value.

    A column of whole numbers turns into floats as soon as one value is missing.
    """
    column = column.reset_index(drop=True)
    present = column[column.notna()]
    if pd.api.types.is_float_dtype(present.dtype) and (present % 1 == 0).all():
        present = present.astype(np.int64)
    return present.astype(str).reindex(column.index)
