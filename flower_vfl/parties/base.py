"""What passive parties and the label party have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from logging import ERROR
from typing import Any, cast

import numpy as np
import torch
from flwr.supercore import log
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.objectives import OptimizerFactory, clear_gradients
from flower_vfl.parties.imputation.feature_imputer import FeatureImputer
from flower_vfl.parties.imputation.row_index import Imputation, RowIndex
from flower_vfl.protocol.codecs import Codec
from flower_vfl.protocol.config import PartyDescription, Role, Shape, TrainingConfig
from flower_vfl.randomness import Noise, RandomState, derive_seed
from flower_vfl.records import Measurement
from flower_vfl.rows import check_finite

from .local_updates import BatchCache, build_cache
from .schedule import Plan, Schedule, keyed_digest, plain_list, split_rows

ArrayLike = Tensor | NDArray[Any]
Features = ArrayLike | Sequence[ArrayLike]

# Fused: one kernel for all parameters takes half the time of torch's default on a CPU.
default_optimizer: OptimizerFactory = partial(torch.optim.Adam, lr=1e-3, fused=True)


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """Return a device for a name from a config."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        problem = f"the device '{name}' is not available ({reason}); use auto or cpu"
        raise ConfigError(problem) from error
    return device


def as_tensors(features: Features | None) -> tuple[Tensor, ...]:
    """Return features as a tuple of tensors, doubles as single precision."""
    if features is None:
        return ()
    many = features if isinstance(features, Sequence) else [features]
    tensors = [
        p if isinstance(p, Tensor) else torch.from_numpy(np.require(p, None, "W"))
        for p in many
    ]
    rows = [len(tensor) for tensor in tensors]
    if len(set(rows)) > 1:
        raise ConfigError(f"the parts of the features have different rows: {rows}")
    return tuple(t.float() if t.dtype == torch.float64 else t for t in tensors)


@dataclass
class LabelStep:
    """One training step: the gradients that leave, without those that were withheld."""

    gradients: dict[str, Tensor]
    loss: float
    rows: int
    metrics: dict[str, float]
    labels: Tensor
    measured: list[Measurement]
    clean: dict[str, Tensor]  # before the defense


