"""The settings of a run: one object for the command line, ``flwr run`` and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.strategies import PLACEMENTS

ConfigValue = str | int | float | bool
TRANSPORTS = ("resident", "plain")
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run.

    In ``flwr run`` every field is a key of ``[tool.flwr.app.config]`` with dashes for
    underscores.

    Parameters
    ----------
    dataset : str (default: "breast-cancer")
        Name of a dataset; ignored where files are given.
    target : str (default: "")
        Another target of a dataset that has several.
    limit : int (default: 0)
        Use so many rows only; 0 for all.
    data_dir : str (default: "")
        Folder of the dataset files; empty looks in the usual places.
    label_party, passive : str (default: "")
        Files of the label party and, separated by commas, of the passive parties.
    id_column, label_column : str (default: "id", "")
        Columns of those files.
    task : str (default: "")
        ``"binary"``, ``"multiclass"`` or ``"regression"``; empty infers it from the
        labels of a file.
    parties : int (default: 2)
        Number of passive parties.
    split : str (default: "even")
        How columns are divided: ``"even"``, ``"fractions=0.3,0.7"``,
        ``"widths=10,20"`` or ``"columns=age+income|height"``.
    label_share : str (default: "0")
        Fraction or names of the columns that the label party keeps.
    bottom, top : str (default: "auto", "linear")
        Models by name, with parameters: ``"mlp:hidden=64+32"``.
    width : int (default: 16)
        Width of the cut layer of each party.
    aggregation : str (default: "concat")
        How embeddings are joined.
    objective : str (default: "auto")
        What the label party optimises; ``"auto"`` takes the one of the task.
    optimizer : str (default: "adam:lr=0.005,weight_decay=0.001")
        Optimizer of every party.
    learning_rate : str (default: "")
        One number for all parties, or ``"label=0.01,passive-1=0.001"``; empty leaves it
        to the optimizer.
    defense : str (default: "")
        What is done to every gradient before it leaves, e.g. ``"marvell:s=4"``; see
        :mod:`flower_vfl.strategies.defenses` for several, by party or by epoch.
    defense_at : str (default: "strategy")
        Where: ``"strategy"``, or ``"label"`` for the label party's own node.
    reproducible_noise : bool (default: False)
        Whether a defense draws its noise from ``seed``. For simulations: whoever knows
        the seed can subtract the noise, and every party knows it.
    attack : str (default: "")
        Attacks by name, separated by commas: scores on every gradient that leaves, as
        in ``"norm,cosine,mean:hard=true"``, and model completion at the end, as in
        ``"passive:labels=40"``.
    leak_limit : float (default: 0.0)
        What the leak AUC of no score attack may exceed; 0 is no limit.
    leak_action : str (default: "warn")
        What happens then: ``"warn"``, ``"stop"`` or ``"raise"``.
    leak_window : int (default: 20)
        Steps over which leak AUC is averaged for the limit.
    leak_every : int (default: 1)
        Measure every so many steps only.
    coalitions : str (default: "")
        Parties that attack together, ``"passive-1+passive-2"``, several separated by
        commas; ``"all"`` for all.
    leak_baseline : bool (default: False)
        Whether score attacks also run on random gradients.
    leak_layers : bool (default: False)
        Whether leak AUC is measured at every layer of the bottom models; in
        simulations only.
    epochs : int (default: 20)
        Number of epochs.
    batch_size : int (default: 256)
        Rows of a batch; 0 for all.
    seed : int (default: 0)
        Decides everything that is random.
    test_fraction, valid_fraction : float (default: 0.2, 0.0)
        Held-out shares, where the dataset has no official split.
    evaluate_every : int (default: 1)
        Epochs between evaluations.
    patience : int (default: 0)
        Stop early after so many evaluations without improvement; 0 never does.
    device : str (default: "auto")
        Where parties compute.
    threads : int (default: 1)
        Threads of each party; results are equal to the last bit on every engine only
        if it is the same everywhere.
    checkpoint_every : int (default: 0)
        Steps between checkpoints; 0 for none.
    resume : bool (default: False)
        Continue from the newest checkpoint that every party has.
    state_dir : str (default: "")
        Folder for the parties' checkpoints.
    out : str (default: "")
        Folder for the results.
    timeout : float (default: 600.0)
        Seconds to wait for a party.
    transport : str (default: "resident")
        How messages travel under Flower: ``"resident"`` opens a session with each party
        that stays in memory; ``"plain"`` uses Flower's messages for each step.
    address : str (default: "127.0.0.1:0")
        Where the server listens for sessions.
    advertise : str (default: "")
        What parties dial, if it is another address.
    certificate, private_key : str (default: "")
        Files of the server's TLS certificate and key for sessions.
    root_certificate : str (default: "")
        File of the certificate that parties trust, if it is another one.
    insecure : bool (default: False)
        Allow sessions without TLS beyond this machine.
    wire_dtype : str (default: "")
        ``"float16"`` or ``"bfloat16"`` halves what travels; empty sends all digits.
    silence : float (default: 30.0)
        Seconds that a party may be out of reach before its session is given up.
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
    parties: int = 2
    split: str = "even"
    label_share: str = "0"
    bottom: str = "auto"
    top: str = "linear"
    width: int = 16
    aggregation: str = "concat"
    objective: str = "auto"
    optimizer: str = "adam:lr=0.005,weight_decay=0.001"
    learning_rate: str = ""
    defense: str = ""
    defense_at: str = "strategy"
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
    seed: int = 0
    test_fraction: float = 0.2
    valid_fraction: float = 0.0
    evaluate_every: int = 1
    patience: int = 0
    device: str = "auto"
    threads: int = 1
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
    wire_dtype: str = ""
    silence: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what no part of a run could work with."""
        for name, least in (("parties", 1), ("width", 1), ("epochs", 1), ("limit", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if self.transport not in TRANSPORTS:
            raise unknown_name("transport", self.transport, TRANSPORTS)
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
        """Return the settings that a run config holds; what it lacks is the default.

        Parameters
        ----------
        config : Mapping[str, Any]
            Keys with dashes.
        """
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
    """Return a field's name as a key of Flower's run config.

    Parameters
    ----------
    name : str
        With underscores.
    """
    return name.replace("_", "-")


def parse_rates(text: str) -> float | dict[str, float] | None:
    """Return the learning rates that a setting stands for.

    Parameters
    ----------
    text : str
        ``""``, ``"0.01"`` or ``"label=0.01,passive-1=0.001"``.
    """
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
