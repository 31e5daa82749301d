"""Before training: who is there, does it fit together, and what each party is told."""

from __future__ import annotations

import base64
import re
import secrets
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.alignment.messages import pack_hellos, unpack_hellos
from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.grids.stacked import StackedGrid
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor
from flower_vfl.objectives import Task
from flower_vfl.parties.schedule import SPLITS
from flower_vfl.protocol.codecs import build_encoder
from flower_vfl.protocol.config import Greeting, PartyDescription, TrainingConfig, Value
from flower_vfl.protocol.messages import VERSION, Content, Verb
from flower_vfl.strategies.defenses.registry import Defense
from flower_vfl.transform import Defender

from .alignment import Aligner, Alignment
from .messenger import Messenger

if TYPE_CHECKING:
    from .vertical import VerticalStrategy

RESERVED = "strategy"
NodeTable = Mapping[str, str]  # by party its role and its node
_ROLES = ("label", "passive")


@dataclass(frozen=True)
class Participants:
    """The parties of a run and the number of rows of each split."""

    label: PartyDescription
    passive: dict[str, PartyDescription]
    sizes: dict[str, int]


def strategy_defender(strategy: VerticalStrategy, label: PartyDescription) -> Defender:
    """Return what changes and measures gradients at the strategy, idle by default."""
    defense, leakage, monitor = strategy.defense, strategy.leakage, None
    if not defense.transforms or defense.at != "strategy":
        return Defender()
    if leakage is not None:
        monitor = LeakageMonitor(leakage, cast(Task, label.task))
    codec, seed = strategy.compression.gradients, strategy.seed
    encoder = build_encoder(codec, seed, "gradient")
    return Defender(defense.transforms, defense.noise_seed, monitor, encoder)


def setup(
    messenger: Messenger,
    config: TrainingConfig,
    rates: Mapping[str, float],
    *,
    threads: int = 0,
    alignment: Alignment | None = None,
    reuse: bool = False,
    progress: bool | None = None,
    nodes: NodeTable | None = None,
) -> Participants:
    """Greet every node, align ids if asked to, and configure all parties."""
    key = secrets.token_bytes(32)
    protected = bool(config.defended), bool(config.noise_seed)
    begun = Greeting(config.seed, *protected)
    messenger.set_groups(())  # until the parties are configured
    greeting: dict[str, Value] = {**asdict(begun), "threads": threads, "key": key}
    if alignment:
        greeting["align"] = "reuse" if reuse else "anew"
    found = _greet(messenger, greeting)
    check_nodes(nodes or {}, found, messenger.nodes, messenger.grid)
    label, passive = _assign_roles(found)
    if alignment:
        every = [label, *passive.values()]
        ring = [each.name for each in every]
        aligner = Aligner(messenger, alignment, ring, key, progress)
        aligned = aligner.align(every, reuse)
        label, passive = aligned.pop(label.name), aligned
    _check_rows(label, passive)
    unknown = set(rates) - {"*", label.name, *passive}
    if unknown:
        raise ConfigError(
            f"a learning rate is set for {', '.join(sorted(unknown))}; the parties are "
            f"{', '.join([label.name, *passive])}"
        )
    if config.leakage:
        Leakage.from_text(config.leakage).check_parties(passive)
    config = replace(config, parties={name: d.shape for name, d in passive.items()})
    contents = {}
    for name in messenger.nodes:
        own = replace(config, learning_rate=rates.get(name, rates.get("*", 0.0)))
        if name != label.name:  # a passive party need not know how it is defended
            own = replace(config.common(), learning_rate=own.learning_rate)
            if not config.sealed:  # nor the others, unless all sign the same settings
                own = replace(own, parties={name: config.parties[name]})
        told: dict[str, Value] = {"label": label.name} if config.sealed else {}
        contents[name] = Content({**own.to_record(), **told})
    replies = messenger.ask(Verb.CONFIGURE, contents)
    sizes = {}
    for name, reply in replies.items():
        with naming(name):
            sizes[name] = {split: reply.number(split) for split in SPLITS}
    for name, size in sizes.items():
        if size != sizes[label.name]:
            problem = f"has splits of {size}, the label party of {sizes[label.name]}"
            raise PartyError(name, problem, "Give all parties the same split, or none")
    if config.sealed:
        _exchange_keys(messenger, replies, label.name)
    if isinstance(messenger.grid, StackedGrid):
        _form_groups(messenger, messenger.grid, config)
    return Participants(label, passive, sizes[label.name])