class Party:
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
        imputation: Imputation,
    ) -> None:
        self.name = name or ""
        self.device = resolve_device(device)
        self.features = tuple(t.to(self.device) for t in as_tensors(features))
        self.model = model.to(self.device) if model is not None else None
        self.make_optimizer = optimizer
        self.ids = ids
        self.split = None if split is None else np.asarray(split)
        self.step = 0
        self.ahead = 0  # batches after it that wait for their gradients
        self.weights: dict[str, Tensor] = {}  # the model runs with, if not its own
        self._places = {} if self.model is None else _weight_places(self.model)
        self.random = RandomState(0, self.device)
        self.schedule: Schedule | None = None
        self.optimizer: Optimizer | None = None
        self.codec: Codec | None = None  # of what it receives
        self.cache: BatchCache | None = None  # of local updates
        self.imputer = FeatureImputer(imputation.features, imputation.secret)
        self._epoch = 0
        self._batches: Sequence[Tensor] = ()  # rows of that epoch's training batches

    @property
    def own_rows(self) -> int:
        """Number of samples that it holds."""
        return len(self.features[0]) if self.features else 0

    @property
    def rows(self) -> int:
        """Number of samples of the run: aligned rows where ids were aligned."""
        return self.own_rows if self.row_index is None else self.row_index.rows

    @property
    def row_index(self) -> RowIndex | None:
        """Which of the aligned rows it holds; None where all rows are its own."""
        return self.imputer.row_index

    def place(self, row_index: RowIndex) -> None:
        """Work on aligned rows, of which this party may not hold all."""
        self.imputer.align_rows(row_index, self.own_rows, self.name)
        self.schedule = None

    def describe(self, key: bytes) -> PartyDescription:
        """Return what the party says about itself before a run."""
        self.check_data()
        shape = self.probe_shape()
        ids, split = self.digests(key)
        return PartyDescription(self.name, self.role, self.rows, shape, "", ids, split)

    def configure(self, config: TrainingConfig) -> None:
        """Take over the settings of a run and get ready for step 1."""
        codes = self.imputer.split(self.split)
        if codes is None:
            fractions = config.test_fraction, config.valid_fraction
            codes = split_rows(self.rows, config.seed, *fractions)
        plan = Plan(config.seed, config.batch_size, config.evaluation_rows)
        self.schedule = Schedule(codes, plan, self.device)
        self.cache = build_cache(config)
        self._epoch = 0
        self.random = RandomState(self.training_seed(config), self.device)
        embeds = self.model is not None
        self.imputer.fit(self.schedule.rows("train"), self.name, embeds)
        self.step = 0
        self.optimizer = None
        parameters = [p for p in self.trained_parameters() if p.requires_grad]
        if parameters:
            self.optimizer = self.make_optimizer(parameters)
        groups = [group for each in self.optimizers() for group in each.param_groups]
        for group in groups if config.learning_rate else ():
            group["lr"] = config.learning_rate

    def training_seed(self, config: TrainingConfig) -> int | Noise:
        """Return what dropout and the like are drawn from."""
        return derive_seed(config.seed, "training", self.name)

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this party's own optimizer."""
        return list(self.model.parameters()) if self.model is not None else []

    def optimizers(self) -> list[Optimizer]:
        """Return every optimizer of this party."""
        return [self.optimizer] if self.optimizer is not None else []

    def descend(self, output: Tensor, gradient: Tensor) -> None:
        """Train what this party optimises on the gradient of its output."""
        if self.optimizer is not None:
            clear_gradients(self.optimizer)
        output.backward(gradient)  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training changes, as of the last completed step."""
        return {
            "role": self.role,
            "step": self.step,
            "model": self.model.state_dict() if self.model is not None else {},
            "optimizer": [o.state_dict() for o in self.optimizers()],
            "random": self.random.state_dict(),
            **({} if self.cache is None else {"cache": self.cache.state_dict()}),
            **self.imputer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if self.model is not None:
            self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers(), state["optimizer"], strict=True):
            optimizer.load_state_dict(saved)
        self.random.load_state_dict(state["random"])
        self.imputer.load_state_dict(state, embeds=self.model is not None)
        if self.cache is not None:
            self.cache.load_state_dict(state.get("cache", ()))
        self.step = state["step"]

    def configured(self) -> Schedule:
        """Return the schedule, or raise if the run has not been configured."""
        if self.schedule is None:
            problem = "was asked to work before the run was configured"
            raise PartyError(self.name, problem, "Start it with VerticalStrategy.start")
        return self.schedule

    def training_rows(self, step: int, epoch: int, index: int) -> Tensor:
        """Return the rows of the next training batch; refuse any other step."""
        if step != self.step + 1 + self.ahead:
            problem = f"has trained {self.step} steps and was asked for step {step}"
            remedy = "Restore all parties to one checkpoint"
            raise PartyError(self.name, problem, remedy, step)
        if epoch != self._epoch:
            self._batches = self.configured().training_batches(epoch)
            self._epoch = epoch
        if not 0 <= index < len(self._batches):
            count = f"which has only {len(self._batches)} batches"
            problem = f"was asked for batch {index} of epoch {epoch}, {count}"
            remedy = "Give all parties the same rows and the same batch size"
            raise PartyError(self.name, problem, remedy, step)
        # Otherwise a server could have one batch trained on again and again.
        if step != (due := (epoch - 1) * len(self._batches) + index + 1):
            asked = f"was asked for batch {index} of epoch {epoch}, which is step {due}"
            remedy = "Train on every batch once in each epoch, in order"
            raise PartyError(self.name, asked, remedy, step)
        return self._batches[index]

    def embed_rows(
        self, rows: Tensor, at: tuple[int | str, ...] = (), training: bool = False
    ) -> Tensor:
        """Return the embeddings of rows of the run, or of own rows without `at`."""
        if at and self.imputer.row_index is not None:
            synthesizer = self.imputer.synthesizer
            return synthesizer.embed(rows, at, training, self.embed_rows)
        assert self.model is not None  # only called by parties that have one
        # index_select is several times faster than part[rows].
        batch = [part.index_select(0, rows) for part in self.features]
        if self.weights:
            weights = {at: self.weights[name] for at, name in self._places.items()}
            given = self.model, weights, (*batch,)
            output = cast(Tensor, functional_call(*given, tie_weights=False))
        else:
            output = cast(Tensor, self.model(*batch))
        fits = isinstance(output, Tensor) and output.dim() > 1
        if not fits or len(output) != len(rows):
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output)
            problem = f"the bottom model returned {got} for {len(rows)} rows"
            remedy = "It must return a tensor (rows, width, ...): one row per input row"
            raise PartyError(self.name, problem, remedy, self.step + 1 + self.ahead)
        return output

    def check_data(self) -> None:
        """Refuse features, ids or splits that cannot be trained on."""
        for part in self.features:
            if part.is_floating_point():
                remedy = "Fill or drop them before the run"
                check_finite(part, self.name, "its features", remedy, None)
        for what, values in (("ids", self.ids), ("split codes", self.split)):
            if values is not None and len(values) != self.own_rows:
                problem = f"has {len(values)} {what} for {self.own_rows} rows"
                remedy = f"Give one of the {what} per row, or none at all"
                raise PartyError(self.name, problem, remedy)
        repeated = 0 if self.ids is None else len(self.ids) - len(set(self.ids))
        if repeated:
            problem = f"{repeated} of its {self.own_rows} ids are repeated"
            remedy = "Every row needs an id of its own: drop or merge the repeated rows"
            raise PartyError(self.name, problem, remedy)

    def probe_shape(self) -> Shape:
        """Return the shape of one row of the embedding, found with two rows."""
        if self.model is None or not self.own_rows:
            return ()
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad(), RandomState(0, self.device):
            rows = torch.arange(min(2, self.own_rows), device=self.device)
            try:
                shape = tuple(self.embed_rows(rows).shape[1:])
            except (RuntimeError, ValueError, IndexError) as error:
                log(ERROR, "party '%s': %s", self.name, error)
                raise self._misfit() from error
        self.model.train(was_training)
        return shape

    def _misfit(self) -> PartyError:
        """Return the error of a bottom model that does not take its features."""
        kinds = [str(part.dtype).removeprefix("torch.") for part in self.features]
        shapes = [tuple(part.shape[1:]) for part in self.features]
        listed = ", ".join(f"{k} {s}" for k, s in zip(kinds, shapes, strict=True))
        remedy = "Give the model's first layer as many inputs as there are columns"
        if "float32" not in kinds:
            scale = " / 255" if "uint8" in kinds else ""
            remedy = f'Convert the features: features.astype("float32"){scale}'
        problem = f"its bottom model does not take its features, rows of {listed}"
        return PartyError(self.name, problem, remedy)

    def digests(self, key: bytes) -> tuple[str, str]:
        """Return the digests of ids and split for the hello."""
        given = self.ids if self.row_index is None else None
        ids = () if given is None else plain_list(given)
        codes = self.imputer.split(self.split)
        split = () if codes is None else codes.tolist()
        found = [keyed_digest(each, key) if each else "" for each in (ids, split)]
        return found[0], found[1]


def _weight_places(model: nn.Module) -> dict[str, str]:
    """Return each place of a weight in a module, with the name of the weight.

    Torch would look for shared weights at every call, which takes longer than a small
    layer, and would not restore a module that has several names.
    """
    names = {weight: name for name, weight in model.named_parameters()}
    every = {"recurse": False, "remove_duplicate": False}
    return {
        f"{path}.{key}".lstrip("."): names[weight]
        for path, module in model.named_modules()
        for key, weight in module.named_parameters(**every)
    }
