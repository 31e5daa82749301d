"""Objectives by name, ``"gafm:delta=0.05"``, and presets of objective and defense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from flower_vfl import objectives
from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.objectives import Objective, Task
from flower_vfl.objectives.gafm import Parts
from flower_vfl.objectives.ladistill import FirstEpoch
from flower_vfl.simulations.datasets.types import InputSpec
from flower_vfl.specs import build_from_spec, parse_spec

from .config import RunConfig
from .models import build_bottom, build_top

if TYPE_CHECKING:
    from .parties import PartyRows

Settings = dict[str, Any]  # of a run, by name
_CLASSES: tuple[Task, ...] = ("binary", "multiclass")
_SQUASHED = ("gafm-spambase", "gafm-imdb")  # bottom models that end in a sigmoid


@dataclass(frozen=True)
class Setup:
    """What an objective is built from: the settings and the label party's data.

    Examples
    --------
    >>> setup = Setup(RunConfig(top="linear"), "binary", 2, joined=16, own=None)
    >>> setup.top()
    Linear(in_features=16, out_features=1, bias=True)
    """

    config: RunConfig
    task: Task
    classes: int  # 0 for a regression
    joined: int  # width of the aggregated embeddings
    own: InputSpec | None  # the label party's own features, if it has any
    center: float = 0.0  # mean of the training labels of a regression
    scale: float = 1.0  # and their standard deviation

    def top(self) -> nn.Module:
        """Return the top model that the settings name."""
        outputs = self.classes if self.task == "multiclass" else 1
        return build_top(self.config.top, self.joined, outputs)

    def teacher(self, text: str, on_embeddings: bool = False) -> nn.Module:
        """Return a teacher for the label party's features, or for the embeddings."""
        own = None if on_embeddings else self.own
        spec = own or InputSpec(numeric=self.joined)
        return build_bottom(text, spec, self.classes)


def gafm(
    setup: Setup,
    delta: float = 0.05,
    gamma: float = 1.0,
    sigma: float = 0.01,
    clip: float = 0.1,
    hidden: int = 16,
    parts: Parts = "both",
    squashed: Literal["auto", "yes", "no"] = "auto",
    balanced: bool = False,
    released: bool = False,
) -> Objective:
    """Return GAFM, which has no top model."""
    sigmoid = squashed == "yes"
    if squashed == "auto":
        name, parameters = parse_spec(setup.config.bottom)
        usual = "sigmoid" if name in _SQUASHED else "none"
        sigmoid = parameters.get("final", usual) == "sigmoid"
    given = setup.joined, setup.classes, delta, gamma, sigma, clip, hidden, parts
    return objectives.GAFM(*given, sigmoid, balanced, released)


def gafm_original(
    setup: Setup,
    gamma: float | None = None,
    sigma: float = 1.0,
    clip: float = 0.01,
    literal: bool = False,
) -> Objective:
    """Return the original GAFM, which has no top model."""
    center, scale = setup.center, setup.scale
    task: Any = setup.task  # binary or regression: see OBJECTIVES
    return objectives.GAFMOriginal(task, gamma, sigma, clip, literal, center, scale)


def distilled(
    kind: type[objectives.LADistill],
    setup: Setup,
    k: int = 2,
    eps: float = 0.3,
    teacher: str = "auto",
    first_epoch: FirstEpoch = "vanilla",
    epochs: int = 50,
    batch: int = 128,
    lr: float = 5e-3,
    balanced: bool = False,
    on_embeddings: bool = False,
) -> Objective:
    """Return LADistill or KDk."""
    made = setup.teacher(teacher, on_embeddings)
    given = setup.classes, k, eps, first_epoch, epochs, batch, lr, balanced
    return kind(setup.top(), made, *given, on_embeddings)


def dcor(setup: Setup, alpha: float = 0.1) -> Objective:
    """Return cross entropy with the distance correlation of each embedding."""
    concat = setup.config.aggregation == "concat"
    parts = setup.joined // setup.config.width if concat else 1
    return objectives.DistanceCorrelation(setup.top(), setup.classes, alpha, parts)


def mid(setup: Setup, weight: float = 0.01) -> Objective:
    """Return cross entropy behind a variational bottleneck."""
    return objectives.MID(setup.top(), setup.joined, setup.classes, weight)


