"""The settings of a run, shared by the command line, ``flwr run`` and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from flower_vfl.alignment import NORMALISERS
from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.strategies import PLACEMENTS
from flower_vfl.strategies.alignment import ALIGNMENTS

ConfigValue = str | int | float | bool
TRANSPORTS = ("resident", "plain")
TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
OPTIONS = {"bottom": "model"}  # settings whose option has another name
# comma-separated text, repeatable options
LISTS = ("passive", "attack", "missing", "drop")
_T = TypeVar("_T", str, int, float, bool)

# Panels of the help; a setting without a panel has no option on the command line.
DATA, FILES, MODEL, TRAIN = "Data", "Own files", "Model", "Training"
DEFENSE, ATTACK, RUN = "Defense", "Attacks", "Run"


def setting(default: _T, help: str, panel: str = "") -> _T:
    """Return a field of `RunConfig` with its help text."""
    return field(default=default, metadata={"help": help, "panel": panel})


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

    dataset: str = setting(
        "breast-cancer",
        "Dataset to use if no files are given: {datasets}.",
        DATA,
    )
    target: str = setting("", "Target of a dataset that has several.", DATA)
    limit: int = setting(0, "Maximum number of rows; 0: all.", DATA)
    data_dir: str = setting(
        "", "Folder of the dataset files, if not the default one.", DATA
    )
    label_party: str = setting(
        "", "CSV or Parquet file of the party that holds the labels.", FILES
    )
    passive: str = setting("", "File of a passive party; repeatable.", FILES)
    id_column: str = setting("id", "Column with the ids that all files share.", FILES)
    label_column: str = setting("", "Label column in the label party's file.", FILES)
    task: str = setting(
        "", "binary, multiclass or regression; inferred if not given.", FILES
    )
    missing: str = setting(
        "", "Text that stands for a missing value in a CSV file; repeatable.", FILES
    )
    drop: str = setting("", "Column to leave out; repeatable.", FILES)
    alignment: str = setting(
        "none",
        "How to align files with different ids: psu (train on the union; no party "
        "learns which ids are shared), psi (train on the intersection) or none.",
        FILES,
    )
    group: str = setting("ristretto255", "Group of the alignment: {groups}.", FILES)
    padding: int = setting(0, "Dummy ids that each party adds to the alignment.", FILES)
    normalise: str = setting(
        "", "How to normalise ids before the alignment: {normalisers}.", FILES
    )
    parties: int = setting(2, "Number of passive parties.", DATA)
    split: str = setting(
        "even",
        "How to divide columns: even, fractions=0.3,0.7, widths=10,20, "
        "dirichlet=0.5 or columns=age+income|height.",
        DATA,
    )
    label_share: str = setting(
        "0",
        "Columns that the label party keeps: a fraction, or names joined by +.",
        DATA,
    )
    absent_labels: float = setting(
        0.0,
        "Fraction of training rows without labels; simulations only.",
        DATA,
    )
    absent_features: float = setting(
        0.0,
        "Fraction of training rows that each passive party lacks; simulations only.",
        DATA,
    )
    synthetic_labels: str = setting(
        "majority", "Imputation of missing labels: {label_imputers}.", TRAIN
    )
    synthetic_features: str = setting(
        "sampling", "Imputation of missing features: {feature_imputers}.", TRAIN
    )
    calibration: str = setting(
        "",
        "Calibrate predictions for synthetic rows: te at prediction, tr in the loss.",
        TRAIN,
    )
    bottom: str = setting(
        "auto",
        "Bottom model of every party, e.g. mlp:hidden=64+32: auto, {bottoms}.",
        MODEL,
    )
    top: str = setting("linear", "Top model: {tops}.", MODEL)
    width: int = setting(16, "Width of each party's cut layer.", MODEL)
    aggregation: str = setting(
        "concat",
        "How to aggregate embeddings: concat, sum, mean, max or product.",
        MODEL,
    )
    objective: str = setting(
        "auto",
        "Objective of the label party, e.g. gafm:delta=0.05: auto (by the task), "
        "{objectives}.",
        MODEL,
    )
    optimizer: str = setting(
        "adam:lr=0.005,weight_decay=0.001",
        "Optimizer of every party: {optimizers}.",
        TRAIN,
    )
    learning_rate: str = setting(
        "",
        "Learning rate of all parties (0.01) or by name (label=0.01,passive-1=0.001); "
        "the optimizer's if not given.",
        TRAIN,
    )
    defense: str = setting(
        "",
        "Gradient transform applied before a gradient leaves the label party, e.g. "
        "marvell:s=4: {defenses}. 'a | b' applies two in order, '@1 none @5 iso' "
        "starts at epoch 5, 'passive-1=iso:t=9; *=iso' chooses by party.",
        DEFENSE,
    )
    defense_at: str = setting(
        "strategy", "Where the defense runs: strategy or label.", DEFENSE
    )
    nodes: str = setting(
        "",
        "A TOML file at the server that binds names and roles to registered nodes: "
        'bank = "label KEY", one line per party.',
        DEFENSE,
    )
    sealed: bool = setting(
        False,
        "Encrypt embeddings and gradients between the parties, so that the server "
        "cannot read them. A defense then runs at the label party; in a deployment the "
        "parties pin each other's keys.",
        DEFENSE,
    )
    reproducible_noise: bool = setting(
        False,
        "Draw the noise of defenses and synthetic rows from the seed. For simulations "
        "only: every party knows the seed and could remove the noise.",
    )
    attack: str = setting(
        "",
        "Attacks, separated by commas. On every gradient: {scores}. On the trained "
        "bottom model: {completions}, e.g. passive:labels=40,party=1,seeds=3. On which "
        "rows a party holds: membership, or membership:joint=true with labels.",
        ATTACK,
    )
    leak_limit: float = setting(
        0.0, "Maximum leak AUC allowed for any score attack; 0: no limit.", ATTACK
    )
    leak_action: str = setting(
        "warn",
        "What to do above the limit: warn, stop or raise (the defense's strength).",
        ATTACK,
    )
    leak_window: int = setting(20, "Steps that the leak AUC is averaged over.", ATTACK)
    leak_every: int = setting(1, "Steps between two leak measurements.", ATTACK)
    coalitions: str = setting(
        "",
        "Parties that attack together, e.g. passive-1+passive-2; several separated by "
        "commas, or all.",
        ATTACK,
    )
    leak_baseline: bool = setting(
        False, "Also attack random gradients, for comparison.", ATTACK
    )
    leak_layers: bool = setting(
        False, "Measure every layer of the bottom models; simulations only.", ATTACK
    )
    epochs: int = setting(20, "Number of epochs.", TRAIN)
    batch_size: int = setting(256, "Rows per batch; 0: all.", TRAIN)
    seed: int = setting(0, "Seed of the run.", TRAIN)
    test_fraction: float = setting(
        0.2, "Fraction of test rows, if the data has no test set.", DATA
    )
    valid_fraction: float = setting(0.0, "Fraction of validation rows.", DATA)
    evaluate_every: int = setting(1, "Epochs between evaluations.", TRAIN)
    train_metrics: bool = setting(
        False, "Also evaluate the training rows at the end; simulations only."
    )
    patience: int = setting(
        0,
        "Evaluations without improvement on the validation rows before stopping; 0: "
        "never stop early.",
        TRAIN,
    )
    track: str = setting(
        "",
        "Experiment trackers, separated by commas: {trackers}, e.g. "
        "tensorboard:folder=board; TensorBoard writes into --out by default.",
        RUN,
    )
    device: str = setting("auto", "Device of the parties: auto, cpu, cuda, ...", RUN)
    threads: int = setting(
        1, "Threads per party; slightly changes floating-point results.", RUN
    )
    capture: int = setting(
        0, "Rows to save in --out for the pictures of 'flower-vfl report'.", RUN
    )
    watch_memory: bool = setting(
        False, "Measure the memory of all processes of the run (needs psutil).", RUN
    )
    checkpoint_every: int = setting(0, "Steps between checkpoints; 0: none.", TRAIN)
    resume: bool = setting(
        False, "Continue from the newest checkpoint that every party has."
    )
    state_dir: str = setting("", "Folder for the parties' checkpoints.")
    out: str = setting("", "Folder for the results.")
    timeout: float = setting(600.0, "Seconds to wait for a party.")
    transport: str = setting(
        "resident",
        "Transport under Flower: resident keeps each party in memory with an open "
        "session; plain sends Flower messages for each step.",
    )
    address: str = setting("127.0.0.1:0", "Address that the server listens on.")
    advertise: str = setting("", "Address that parties connect to, if different.")
    certificate: str = setting("", "TLS certificate of the server for sessions.")
    private_key: str = setting("", "Private key of the certificate.")
    root_certificate: str = setting("", "Certificate that parties trust, if different.")
    insecure: bool = setting(False, "Allow sessions with other machines without TLS.")
    wire_dtype: str = setting(
        "", "float16 or bfloat16 halves the traffic; empty keeps float32."
    )
    silence: float = setting(
        30.0, "Seconds without contact before a party is considered lost."
    )

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        least_values = {"parties": 1, "width": 1, "epochs": 1, "threads": 1}
        least_values |= {"limit": 10 if self.limit else 0, "capture": 0}
        for name, least in least_values.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        for name in ("absent_labels", "absent_features"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be from 0 to below 1")
        choices = {"transport": TRANSPORTS, "alignment": ALIGNMENTS}
        choices |= {"defense_at": PLACEMENTS}
        choices |= {"normalise": tuple(NORMALISERS)} if self.normalise else {}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise unknown_name(key(name), getattr(self, name), known)
        if self.passive and self.parties != len(self.passive_files()):
            raise ConfigError(
                f"{len(self.passive_files())} passive files are given for "
                f"{self.parties} passive parties"
            )
        if bool(self.label_party) != bool(self.passive):
            raise ConfigError(
                "give a file for the label party and for every passive party"
            )
        if self.label_party and not self.label_column:
            raise ConfigError(f"set label-column: the label of '{self.label_party}'")
        if self.sealed and self.wire_dtype:
            raise ConfigError("wire-dtype cannot round what is sealed; set one of them")

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
            if name not in known:
                raise unknown_name("setting", name, known)
            field = known[name]
            kind = TYPES[str(field.type)]
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if type(value) is not kind:
                raise ConfigError(
                    f"setting '{name}' must be a {kind.__name__}, got {value!r}"
                )
            values[field.name] = value
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
            return float(text)
        pairs = (part.split("=") for part in text.split(","))
        return {name.strip(): float(rate) for name, rate in pairs}
    except ValueError as error:
        raise ConfigError(
            f"'{text}' is not a learning rate; write 0.01 or label=0.01,passive-1=0.001"
        ) from error
