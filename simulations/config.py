"""The settings of a run: one object for the command line, ``flwr run`` and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.strategies import PLACEMENTS
from flower_vfl.strategies.alignment import ALIGNMENTS

ConfigValue = str | int | float | bool
TRANSPORTS = ("resident", "plain")
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
_T = TypeVar("_T", str, int, float, bool)

# Headings of the help; a setting without one has no option on the command line.
DATA, FILES, MODEL, TRAIN = "Data", "Own files", "Model", "Training"
DEFENSE, ATTACK, RUN = "Defense", "Attacks", "Run"


def setting(default: _T, help: str, panel: str = "") -> _T:
    """Return a field of `RunConfig` that says what it is for."""
    return field(default=default, metadata={"help": help, "panel": panel})


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run; each field says what it is for.

    In ``flwr run`` every field is a key of ``[tool.flwr.app.config]`` with dashes for
    underscores; on the command line most are options.
    """

    dataset: str = setting(
        "breast-cancer",
        "A dataset by name, where no files are given: {datasets}.",
        DATA,
    )
    target: str = setting("", "Another target of a dataset that has several.", DATA)
    limit: int = setting(0, "Use so many rows only; 0: all.", DATA)
    data_dir: str = setting(
        "", "Folder of the dataset files, if not the usual one.", DATA
    )
    label_party: str = setting(
        "", "CSV or Parquet file of the party that holds the labels.", FILES
    )
    passive: str = setting("", "File of a passive party; once for each.", FILES)
    id_column: str = setting("id", "Column with the ids that all files share.", FILES)
    label_column: str = setting("", "The label party's label column.", FILES)
    task: str = setting(
        "", "binary, multiclass or regression; found out if not given.", FILES
    )
    alignment: str = setting(
        "none",
        "How files with different ids are aligned: psu (train on all ids, nobody "
        "learns which are shared), psi (train on those that all have) or none.",
        FILES,
    )
    group: str = setting("ristretto255", "What alignment computes in: {groups}.", FILES)
    padding: int = setting(0, "Dummy ids of each party in the alignment.", FILES)
    normalise: str = setting(
        "", "How ids are spelled before they are aligned: {normalisers}.", FILES
    )
    parties: int = setting(2, "Number of passive parties.", DATA)
    split: str = setting(
        "even",
        "How columns are divided: even, fractions=0.3,0.7, widths=10,20, "
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
        "Share of training rows that the label party lacks; simulations only.",
        DATA,
    )
    absent_features: float = setting(
        0.0, "Share that each passive party lacks; simulations only.", DATA
    )
    synthetic_labels: str = setting(
        "majority", "What stands in for missing labels: {label_stand_ins}.", TRAIN
    )
    synthetic_features: str = setting(
        "sampling", "What stands in for missing features: {feature_stand_ins}.", TRAIN
    )
    calibration: str = setting(
        "",
        "Undo what synthetic rows do to predictions: te when they are made, tr in the "
        "loss.",
        TRAIN,
    )
    bottom: str = setting(
        "auto",
        "Bottom model of every party, with parameters as in mlp:hidden=64+32: auto, "
        "{bottoms}.",
        MODEL,
    )
    top: str = setting("linear", "Top model: {tops}.", MODEL)
    width: int = setting(16, "Width of each party's cut layer.", MODEL)
    aggregation: str = setting(
        "concat",
        "How embeddings are joined: concat, sum, mean, max or product.",
        MODEL,
    )
    objective: str = setting(
        "auto",
        "What the label party optimises, as in gafm:delta=0.05: auto (by the task), "
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
        "For all parties (0.01) or by name (label=0.01,passive-1=0.001); the "
        "optimizer's own if not given.",
        TRAIN,
    )
    defense: str = setting(
        "",
        "What is done to each gradient before it leaves, with parameters as in "
        "marvell:s=4: {defenses}. 'a | b' applies two in order, '@1 none @5 iso' "
        "begins with epoch 5, 'passive-1=iso:t=9; *=iso' is by party.",
        DEFENSE,
    )
    defense_at: str = setting(
        "strategy", "Where the defense runs: strategy or label.", DEFENSE
    )
    reproducible_noise: bool = setting(
        False,
        "Whether defenses and synthetic rows are drawn from the seed. For simulations: "
        "whoever knows the seed can undo both, and every party knows it.",
    )
    attack: str = setting(
        "",
        "Attacks, also several with commas. On every gradient: {scores}. On the "
        "trained bottom model: {completions}, as in passive:labels=40,party=1,seeds=3. "
        "Who holds which rows: membership, or membership:joint=true with labels.",
        ATTACK,
    )
    leak_limit: float = setting(
        0.0, "What the leak AUC of no score attack may exceed; 0: no limit.", ATTACK
    )
    leak_action: str = setting(
        "warn",
        "What happens then: warn, stop or raise (the defense's strength).",
        ATTACK,
    )
    leak_window: int = setting(20, "Steps over which it is averaged.", ATTACK)
    leak_every: int = setting(1, "Steps between two measurements.", ATTACK)
    coalitions: str = setting(
        "",
        "Parties that attack together: passive-1+passive-2, several with commas, or "
        "all.",
        ATTACK,
    )
    leak_baseline: bool = setting(
        False, "Attack random gradients too, for comparison.", ATTACK
    )
    leak_layers: bool = setting(
        False, "Measure every layer of the bottom models; simulations only.", ATTACK
    )
    epochs: int = setting(20, "Number of epochs.", TRAIN)
    batch_size: int = setting(256, "Rows of a batch; 0: all.", TRAIN)
    seed: int = setting(0, "Decides everything that is random.", TRAIN)
    test_fraction: float = setting(
        0.2, "Share of rows for the test, where the data has no split.", DATA
    )
    valid_fraction: float = setting(0.0, "Share of rows for early stopping.", DATA)
    evaluate_every: int = setting(1, "Epochs between evaluations.", TRAIN)
    train_metrics: bool = setting(
        False, "Evaluate the training rows too, once at the end; simulations only."
    )
    patience: int = setting(
        0,
        "Stop after so many evaluations without improvement on the validation rows; "
        "0: never.",
        TRAIN,
    )
    track: str = setting(
        "",
        "Where metrics go while it runs, several with commas: {trackers}, as in "
        "tensorboard:folder=board; TensorBoard's folder is in --out if not given.",
        RUN,
    )
    device: str = setting("auto", "Where parties compute: auto, cpu, cuda, ...", RUN)
    threads: int = setting(1, "Threads of each party. Sums depend on it.", RUN)
    capture: int = setting(
        0, "Rows that are kept in --out for the pictures of 'flower-vfl report'.", RUN
    )
    watch_memory: bool = setting(
        False, "Measure the memory of all processes of the run, with psutil.", RUN
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
        "How messages travel under Flower: resident opens a session with each party "
        "that stays in memory; plain uses Flower's messages for each step.",
    )
    address: str = setting("127.0.0.1:0", "Where the server listens for sessions.")
    advertise: str = setting("", "What parties dial, if it is another address.")
    certificate: str = setting("", "The server's TLS certificate for sessions.")
    private_key: str = setting("", "Its private key.")
    root_certificate: str = setting(
        "", "Certificate that parties trust, if it is another one."
    )
    insecure: bool = setting(False, "Allow sessions without TLS beyond this machine.")
    wire_dtype: str = setting(
        "", "float16 or bfloat16 halves what travels; empty sends all digits."
    )
    silence: float = setting(
        30.0, "Seconds that a party may be out of reach before it is given up."
    )

    def __post_init__(self) -> None:
        """Refuse what no part of a run could work with."""
        least_values = {"parties": 1, "width": 1, "epochs": 1, "limit": 0, "capture": 0}
        for name, least in least_values.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        for name in ("absent_labels", "absent_features"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be from 0 to below 1")
        if self.transport not in TRANSPORTS:
            raise unknown_name("transport", self.transport, TRANSPORTS)
        if self.alignment not in ALIGNMENTS:
            raise unknown_name("alignment", self.alignment, ALIGNMENTS)
        if self.defense_at not in PLACEMENTS:
            raise unknown_name("defense-at", self.defense_at, PLACEMENTS)
        if self.passive and self.parties != len(self.passive_files()):
            raise ConfigError(
                f"{len(self.passive_files())} passive files are given for "
                f"{self.parties} passive parties"
            )
        if bool(self.label_party) != bool(self.passive):
            raise ConfigError(
                "files are needed for the label party and for every passive party"
            )
        if self.label_party and not self.label_column:
            raise ConfigError(f"which column of '{self.label_party}' is the label?")

    def passive_files(self) -> list[str]:
        """Return the files of the passive parties."""
        return [name.strip() for name in self.passive.split(",") if name.strip()]

    def to_run_config(self) -> dict[str, ConfigValue]:
        """Return the settings as Flower's run config."""
        return {key(f.name): getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_run_config(cls, config: Mapping[str, Any]) -> RunConfig:
        """Return the settings that a run config holds; what it lacks is the default."""
        known = {key(f.name): f for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in config.items():
            if name not in known:
                raise unknown_name("setting", name, known)
            field = known[name]
            kind = _TYPES[str(field.type)]
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if type(value) is not kind:
                raise ConfigError(
                    f"setting '{name}' must be a {kind.__name__}, got {value!r}"
                )
            values[field.name] = value
        return cls(**values)


def key(name: str) -> str:
    """Return a field's name as a key of Flower's run config."""
    return name.replace("_", "-")


def parse_rates(text: str) -> float | dict[str, float] | None:
    """Return the learning rates that a setting stands for."""
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
