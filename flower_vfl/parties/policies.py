"""What a node allows the server of a run, and what it does to gradients that leave."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError, at_party, check_name
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor
from flower_vfl.objectives import Objective
from flower_vfl.protocol.codecs import build_encoder
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.randomness import draw_secret
from flower_vfl.records import Measurement
from flower_vfl.transform import Defender, GradientTransform

from .schedule import Schedule

DefenseFactory = Callable[[str], GradientTransform]
Report = Literal["none", "rounded", "all"]
_DIGITS = 2  # after the point, of what leaves rounded


@dataclass(frozen=True)
class NodePolicy:
    """What a node allows, in its own config: it wins over the server's word.

    The defaults allow everything, as in a simulation. A label party that does not trust
    the server starts from :meth:`strict`. Each field is an entry of the node config,
    ``min_batch`` as ``min-batch``.

    Parameters
    ----------
    min_batch : int (default: 1)
        Least number of rows of a training batch, the last one of an epoch included.
    min_evaluation : int (default: 1)
        Least number of rows of a split that is evaluated or predicted.
    report_loss, report_metrics, report_predictions : Report (default: "all")
        Whether they leave the label party: ``"none"``, ``"rounded"`` to two digits
        after the point, or ``"all"``. Measured leakage counts as a metric.
    min_learning_rate, max_learning_rate : float (default: 0.0 and infinite)
        Limits of the learning rate that a run may set.
    max_restores : int (default: 2**31)
        How often a run may go back to a checkpoint or be configured again: each time
        shows the party another noisy gradient of the same rows. A training step that
        fails counts, too: that it fails may tell something about its labels.
    require_sealed : bool (default: False)
        Whether embeddings and gradients must travel encrypted.
    sealed_for : str (default: "")
        The only party that may be the label party of a sealed run; empty allows any
        party whose key is pinned, even one that colludes with the server.
    require_tls : bool (default: False)
        Whether this node connects to a resident grid with a certificate only.

    Examples
    --------
    >>> from flower_vfl import NodePolicy
    >>> NodePolicy.from_node({"min-batch": 64}, strict=True).report_loss
    'none'
    """

    min_batch: int = 1
    min_evaluation: int = 1
    report_loss: Report = "all"
    report_metrics: Report = "all"
    report_predictions: Report = "all"
    min_learning_rate: float = 0.0
    max_learning_rate: float = math.inf
    max_restores: int = 2**31
    require_sealed: bool = False
    sealed_for: str = ""
    require_tls: bool = False
    reports_all: bool = field(default=True, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse unknown ways to report."""
        everything = self.report_loss == self.report_metrics == "all"
        object.__setattr__(self, "reports_all", everything)
        for report in (self.report_loss, self.report_metrics, self.report_predictions):
            check_name("way to report", report, get_args(Report))

    @classmethod
    def strict(cls) -> Self:
        """Return the policy of a label party that does not trust the server."""
        return cls(
            min_batch=32,
            min_evaluation=100,
            report_loss="none",
            report_metrics="none",
            report_predictions="none",
            min_learning_rate=1e-6,
            max_learning_rate=10.0,
            max_restores=10,
        )

    @classmethod
    def from_node(cls, config: Mapping[str, object], strict: bool) -> Self:
        """Return the policy in a node config; the rest is open, or strict."""
        policy, given = cls.strict() if strict else cls(), {}
        for each in (each for each in fields(cls) if each.init):
            name = each.name.replace("_", "-")
            if name in config:
                given[each.name] = _read(name, config[name], getattr(policy, each.name))
        return replace(policy, **given)

    def check_run(self, party: str, config: TrainingConfig) -> None:
        """Refuse settings of a run that are outside of the policy."""
        rate, low = config.learning_rate, self.min_learning_rate
        if rate and not low <= rate <= self.max_learning_rate:
            name = "min-learning-rate" if rate < low else "max-learning-rate"
            raise _refused(party, f"to train with the learning rate {rate:g}", name)
        if self.require_sealed and not config.sealed:
            raise _refused(party, "to train without encryption", "require-sealed")

    def check_reader(self, party: str, label: str) -> None:
        """Refuse to encrypt for another party than the one that is named."""
        if self.sealed_for not in ("", label):
            what = f"to send what only '{label}' can read"
            raise _refused(party, what, "sealed-for")

    def needs_tls(self, party: str) -> PartyError:
        """Return the error of a session without a certificate."""
        hint = " (give the ResidentGrid a certificate)"
        return _refused(party, "something in plaintext", "require-tls", hint)

    def check_batches(self, party: str, schedule: Schedule) -> None:
        """Refuse a training batch with too few rows."""
        rows = schedule.size("train")
        size = schedule.plan.batch_size or rows
        least = _smallest(rows, size)
        if rows and least < self.min_batch:
            last = " as the last one of an epoch" if size >= self.min_batch else ""
            what = f"to train on a batch of {least} rows{last} ({rows} in all)"
            others = range(self.min_batch, rows + 1)
            fitting = (n for n in others if _smallest(rows, n) >= self.min_batch)
            nearest = min(fitting, key=lambda other: abs(other - size), default=0)
            hint = f" (a batch size of {nearest} would do)" if nearest else ""
            raise _refused(party, what, "min-batch", hint)

    def check_evaluation(self, party: str, rows: int) -> None:
        """Refuse an evaluation, or predictions, of too few rows."""
        if rows < self.min_evaluation:
            raise _refused(party, f"about {rows} rows", "min-evaluation")

    def check_restores(self, party: str, restores: int) -> None:
        """Refuse to go back, to begin again, or to go on after errors, too often."""
        if restores > self.max_restores:
            what = f"to go back, or to go on after errors, {restores} times"
            raise _refused(party, what, "max-restores")

    def measured(self, found: list[Measurement]) -> list[Measurement]:
        """Return measured leakage as it may leave."""
        if self.report_metrics == "rounded":
            return [e._replace(value=round(e.value, _DIGITS)) for e in found]
        return found if self.report_metrics == "all" else []

    def predictions(self, party: str, found: Tensor) -> Tensor:
        """Return predictions as they may leave."""
        if self.report_predictions == "none":
            raise _refused(party, "for its predictions", "report-predictions")
        if self.report_predictions == "rounded":
            return torch.round(found, decimals=_DIGITS)
        return found