def _exchange_keys(
    messenger: Messenger, replies: Mapping[str, Content], label: str
) -> None:
    """Give the label party's public keys to the passive parties, and theirs to it."""
    hellos = {name: unpack_hellos(reply) for name, reply in replies.items()}
    others = [each for name in hellos if name != label for each in hellos[name]]
    contents = {
        name: Content(pack_hellos(others if name == label else hellos[label]))
        for name in hellos
    }
    messenger.ask(Verb.SEAL, contents)


def _form_groups(
    messenger: Messenger, grid: StackedGrid, config: TrainingConfig
) -> None:
    """Ask parties of one shape together, unless a setting concerns each by itself."""
    single = {
        "sealed": config.sealed,
        "pipeline": config.pipeline,
        "compression": config.compress_embeddings or config.compress_gradients,
        "local updates": config.local_steps > 1,
    }
    if names := [name for name, given in single.items() if given]:
        log(WARNING, "parties are not stacked: %s", ", ".join(names))
        return
    messenger.set_groups(grid.group_nodes())


@contextmanager
def naming(party: str) -> Iterator[None]:
    """Name the party whose reply is malformed."""
    try:
        yield
    except ConfigError as error:
        remedy = "Run one version of flower-vfl at every party"
        raise PartyError(party, str(error), remedy) from error


def _greet(
    messenger: Messenger, greeting: Mapping[str, Value]
) -> list[PartyDescription]:
    """Return what every node says about itself; the messenger then knows the names."""
    hellos = {name: Content(config=dict(greeting)) for name in messenger.nodes}
    replies = messenger.ask(Verb.HELLO, hellos)
    nodes: dict[str, int] = {}
    descriptions, versions = [], {}
    for working_name, reply in replies.items():
        with naming(working_name):
            if (spoken := reply.number("protocol")) != VERSION:
                problem = f"speaks protocol version {spoken}, the server {VERSION}"
                remedy = "Install the same flower-vfl everywhere"
                raise PartyError(reply.text("name"), problem, remedy)
            description = PartyDescription.from_record(reply.config)
            versions[description.name] = reply.text("versions")
        if description.name == RESERVED:
            problem = "has a name that the strategy keeps its own checkpoints under"
            raise PartyError(description.name, problem, "Give it another name")
        if description.name in nodes:
            problem = "is the name of two parties"
            remedy = "Give every node its own name in its node config"
            raise PartyError(description.name, problem, remedy)
        nodes[description.name] = messenger.nodes[working_name]
        descriptions.append(description)
    messenger.nodes = nodes
    if len(set(versions.values())) > 1:
        listed = "; ".join(f"{name}: {text}" for name, text in versions.items())
        log(WARNING, "parties run different versions, results may differ: %s", listed)
    return descriptions


def _assign_roles(
    descriptions: list[PartyDescription],
) -> tuple[PartyDescription, dict[str, PartyDescription]]:
    def natural(party: PartyDescription) -> list[tuple[int, int, str]]:
        parts = re.findall(r"\d+|\D+", party.name)  # passive-2 before passive-10
        return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]

    labels = [d for d in descriptions if d.role == "label"]
    passive = sorted((d for d in descriptions if d.role == "passive"), key=natural)
    if not labels:
        raise ConfigError(
            f"there is no label party among {', '.join(d.name for d in descriptions)}; "
            'set role="label" in the config of the node that holds the labels'
        )
    if len(labels) > 1:
        raise ConfigError(
            f"there are {len(labels)} label parties: "
            f"{', '.join(d.name for d in labels)}; exactly one node may have "
            'role="label"'
        )
    if not passive:
        raise ConfigError(
            f"the label party '{labels[0].name}' is alone; start at least one passive "
            "party"
        )
    return labels[0], {d.name: d for d in passive}


