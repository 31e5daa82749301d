"""What passive parties and the label party have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.objectives import OptimizerFactory, clear_gradients
from flower_vfl.parties.imputation.feature_imputer import FeatureImputer
from flower_vfl.parties.imputation.row_index import RowIndex
from flower_vfl.protocol.config import PartyDescription, Role, Shape, TrainingConfig
from flower_vfl.randomness import RandomState, derive_seed

from .device import resolve_device
from .digests import keyed_digest, plain_list
from .schedule import Plan, Schedule, split_rows

ArrayLike = Tensor | NDArray[Any]
Features = ArrayLike | Sequence[ArrayLike]

default_optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3)


def party_seed(seed: int, name: str) -> int:
    """Return the seed of a party's random state (dropout and the like)."""
    return derive_seed(seed, "training", name)


def as_tensors(features: Features | None) -> tuple[Tensor, ...]:
    """Return features as a tuple of tensors, doubles as single precision."""
    if features is None:
        return ()
    many = features if isinstance(features, Sequence) else [features]
    tensors = tuple(
        part
        if isinstance(part, Tensor)
        else torch.from_numpy(np.require(part, requirements="W"))
        for part in many
    )
    if len({len(tensor) for tensor in tensors}) > 1:
        rows = [len(tensor) for tensor in tensors]
        raise ConfigError(f"the parts of the features have different rows: {rows}")
    return tuple(t.float() if t.dtype == torch.float64 else t for t in tensors)


def check_finite(
    tensor: Tensor, party: str, what: str, remedy: str, step: int | None
) -> None:
    """Raise if a tensor holds a NaN or an infinite entry."""
    # A sum is several times cheaper than looking at each entry, and finite if all
    # are; only a sum that overflowed needs the second look.
    if math.isfinite(tensor.sum().item()):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        problem = f"{what} has {bad} NaN or infinite of {tensor.numel()} entries"
        raise PartyError(party, problem, remedy, step)


