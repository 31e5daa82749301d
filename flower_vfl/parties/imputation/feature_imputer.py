"""Where a party stands among aligned rows, and what stands in for those it lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.parties.schedule import TRAIN
from flower_vfl.randomness import derive_seed, draw_secret

from .features import RunModel, Visit, build_feature_fill
from .row_index import RowIndex


class FeatureImputer:
    """The aligned rows as one party sees them; all rows are its own until it is put."""

    def __init__(self, features: str, secret: int | None) -> None:
        self.row_index: RowIndex | None = None
        self.imputer = build_feature_fill(features)
        self._given = secret
        self.secret = 0  # drawn when the run is agreed on
        self.local = torch.empty(0, dtype=torch.int64)
        self._pool = self.local

    def put(self, row_index: RowIndex, own_rows: int, name: str) -> None:
        """Work on aligned rows from now on."""
        if row_index.rows and int(row_index.local.max()) >= own_rows:
            raise PartyError(
                name,
                f"was placed on its row {int(row_index.local.max())} and has {own_rows} "
                "rows",
                "Align the ids that it holds now",
            )
        self.row_index, self.secret = row_index, 0

    def split(self, codes: NDArray[np.int8] | None) -> NDArray[np.int8] | None:
        """Return a split of the own rows over the aligned rows.

        Rows that the party does not hold are for training: parties that bring a split
        agree on it only if all of them hold all validation and test rows.
        """
        if codes is None or self.row_index is None:
            return codes
        local = self.row_index.local.numpy()
        if not len(codes):
            return np.full(len(local), TRAIN, dtype=np.int8)
        return np.where(local >= 0, codes[local], TRAIN).astype(np.int8)

    def fit(self, training: Tensor, name: str, embeds: bool) -> None:
        """Draw a secret and choose what stands in for missing rows.

        A run that goes on keeps the secret: stand-ins that change would be seen.
        """
        if self.row_index is None:
            return
        self.local = self.row_index.local.to(training.device)
        own = self.local[training]
        self._pool = own[own >= 0]
        if self._given is not None:
            self.secret = derive_seed(self._given, name)
        elif not self.secret:
            self.secret = draw_secret()
        if embeds:
            try:
                self.imputer.fit(self.local, self._pool, self.secret)
            except ConfigError as error:
                remedy = "Align other ids, or hold out fewer rows"
                raise PartyError(name, str(error), remedy) from error

    def embed(
        self, rows: Tensor, at: tuple[int | str, ...], training: bool, run: RunModel
    ) -> Tensor:
        """Return one embedding for each of some rows."""
        if self.row_index is None:
            return run(rows)
        return self.imputer.embed(Visit(rows, at, training), run)

    def state_dict(self) -> dict[str, Any]:
        """Return what stand-ins depend on; nothing where rows are not aligned."""
        if self.row_index is None:
            return {}
        state = {"secret": f"{self.secret:x}", "features": self.imputer.state_dict()}
        return {"union": state}

    def load_state_dict(self, state: dict[str, Any], embeds: bool) -> None:
        """Take over a saved state."""
        if self.row_index is None or "union" not in state:
            return
        self.secret = int(state["union"]["secret"], 16)
        if embeds:
            self.imputer.fit(self.local, self._pool, self.secret)
            self.imputer.load_state_dict(state["union"]["features"])