def _smallest(rows: int, size: int) -> int:
    """Return the rows of the smallest batch; a single last row joins the one before."""
    if rows <= size:
        return rows
    rest = rows % size
    return rest if rest > 1 else size


def reported(values: Mapping[str, float], report: Report) -> dict[str, float]:
    """Return numbers as they may leave."""
    if report == "rounded":
        return {name: round(value, _DIGITS) for name, value in values.items()}
    return dict(values) if report == "all" else {}


def _refused(party: str, what: str, setting: str, hint: str = "") -> PartyError:
    problem = f"was asked {what}, which the policy of its node forbids ({setting})"
    remedy = f"Change the settings of the run{hint}, or {setting} in this node's config"
    return PartyError(party, problem, remedy)


def _read(name: str, value: object, example: Any) -> Any:
    """Return an entry of a node config as the type of an example."""
    kind = type(example)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}
        raise ConfigError(f"{name} must be {wanted.get(kind, 'a text')}, got '{value}'")
    return value


@dataclass
class DefensePolicy:
    """What the label party does to gradients before they leave, and what it refuses."""

    own: GradientTransform | None
    build: DefenseFactory | None

    def prepare(
        self,
        config: TrainingConfig,
        name: str,
        objective: Objective,
        trust_server: bool,
        private: bool,
    ) -> tuple[Defender, int]:
        """Return the defender of a run, and the key of all that hides labels."""
        at_strategy = config.defended == "strategy"
        if at_strategy and not trust_server and self.own is None:
            raise untrusted(name, "the raw gradients", None)
        transforms = [] if self.own is None else [self.own]
        if config.defended == "label":
            transforms.append(self._named(config.defense, name))
        leakage = Leakage.from_text(config.leakage) if config.leakage else None
        if leakage is not None:
            _check_leakage(leakage, name, at_strategy, trust_server)
        monitor, encoder = None, None  # the strategy's, if it applies the defense
        if not at_strategy:
            task = objective.task
            monitor = None if leakage is None else LeakageMonitor(leakage, task)
            encoder = build_encoder(config.compress_gradients, config.seed, "gradient")
        known = config.noise_seed if trust_server else ""
        key = int(known, 16) if known else draw_secret()
        protects = config.defended or transforms or objective.hides or private
        found = Defender(transforms, key, monitor, encoder)
        return found, key if protects else 0

    def _named(self, defense: str, name: str) -> GradientTransform:
        if self.build is None:
            problem = f"was told to apply the defense '{defense}' but cannot build it"
            remedy = "Use LabelParty(build_defense=strategies.build_defense)"
            raise PartyError(name, problem, remedy)
        with at_party(name, "Correct the defense in the strategy's settings"):
            return self.build(defense)


AT_LABEL = 'Defense(..., at="label") (defense-at="label" in the run config)'


def _check_leakage(
    leakage: Leakage, name: str, at_strategy: bool, trust_server: bool
) -> None:
    """Refuse a measurement that shows labels, or that the label party cannot make."""
    if leakage.shows_labels and not trust_server:
        problem = "measuring every layer, or embeddings with labels, shows the labels "
        problem += "to other nodes, and this node does not trust the server"
        remedy = "Measure without layers, and membership without labels"
        raise PartyError(name, problem, f"{remedy}; both are for simulations")
    if leakage.membership and at_strategy:
        problem = "cannot measure how well its synthetic labels are hidden: a defense "
        problem += "at the strategy changes its gradients after they leave"
        raise PartyError(name, problem, f"Have this node apply it: {AT_LABEL}")


def untrusted(name: str, what: str, step: int | None) -> PartyError:
    """Return the error of a label party that is asked for too much."""
    problem = f"a defense at the strategy asks for {what}, and this node does not trust"
    remedy = "Set trust-server=true in this node's config, or have this node apply the "
    remedy += f"defense itself: {AT_LABEL}"
    return PartyError(name, f"{problem} the server with them", remedy, step)
