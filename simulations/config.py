"""The settings of a run, shared by the command line, ``flwr run`` and results."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flower_vfl.alignment import NORMALISERS
from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.privacy import LabelPrivacy
from flower_vfl.strategies import PLACEMENTS
from flower_vfl.strategies.alignment import ALIGNMENTS

ConfigValue = str | int | float | bool
TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
OPTIONS = {"bottom": "model"}  # settings whose option has another name
PRIVACY = ("label-dp", "label-budget", "label-ledger", "canaries")  # of labels
LISTS = ("passive", "attack", "missing", "drop")  # with commas, or repeated options
_AT_LEAST_ONE = ("parties", "width", "epochs", "threads", "local_steps")
DATA, FILES = "Data", "Own files"  # panels of the help
# By setting its help text, and the panel; one without a panel has no option.
ABOUT = tomllib.loads(Path(__file__).with_name("settings.toml").read_text("utf-8"))


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run.

    In ``flwr run`` every field is a key of ``[tool.flwr.app.config]``, with dashes
    instead of underscores. On the command line most fields are options.

    Examples
    --------
    >>> config = RunConfig(dataset="digits", batch_size=64)
    >>> config.to_run_config()["batch-size"]
    64
    """

    dataset: str = "breast-cancer"
    target: str = ""
    limit: int = 0
    data_dir: str = ""
    label_party: str = ""
    passive: str = ""
    id_column: str = "id"
    label_column: str = ""
    task: str = ""
    missing: str = ""
    drop: str = ""
    alignment: str = "none"
    group: str = "ristretto255"
    padding: int = 0
    normalise: str = ""
    parties: int = 2
    split: str = "even"
    label_share: str = "0"
    absent_labels: float = 0.0
    absent_features: float = 0.0
    synthetic_labels: str = "majority"
    synthetic_features: str = "sampling"
    calibration: str = ""
    bottom: str = "auto"
    label_bottom: str = ""
    label_width: int = 0
    top: str = "linear"
    width: int = 16
    aggregation: str = "concat"
    objective: str = "auto"
    optimizer: str = "adam:lr=0.005,weight_decay=0.001"
    learning_rate: str = ""
    defense: str = ""
    defense_at: str = "strategy"
    nodes: str = ""
    label_dp: str = ""
    label_budget: str = ""
    label_ledger: str = ""
    canaries: int = 0
    sealed: bool = False
    compress_embeddings: str = ""
    compress_gradients: str = ""
    local_steps: int = 1
    reproducible_noise: bool = False
    attack: str = ""
    leak_limit: float = 0.0
    leak_action: str = "warn"
    leak_window: int = 20
    leak_every: int = 1
    coalitions: str = ""
    leak_baseline: bool = False
    leak_layers: bool = False
    epochs: int = 20
    batch_size: int = 256
    pipeline: int = 0
    seed: int = 0
    split_seed: int = -1
    test_fraction: float = 0.2
    valid_fraction: float = 0.0
    evaluate_every: int = 1
    train_metrics: bool = False
    patience: int = 0
    track: str = ""
    device: str = "auto"
    threads: int = 1
    capture: int = 0
    watch_memory: bool = False
    checkpoint_every: int = 0
    resume: bool = False
    state_dir: str = ""
    out: str = ""
    timeout: float = 600.0
    transport: str = "resident"
    address: str = "127.0.0.1:0"
    advertise: str = ""
    certificate: str = ""
    private_key: str = ""
    root_certificate: str = ""
    insecure: bool = False
    silence: float = 30.0

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        least_values = dict.fromkeys(_AT_LEAST_ONE, 1)
        least_values |= {"limit": 10 if self.limit else 0, "capture": 0, "seed": 0}
        for name, least in least_values.items():
            value = getattr(self, name)
            require(value >= least, name, f"at least {least}", value)
        for name in ("absent_labels", "absent_features"):
            value = getattr(self, name)
            require(0.0 <= value < 1.0, name, "from 0 to below 1", value)
        choices = {"transport": ("resident", "plain"), "alignment": ALIGNMENTS}
        choices |= {"defense_at": PLACEMENTS}
        choices |= {"normalise": tuple(NORMALISERS)} if self.normalise else {}
        for name, known in choices.items():
            check_name(key(name), getattr(self, name), known)
        files = len(self.passive_files())
        if self.passive and self.parties != files:
            text = f"parties is {self.parties}, but the number of passive files is"
            raise ConfigError(f"{text} {files}")
        if bool(self.label_party) != bool(self.passive):
            raise ConfigError("give a file for the label party and every passive party")
        if self.label_party and not self.label_column:
            raise ConfigError(f"set label-column: the label of '{self.label_party}'")
        self.label_privacy()  # refuses what cannot be meant
        if self.split_seed >= 0 and self.alignment != "none":
            raise ConfigError("split-seed is for runs without an alignment of ids")

    def label_privacy(self) -> LabelPrivacy | None:
        """Return how labels are randomised, None if they are not."""
        if not (self.label_dp or self.label_budget or self.canaries):
            return None
        given = {"budget": self.label_budget, "ledger": self.label_ledger}
        given |= {"canaries": str(self.canaries or "")}
        texts = [f"{name}={value}" for name, value in given.items() if value]
        return LabelPrivacy.from_text(",".join(filter(None, [self.label_dp, *texts])))

    def passive_files(self) -> list[str]:
        """Return the files of the passive parties."""
        return parts(self.passive)

    def to_run_config(self) -> dict[str, ConfigValue]:
        """Return the settings as Flower's run config."""
        return {key(f.name): getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_run_config(cls, config: Mapping[str, Any]) -> RunConfig:
        """Return the settings of a run config, with defaults for missing keys."""
        known = {key(f.name): f for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in config.items():
            check_name("setting", name, known)
            kind = TYPES[str(known[name].type)]
            value = float(value) if kind is float and type(value) is int else value
            wanted = f"a {kind.__name__}"
            require(type(value) is kind, f"setting '{name}'", wanted, repr(value))
            values[known[name].name] = value
        return cls(**values)


def parts(text: str) -> list[str]:
    """Return the parts of comma-separated text."""
    return [part.strip() for part in text.split(",") if part.strip()]


def key(name: str) -> str:
    """Return the run-config key of a field."""
    return name.replace("_", "-")


def parse_rates(text: str) -> float | dict[str, float] | None:
    """Return the learning rates that a setting describes."""
    if not text:
        return None
    try:
        if "=" not in text:
            return _rate(text)
        pairs = (part.split("=") for part in text.split(","))
        return {name.strip(): _rate(rate) for name, rate in pairs}
    except ValueError as error:
        remedy = "write 0.01 or label=0.01,passive-1=0.001"
        raise ConfigError(f"'{text}' is not a learning rate; {remedy}") from error


def _rate(text: str) -> float:
    rate = float(text)
    if not 0.0 < rate < math.inf:
        raise ValueError(text)
    return rate
