"""Tables: impute, scale and encode columns with scikit-learn."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.parties.schedule import TRAIN

from .types import InputSpec, PartyData

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline


@dataclass(frozen=True)
class TableFit:
    """What :func:`prepare_table` learned from the training rows."""

    numeric: tuple[str, ...] = ()
    medians: tuple[float, ...] = ()
    means: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    log: tuple[str, ...] = ()  # columns on the scale sign(x) log(1 + |x|)
    incomplete: tuple[str, ...] = ()  # each gets a 0/1 indicator column
    # By column the values in the order of their codes from 1; None is a missing value.
    categories: dict[str, tuple[str | None, ...]] | None = None

    @property
    def numeric_names(self) -> tuple[str, ...]:
        """Name of each column of the numeric tensor; indicators come last."""
        return (*self.numeric, *(f"{name} (missing)" for name in self.incomplete))

    @property
    def spec(self) -> InputSpec:
        """The shape of what :meth:`apply` returns."""
        sizes = tuple(len(values) + 1 for values in (self.categories or {}).values())
        return InputSpec(numeric=len(self.numeric_names), cardinalities=sizes)

    def apply(self, frame: pd.DataFrame) -> tuple[Tensor, ...]:
        """Prepare rows, old or new, as the training rows were."""
        frame, categories = _named(frame), self.categories or {}
        absent = [name for name in (*self.numeric, *categories) if name not in frame]
        if absent:
            text = f"columns {absent} are missing from the table"
            raise ConfigError(f"{text}; it has {list(frame.columns)}")
        inputs: list[Tensor] = []
        if self.numeric:
            numbers = _numbers(frame[list(self.numeric)], self.log)
            missing = np.isnan(numbers)[:, np.isin(self.numeric, self.incomplete)]
            scaled = self._pipeline().transform(numbers).astype(np.float32)
            inputs.append(torch.from_numpy(np.hstack([scaled, missing], dtype="f4")))
        if categories:
            inputs.append(torch.from_numpy(_encode(frame, categories)))
        return tuple(inputs)

    def _pipeline(self) -> Pipeline:
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        # The median of one row is that row.
        imputer = SimpleImputer(strategy="median", keep_empty_features=True)
        imputer.fit(np.array([self.medians]))
        scaler = StandardScaler()
        scaler.mean_, scaler.scale_ = np.array(self.means), np.array(self.scales)
        return make_pipeline(imputer, scaler)

    def state_dict(self) -> dict[str, Any]:
        """Return the fit as lists and numbers that JSON can store."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TableFit:
        """Return the fit that :meth:`state_dict` described."""
        values = state["categories"] or {}
        fields: Any = {name: tuple(known or ()) for name, known in state.items()}
        fields["categories"] = {name: tuple(known) for name, known in values.items()}
        return cls(**fields)


def prepare_table(
    frame: pd.DataFrame, codes: NDArray[np.int8], log_columns: Collection[str] = ()
) -> PartyData:
    """Prepare one party's table, with statistics of its own training rows only.

    Numbers become ``float32``: the median for missing and infinite values, then
    standardised; a column with missing training values gets a 0/1 indicator after all
    numbers. Others become ``int64`` codes: a missing value has its own, new values and
    those of one training row share code 0.
    """
    if len(frame) != len(codes):
        text = f"the table has {len(frame)} rows but the split has {len(codes)}"
        raise ConfigError(text)
    if frame.shape[1] == 0:
        raise ConfigError("the table has no columns to prepare")
    frame = _named(frame)
    train = frame.loc[codes == TRAIN]
    if train.empty:
        raise ConfigError("the split has no training rows to learn from")
    names = frame.columns
    numeric = [name for name in names if _is_numeric(train[name])]
    values = {name: _common(train[name]) for name in names if name not in numeric}
    log = tuple(name for name in numeric if name in log_columns)
    fit = TableFit(categories=values)
    if numeric:
        from sklearn.impute import SimpleImputer
        from sklearn.preprocessing import StandardScaler

        numbers = _numbers(train[numeric], log)
        imputer = SimpleImputer(strategy="median", keep_empty_features=True)
        scaler = StandardScaler().fit(imputer.fit_transform(numbers))
        incomplete = np.array(numeric)[np.isnan(numbers).any(axis=0)]
        statistics = (imputer.statistics_, scaler.mean_, scaler.scale_)
        medians, means, scales = (tuple(map(float, found)) for found in statistics)
        missing = tuple(map(str, incomplete))
        fit = TableFit(tuple(numeric), medians, means, scales, log, missing, values)
    return PartyData(fit.apply(frame), fit.spec, tuple(names), fit)


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table with its column names as text; refuse duplicates."""
    named = frame.set_axis([str(name) for name in frame.columns], axis="columns")
    twice = sorted(set(named.columns[named.columns.duplicated()]))
    if twice:
        raise ConfigError(f"the table has more than one column called {twice}")
    return named


def _is_numeric(column: pd.Series[Any]) -> bool:
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        remedy = "turn them into a number, for example days since a fixed date"
        raise ConfigError(f"column '{column.name}' holds dates; {remedy}")
    return bool(pd.api.types.is_numeric_dtype(column.dtype))


def _numbers(frame: pd.DataFrame, log: Collection[str]) -> NDArray[np.float64]:
    """Return finite numbers and NaN, with the log columns transformed."""
    for name in frame:
        if not pd.api.types.is_numeric_dtype(frame[name].dtype):
            wrong = frame[name][pd.to_numeric(frame[name], errors="coerce").isna()]
            text = f"column '{name}' was numeric in training"
            found = [*wrong.dropna(), frame[name].dtype][0]
            raise ConfigError(f"{text}, but now holds '{found}'")
    values = frame.to_numpy(dtype=np.float64, na_value=np.nan)
    values = np.where(np.isinf(values), np.nan, values)
    tailed = frame.columns.isin(list(log))
    values[:, tailed] = np.sign(values[:, tailed]) * np.log1p(np.abs(values[:, tailed]))
    return values


def _common(column: pd.Series[Any]) -> tuple[str | None, ...]:
    """Return the values of two or more training rows: missing first, then as text."""
    counts = _text(column).value_counts()
    common = sorted(str(value) for value in counts[counts > 1].index)
    return (None, *common) if column.isna().sum() > 1 else tuple(common)


def _encode(
    frame: pd.DataFrame, categories: Mapping[str, tuple[str | None, ...]]
) -> NDArray[np.int64]:
    """Return the code of each value; 0 for a value without one."""
    codes = np.zeros((len(frame), len(categories)), dtype=np.int64)
    known = [bool(values) for values in categories.values()]  # the encoder needs one
    texts = {name: _text(frame[name]) for name, values in categories.items() if values}
    if texts:
        from sklearn.preprocessing import OrdinalEncoder

        encoder = OrdinalEncoder(
            categories=[list(categories[name]) for name in texts],
            handle_unknown="use_encoded_value",
            unknown_value=-1,
            dtype=np.int64,
        )
        codes[:, known] = encoder.fit_transform(pd.DataFrame(texts).to_numpy()) + 1
    return codes


def _text(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return values as text and missing ones as None; 1 and 1.0 are the same value."""
    column = column.reset_index(drop=True)
    present = column[column.notna()]
    if pd.api.types.is_float_dtype(present.dtype) and (present % 1 == 0).all():
        present = present.astype(np.int64)
    text = present.astype(str).astype(object).reindex(column.index)
    return text.where(column.notna(), None)
