"""Parties from the partitions of a vertical partitioner of flwr-datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError

from .prepare import prepare_table
from .types import PartyData


class VerticalPartitioner(Protocol):
    """The interface of ``flwr_datasets.partitioner.VerticalSizePartitioner``."""

    @property
    def num_partitions(self) -> int:
        """Number of partitions."""

    def load_partition(self, partition_id: int) -> Any:
        """Return a ``datasets.Dataset`` with the columns of a partition."""


def partitioned_columns(
    partitioner: VerticalPartitioner,
    codes: NDArray[np.int8],
    label_column: str,
    *,
    drop: Sequence[str] = (),
) -> list[PartyData]:
    """Prepare the partitions of a vertical partitioner, like ``vertical_split``.

    The partition with the label column becomes the label party, which comes first and
    keeps its other columns as features. The others become the passive parties, in
    order.

    Parameters
    ----------
    partitioner : VerticalPartitioner
        A ``VerticalSizePartitioner`` or ``VerticalEvenPartitioner`` of flwr-datasets
        whose ``dataset`` is set.
    codes : NDArray[np.int8]
        The split of each row.
    label_column : str
        The label; no passive party may have it.
    drop : Sequence[str] (default: ())
        Columns that are not features, such as an id.

    Examples
    --------
    >>> from flwr_datasets.partitioner import VerticalEvenPartitioner  # doctest: +SKIP
    >>> halves = VerticalEvenPartitioner(2, active_party_columns="y")  # doctest: +SKIP
    >>> parties = partitioned_columns(halves, codes, "y")  # doctest: +SKIP
    """
    frames: list[pd.DataFrame] = []
    holders: list[int] = []
    for number in range(partitioner.num_partitions):
        frame: pd.DataFrame = partitioner.load_partition(number).to_pandas()
        if frame.shape[1] and len(frame) != len(codes):
            raise ConfigError(
                f"partition {number} has {len(frame)} rows of {len(codes)}: use a "
                "vertical partitioner, which divides columns and keeps every row"
            )
        if label_column in frame.columns:
            holders.append(number)
        frames.append(frame)
    if len(holders) > 1:
        raise ConfigError(
            f"the label column '{label_column}' is in partitions {holders}, which "
            "would all know the labels; give active_party_columns to one partition"
        )
    if not holders:
        raise ConfigError(
            f"no partition has the label column '{label_column}'; name it in the "
            "partitioner's active_party_columns"
        )
    order = [*holders, *(i for i in range(len(frames)) if i not in holders)]
    left_out = [label_column, *drop]
    parts = [frames[i].drop(columns=left_out, errors="ignore") for i in order]
    for number, part in zip(order[1:], parts[1:], strict=True):
        if part.shape[1] == 0:
            raise ConfigError(f"partition {number} has no feature column")
    return [
        prepare_table(part, codes) if part.shape[1] else PartyData((), None, ())
        for part in parts
    ]
