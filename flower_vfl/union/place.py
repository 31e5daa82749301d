"""Where a party stands among aligned rows, and what stands in for those it lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError, PartyError
from ..holding import Holding
from ..randomness import derive_seed, draw_secret
from ..schedule import TRAIN
from .features import RunModel, Visit, build_feature_stand_in


class Place:
    """The aligned rows as one party sees them; all rows are its own until it is put.

    Parameters
    ----------
    features : str
        What stands in for missing features.
    secret : int | None
        What synthetic data is drawn from; None draws a secret for every alignment.
    """

    def __init__(self, features: str, secret: int | None) -> None:
        self.holding: Holding | None = None
        self.stand_in = build_feature_stand_in(features)
        self._given = secret
        self.secret = 0  # drawn when the run is agreed on
        self.local = torch.empty(0, dtype=torch.int64)
        self._pool = self.local

    def put(self, holding: Holding, own_rows: int, name: str) -> None:
        """Work on aligned rows from now on.

        Parameters
        ----------
        holding : Holding
            Which of them are own rows.
        own_rows : int
            How many rows the party has.
        name : str
            Its name, for errors.
        """
        if holding.rows and int(holding.local.max()) >= own_rows:
            raise PartyError(
                name,
                f"was placed on its row {int(holding.local.max())} and has {own_rows} "
                "rows",
                "Align the ids that it holds now",
            )
        self.holding, self.secret = holding, 0

    def split(self, codes: NDArray[np.int8] | None) -> NDArray[np.int8] | None:
        """Return a split of the own rows over the aligned rows.

        Rows that the party does not hold are for training: parties that bring a split
        agree on it only if all of them hold all validation and test rows.

        Parameters
        ----------
        codes : NDArray[np.int8] | None
            Of the own rows, if there is one.
        """
        if codes is None or self.holding is None:
            return codes
        local = self.holding.local.numpy()
        if not len(codes):
            return np.full(len(local), TRAIN, dtype=np.int8)
        return np.where(local >= 0, codes[local], TRAIN).astype(np.int8)

    def settle(self, training: Tensor, name: str, embeds: bool) -> None:
        """Draw a secret and choose what stands in for missing rows.

        A run that goes on keeps the secret: stand-ins that change would be seen.

        Parameters
        ----------
        training : Tensor
            Numbers of the training rows, where the party computes.
        name : str
            Its name.
        embeds : bool
            Whether it has features.
        """
        if self.holding is None:
            return
        self.local = self.holding.local.to(training.device)
        own = self.local[training]
        self._pool = own[own >= 0]
        if self._given is not None:
            self.secret = derive_seed(self._given, name)
        elif not self.secret:
            self.secret = draw_secret()
        if embeds:
            try:
                self.stand_in.settle(self.local, self._pool, self.secret)
            except ConfigError as error:
                remedy = "Align other ids, or hold out fewer rows"
                raise PartyError(name, str(error), remedy) from error

    def embed(
        self, rows: Tensor, at: tuple[int | str, ...], training: bool, run: RunModel
    ) -> Tensor:
        """Return one embedding for each of some rows.

        Parameters
        ----------
        rows : Tensor
            Row numbers of the run.
        at : tuple[int | str, ...]
            Which batch this is.
        training : bool
            Whether it is trained on.
        run : RunModel
            Returns the embeddings of own rows.
        """
        if self.holding is None:
            return run(rows)
        return self.stand_in.embed(Visit(rows, at, training), run)

    def state_dict(self) -> dict[str, Any]:
        """Return what stand-ins depend on; nothing where rows are not aligned."""
        if self.holding is None:
            return {}
        state = {"secret": f"{self.secret:x}", "features": self.stand_in.state_dict()}
        return {"union": state}

    def load_state_dict(self, state: dict[str, Any], embeds: bool) -> None:
        """Take over a saved state.

        Parameters
        ----------
        state : dict[str, Any]
            Of the party.
        embeds : bool
            Whether it has features.
        """
        if self.holding is None or "union" not in state:
            return
        self.secret = int(state["union"]["secret"], 16)
        if embeds:
            self.stand_in.settle(self.local, self._pool, self.secret)
            self.stand_in.load_state_dict(state["union"]["features"])
