"""The aligned rows of a party, and synthetic features for those that it lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.parties.schedule import TRAIN
from flower_vfl.randomness import derive_seed, draw_secret

from .features import AlignedBatch, RunModel, build_feature_synthesizer
from .row_index import RowIndex


class FeatureImputer:
    """Maps aligned rows to the rows of one party and imputes missing features."""

    def __init__(self, features: str, secret: int | None) -> None:
        self.row_index: RowIndex | None = None
        self._synthesizer = build_feature_synthesizer(features)
        self._given = secret
        self.secret = 0  # drawn by fit
        self.local = torch.empty(0, dtype=torch.int64)
        self._pool = self.local

    @property
    def aligned(self) -> bool:
        """Whether the run uses aligned rows instead of the party's own."""
        return self.row_index is not None

    def align_rows(self, row_index: RowIndex, own_rows: int, name: str) -> None:
        """Use aligned rows from now on."""
        if row_index.rows and int(row_index.local.max()) >= own_rows:
            raise PartyError(
                name,
                f"was aligned by its row {int(row_index.local.max())} and has only "
                f"{own_rows} rows",
                "Align the ids that it holds now",
            )
        self.row_index, self.secret = row_index, 0

    def split(self, codes: NDArray[np.int8] | None) -> NDArray[np.int8] | None:
        """Return a split of the own rows as one of the aligned rows."""
        # Missing rows are for training: parties with splits of their own agree only if
        # all of them hold all validation and test rows.
        if codes is None or self.row_index is None:
            return codes
        local = self.row_index.local.numpy()
        if not len(codes):
            return np.full(len(local), TRAIN, dtype=np.int8)
        return np.where(local >= 0, codes[local], TRAIN).astype(np.int8)

    def fit(self, training: Tensor, name: str, embeds: bool) -> None:
        """Draw a secret and fit the synthesizer to the training rows."""
        if self.row_index is None:
            return
        self.local = self.row_index.local.to(training.device)
        own = self.local[training]
        self._pool = own[own >= 0]
        if self._given is not None:
            self.secret = derive_seed(self._given, name)
        elif not self.secret:  # a run that continues keeps it, and its synthetic rows
            self.secret = draw_secret()
        if embeds:
            try:
                self._synthesizer.fit(self.local, self._pool, self.secret)
            except ConfigError as error:
                remedy = "Align other ids, or hold out fewer rows"
                raise PartyError(name, str(error), remedy) from error

    def embed(
        self, rows: Tensor, at: tuple[int | str, ...], training: bool, run: RunModel
    ) -> Tensor:
        """Return one embedding for each aligned row."""
        return self._synthesizer.embed(AlignedBatch(rows, at, training), run)

    def commit(self) -> None:
        """Update the synthesizer after a completed training step."""
        self._synthesizer.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return the secret and the synthesizer's state, empty without alignment."""
        if self.row_index is None:
            return {}
        state = {
            "secret": f"{self.secret:x}",
            "features": self._synthesizer.state_dict(),
        }
        return {"union": state}

    def load_state_dict(self, state: dict[str, Any], embeds: bool) -> None:
        """Load a saved state."""
        if self.row_index is None or "union" not in state:
            return
        self.secret = int(state["union"]["secret"], 16)
        if embeds:
            self._synthesizer.fit(self.local, self._pool, self.secret)
            self._synthesizer.load_state_dict(state["union"]["features"])