def _check_rows(
    label: PartyDescription, passive: Mapping[str, PartyDescription]
) -> None:
    for name, party in passive.items():
        if party.rows != label.rows:
            kind = "fewer" if party.rows < label.rows else "more"
            problem = f"has {kind} ids than the label party '{label.name}'"
            rows = f"{party.rows} rows and not {label.rows}"
            remedy = "All parties must hold the same samples: keep the common ids only"
            raise PartyError(name, f"{problem}: {rows}", remedy)
        for what, own, theirs in (
            ("ids", party.ids_digest, label.ids_digest),
            ("train/test split", party.split_digest, label.split_digest),
        ):
            known = bool(own) and bool(theirs)  # ids are optional, a split is shared
            if own != theirs and (known or what != "ids"):
                raise PartyError(
                    name,
                    f"its {what} differ from those of the label party '{label.name}'",
                    f"Give both the same {what} in the same order",
                )


def check_sealed(defense: Defense, leakage: Leakage | None) -> None:
    """Refuse what needs a server that can read gradients or labels."""
    if defense.transforms and defense.at == "strategy":
        raise ConfigError(
            "in a sealed run the server cannot change gradients: have the label party "
            'apply the defense, Defense(..., at="label") (defense-at="label" in the '
            "run config)"
        )
    if leakage is not None and leakage.probes:
        raise ConfigError(
            "passive parties measure layers and membership and report them to the "
            "server: remove these, or measure them in a simulation without sealing"
        )


def learning_rates(rate: float | Mapping[str, float] | None) -> dict[str, float]:
    """Return learning rates by party name, ``"*"`` for the others."""
    if rate is None:
        return {}
    rates = dict(rate) if isinstance(rate, Mapping) else {"*": rate}
    for name, value in rates.items():
        if not value > 0.0:
            raise ConfigError(
                f"the learning rate of '{name}' must be positive: {value}"
            )
    return rates


def read_node_table(path: Path) -> dict[str, str]:
    """Return the table in a TOML file: ``bank = "label KEY"``, one line per party."""
    try:
        found: dict[str, Any] = tomllib.loads(path.expanduser().read_text())
    except (OSError, ValueError) as error:
        problem = f"the table of nodes '{path}' cannot be read ({error})"
        raise ConfigError(problem) from None
    check_table(found)
    return found


def check_table(table: Mapping[str, object]) -> None:
    """Refuse a table with an entry that is not a role and a node."""
    for party, entry in table.items():
        role, _, node = str(entry).partition(" ")
        if role not in _ROLES or not node.strip():
            raise ConfigError(
                f"'{party} = {entry}' is not an entry of the table of nodes; write "
                f'{party} = "label KEY" or {party} = "passive KEY", with the name or '
                "the public key under which the SuperLink knows the node"
            )


def check_nodes(
    table: NodeTable,
    descriptions: Iterable[PartyDescription],
    nodes: Mapping[str, int],
    grid: Grid,
) -> None:
    """Refuse a party whose node is another one, or plays another role, than agreed."""
    try:
        known = {info.node_id: _names_of(info) for info in grid.get_nodes()}
    except NotImplementedError:  # a grid that knows nothing but numbers
        known = {}
    names = {each.name: known.get(nodes[each.name], []) for each in descriptions}
    if not table:
        if any(names.values()):
            _advise(descriptions, names)
        return
    for each in descriptions:
        if each.name not in table:
            problem = "is not in the table of nodes"
            remedy = f"Known are {', '.join(table)}; add it, or stop that node"
            raise PartyError(each.name, problem, remedy)
        role, _, node = table[each.name].partition(" ")
        if each.role != role:
            problem = f"says that it is a {each.role} party; the table says {role}"
            raise PartyError(each.name, problem, "Correct that node, or the table")
        if node.strip() not in names[each.name]:
            claimed = ", ".join(names[each.name]) or "a node without name and key"
            problem = f"is claimed by another node than '{node.strip()}': {claimed}"
            raise PartyError(each.name, problem, "Stop that node, or correct the table")


def _names_of(info: NodeInfo) -> list[str]:
    """Return the registered name and the public key of a node, if it has them."""
    key = base64.b64encode(info.public_key).decode()
    return [each for each in (info.name, key) if each]


def _advise(
    descriptions: Iterable[PartyDescription], names: Mapping[str, list[str]]
) -> None:
    lines = [
        f'{d.name} = "{d.role} {(names[d.name] or ["?"])[-1]}"' for d in descriptions
    ]
    log(
        WARNING,
        "every node names itself: any registered node could claim another party's name "
        "or role. To bind them, check this table, save it as nodes.toml and give it as "
        "`nodes`:\n%s",
        "\n".join(lines),
    )