def coae(setup: Setup, weight: float = 0.5) -> Objective:
    """Return cross entropy against a confusional autoencoder's labels."""
    return objectives.CoAE(setup.top(), setup.classes, weight)


# How an objective is built, and the tasks that it is for.
OBJECTIVES: dict[str, tuple[Callable[..., Objective], tuple[Task, ...]]] = {
    "cross-entropy": (lambda s: objectives.CrossEntropy(s.top(), s.classes), _CLASSES),
    "mean-squared-error": (
        lambda s: objectives.MeanSquaredError(s.top(), s.center, s.scale),
        ("regression",),
    ),
    "gafm": (gafm, _CLASSES),
    "gafm-original": (gafm_original, ("binary", "regression")),
    "ladistill": (partial(distilled, objectives.LADistill), _CLASSES),
    "kdk": (partial(distilled, objectives.KDk), _CLASSES),
    "dcor": (dcor, _CLASSES),
    "mid": (mid, _CLASSES),
    "coae": (coae, _CLASSES),
}


def objective_for(config: RunConfig, rows: PartyRows) -> Objective:
    """Return the objective of a run, with its top model."""
    task = rows.task
    if task is None:
        raise ConfigError("the label party's task is unknown; set task")
    text = config.objective
    name, _ = parse_spec(text)
    if name == "auto":
        name = "mean-squared-error" if task == "regression" else "cross-entropy"
        text = name + text.strip().removeprefix("auto")
    elif name not in OBJECTIVES:
        raise unknown_name("objective", name, ["auto", *OBJECTIVES])
    if task not in OBJECTIVES[name][1]:
        fitting = ", ".join(n for n, (_, tasks) in OBJECTIVES.items() if task in tasks)
        raise ConfigError(f"objective '{name}' is not for a {task} task; use {fitting}")
    builders = {name: build for name, (build, _) in OBJECTIVES.items()}
    return build_from_spec("objective", text, builders, _setup(config, rows, task))


def _setup(config: RunConfig, rows: PartyRows, task: Task) -> Setup:
    """Return what the objective of a run is built from."""
    spec, width = rows.data.spec, config.width
    own = 0 if spec is None else config.label_width or width
    joined = own + config.parties * width if config.aggregation == "concat" else width
    center, scale = 0.0, 1.0
    if task == "regression" and rows.labels is not None:
        training = rows.labels[rows.trained]
        center, scale = float(training.mean()), float(training.std()) or 1.0
        known = config.label_privacy()
        if known is not None and known.low is not None and known.high is not None:
            # Not from true labels: predictions would tell them.
            center = (known.low + known.high) / 2.0
            scale = (known.high - known.low) / 4.0
    return Setup(config, task, len(rows.classes), joined, spec, center, scale)


def ladsg(
    distill: bool = True,
    substitute: bool = True,
    detect: bool = True,
    k: int = 2,
    eps: float = 0.3,
    teacher: str = "auto",
    epochs: int = 10,
    first_epoch: FirstEpoch = "silent",
    balanced: bool = True,
) -> Settings:
    """Return LADSG: LADistill, SGSub and Geno, each of which is optional."""
    sgsub = "sgsub:draw=entries" if balanced else "sgsub"
    stages = [name for name, on in ((sgsub, substitute), ("geno", detect)) if on]
    objective = "auto"
    if distill:
        objective = f"ladistill:k={k},eps={eps:g},teacher={teacher},epochs={epochs}"
        if first_epoch != "vanilla":
            objective += f",first_epoch={first_epoch}"
        objective += ",balanced=true,on_embeddings=true" if balanced else ""
    return {"objective": objective, "defense": " | ".join(stages)}


def gafm_preset(
    delta: float = 0.05,
    gamma: float = 0.7,
    sigma: float = 0.01,
    width: int = 1,
    balanced: bool = True,
) -> Settings:
    """Return GAFM and its cut layer: the mean of one column, or of one per class."""
    objective = f"gafm:delta={delta:g},gamma={gamma:g},sigma={sigma:g}"
    objective += ",balanced=true" if balanced else ""
    return {"objective": objective, "width": width, "aggregation": "mean"}


PRESETS: dict[str, Callable[..., Settings]] = {"ladsg": ladsg, "gafm": gafm_preset}


def preset(text: str) -> Settings:
    """Return the settings that a preset stands for."""
    return build_from_spec("preset", text, PRESETS)