class Party(ABC):
    """A participant with rows, perhaps features and a bottom model, and a device."""

    role: Role

    def __init__(
        self,
        features: Features | None,
        model: nn.Module | None,
        optimizer: OptimizerFactory,
        name: str | None,
        ids: Sequence[object] | NDArray[Any] | None,
        split: NDArray[np.int8] | None,
        device: str | torch.device,
        synthetic_features: str = "sampling",
        secret: int | None = None,
    ) -> None:
        self.name = name or ""
        self.device = resolve_device(device)
        self.features = tuple(t.to(self.device) for t in as_tensors(features))
        self.model = model.to(self.device) if model is not None else None
        self.make_optimizer = optimizer
        self.ids = ids
        self.split = None if split is None else np.asarray(split)
        self.step = 0
        self.random = RandomState(0, self.device)
        self.schedule: Schedule | None = None
        self.optimizer: Optimizer | None = None
        self.union = FeatureImputer(synthetic_features, secret)

    @property
    @abstractmethod
    def own_rows(self) -> int:
        """Number of samples that it holds."""

    @property
    def rows(self) -> int:
        """Number of samples of the run: aligned rows where ids were aligned."""
        return self.own_rows if self.row_index is None else self.row_index.rows

    @property
    def row_index(self) -> RowIndex | None:
        """Which of the aligned rows it holds; None where all rows are its own."""
        return self.union.row_index

    def place(self, row_index: RowIndex) -> None:
        """Work on aligned rows, of which this party may not hold all.

        Called before :meth:`configure`. Synthetic data stands in for what it does not hold.
        """
        self.union.put(row_index, self.own_rows, self.name)
        self.schedule = None

    @abstractmethod
    def describe(self, key: bytes) -> PartyDescription:
        """Return what the hello reports."""

    def configure(self, terms: TrainingConfig) -> None:
        """Take over the terms of the run and get ready for step 1."""
        codes = self.union.split(self.split)
        if codes is None:
            codes = split_rows(
                self.rows, terms.seed, terms.test_fraction, terms.valid_fraction
            )
        plan = Plan(terms.seed, terms.batch_size, terms.evaluation_rows)
        self.schedule = Schedule(codes, plan, self.device)
        self.random = RandomState(party_seed(terms.seed, self.name), self.device)
        embeds = self.model is not None
        self.union.fit(self.schedule.rows("train"), self.name, embeds)
        self.step = 0
        self.optimizer = None
        parameters = [p for p in self.trained_parameters() if p.requires_grad]
        if parameters:
            self.optimizer = self.make_optimizer(parameters)
        self.set_learning_rate(terms.learning_rate)

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this party's own optimizer."""
        return list(self.model.parameters()) if self.model is not None else []

    def optimizers(self) -> list[Optimizer]:
        """Return every optimizer of this party."""
        return [self.optimizer] if self.optimizer is not None else []

    def descend(self, output: Tensor, gradient: Tensor) -> None:
        """Train the own parameters on the gradient of an output that they made."""
        if self.optimizer is not None:
            clear_gradients(self.optimizer)
        output.backward(gradient)  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of every optimizer; 0 leaves them alone."""
        if rate:
            for optimizer in self.optimizers():
                for group in optimizer.param_groups:
                    group["lr"] = rate

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return everything that training changes, as of the last completed step."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""

    def agreed(self) -> Schedule:
        """Return the schedule, or raise if the run has not been agreed on."""
        if self.schedule is None:
            raise PartyError(
                self.name,
                "was asked to work before the run's terms were agreed on",
                "Start the run with VerticalStrategy.start, which does so first",
            )
        return self.schedule

    def embed_rows(
        self, rows: Tensor, at: tuple[int | str, ...], training: bool
    ) -> Tensor:
        """Return the embeddings of some rows of the run."""
        return self.union.embed(rows, at, training, self.run_model)

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the features of some of its own rows."""
        # The same as part[rows], several times faster.
        return tuple(part.index_select(0, rows) for part in self.features)

    def run_model(self, rows: Tensor) -> Tensor:
        """Return the bottom model's output for some of its own rows."""
        assert self.model is not None  # only called by parties that have one
        output = cast(Tensor, self.model(*self.take(rows)))
        fits = isinstance(output, Tensor) and output.dim() > 1
        if not fits or len(output) != len(rows):
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output)
            raise PartyError(
                self.name,
                f"the bottom model returned {got} for {len(rows)} rows",
                "It must return one tensor, (rows, width) or more dimensions, with one "
                "row per input row",
                self.step + 1,
            )
        return output

    def check_data(self) -> None:
        """Refuse features, ids or splits that cannot be trained on."""
        for part in self.features:
            if part.is_floating_point():
                remedy = "Fill or drop them before the run"
                check_finite(part, self.name, "its features", remedy, None)
        for what, values in (("ids", self.ids), ("split codes", self.split)):
            if values is not None and len(values) != self.own_rows:
                raise PartyError(
                    self.name,
                    f"has {len(values)} {what} for {self.own_rows} rows",
                    f"Give one of the {what} per row, or none at all",
                )
        if self.ids is not None:
            repeated = len(self.ids) - len(set(self.ids))
            if repeated:
                raise PartyError(
                    self.name,
                    f"{repeated} of its {len(self.ids)} ids are repeated",
                    "Every row needs an id of its own: drop or merge the repeated rows",
                )

    def probe_shape(self) -> Shape:
        """Return the shape of one row of the embedding, found with two rows."""
        if self.model is None or not self.own_rows:
            return ()
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad(), RandomState(0, self.device):
            rows = torch.arange(min(2, self.own_rows), device=self.device)
            shape = tuple(self.run_model(rows).shape[1:])
        self.model.train(was_training)
        return shape

    def digests(self, key: bytes) -> tuple[str, str]:
        """Return the digests of ids and split for the hello.

        Aligned rows have no common ids, so that there is no digest of them.
        """
        given = self.ids if self.row_index is None else None
        ids = () if given is None else plain_list(given)
        codes = self.union.split(self.split)
        split = () if codes is None else codes.tolist()
        return (
            keyed_digest(ids, key) if ids else "",
            keyed_digest(split, key) if split else "",
        )
