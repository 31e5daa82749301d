"""Before training: who is there, does it fit together, and what each party is told."""

from __future__ import annotations

import base64
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, cast

from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore import log

from flower_vfl.alignment.messages import pack_hellos, unpack_hellos
from flower_vfl.errors import ConfigError, PartyError, at_party
from flower_vfl.grids.stacked import StackedGrid
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor
from flower_vfl.objectives import Task
from flower_vfl.parties.schedule import SPLITS
from flower_vfl.protocol.codecs import build_encoder
from flower_vfl.protocol.config import Greeting, PartyDescription, TrainingConfig, Value
from flower_vfl.protocol.messages import VERSION, Content, Verb
from flower_vfl.strategies.defenses.registry import Defense
from flower_vfl.transform import Defender

from .alignment import Aligner
from .messenger import Messenger

if TYPE_CHECKING:
    from .vertical import VerticalStrategy

RESERVED = "strategy"
REMEDY = "Install the same flower-vfl version at every party"
_ADVICE = (
    "every node names itself: any registered node could claim another party's name or "
    "role. To bind them, check this table and give it as `nodes` (nodes.toml):\n%s"
)


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
    strategy: VerticalStrategy, messenger: Messenger, reuse: bool
) -> Participants:
    """Greet every node, align ids if asked to, and configure all parties."""
    messenger.wait_for_nodes(strategy.parties)
    config, rates, alignment = strategy.config(), strategy.rates, strategy.alignment
    key = secrets.token_bytes(32)
    begun = Greeting(config.seed, bool(config.defended), bool(config.noise_seed))
    messenger.set_groups(())  # until the parties are configured
    greeting: dict[str, Value] = {**asdict(begun), "threads": strategy.threads}
    greeting["key"] = key
    if alignment:
        greeting["align"] = "reuse" if reuse else "anew"
    found = _greet(messenger, greeting)
    _check_nodes(strategy.nodes, found, messenger)
    label, passive = _assign_roles(found)
    if alignment:
        every = [label, *passive.values()]
        aligner = Aligner(messenger, alignment, every, key, strategy.progress)
        aligned = aligner.align(reuse)
        label, passive = aligned.pop(label.name), aligned
    _check_rows(label, passive)
    if unknown := set(rates) - {"*", label.name, *passive}:
        given, known = ", ".join(sorted(unknown)), ", ".join([label.name, *passive])
        raise ConfigError(f"a learning rate is set for {given}; parties are {known}")
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
        with at_party(name, REMEDY):
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


def _greet(
    messenger: Messenger, greeting: Mapping[str, Value]
) -> list[PartyDescription]:
    """Return what every node says about itself; the messenger then knows the names."""
    hellos = {name: Content(config=dict(greeting)) for name in messenger.nodes}
    replies = messenger.ask(Verb.HELLO, hellos)
    nodes: dict[str, int] = {}
    descriptions, versions = [], {}
    for working_name, reply in replies.items():
        with at_party(working_name, REMEDY):
            if (spoken := reply.number("protocol")) != VERSION:
                problem = f"speaks protocol version {spoken}, the server {VERSION}"
                raise PartyError(reply.text("name"), problem, REMEDY)
            description = PartyDescription.from_record(reply.config)
            versions[description.name] = reply.text("versions")
        name, remedy = description.name, "Give every node its own name in its config"
        if name == RESERVED:
            raise PartyError(name, "has the name of the strategy's checkpoints", remedy)
        if name in nodes:
            raise PartyError(name, "is the name of two parties", remedy)
        nodes[name] = messenger.nodes[working_name]
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
        return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]

    labels = [d for d in descriptions if d.role == "label"]
    passive = sorted((d for d in descriptions if d.role == "passive"), key=natural)
    if len(labels) != 1:
        names = ", ".join(each.name for each in labels or descriptions)
        found = f"are {len(labels)} label parties" if labels else "is no label party"
        remedy = 'exactly one node, which holds the labels, must have role="label"'
        raise ConfigError(f"there {found} among {names}; {remedy}")
    if not passive:
        remedy = "start at least one passive party"
        raise ConfigError(f"the label party '{labels[0].name}' is alone; {remedy}")
    return labels[0], {d.name: d for d in passive}


def _check_rows(
    label: PartyDescription, passive: Mapping[str, PartyDescription]
) -> None:
    for name, party in passive.items():
        if party.rows != label.rows:
            kind = "fewer" if party.rows < label.rows else "more"
            rows = f"{party.rows} rows and not {label.rows}"
            problem = f"has {kind} ids than the label party '{label.name}': {rows}"
            raise PartyError(name, problem, "Keep the common ids at all parties")
        for what, own, theirs in (
            ("ids", party.ids_digest, label.ids_digest),
            ("train/test split", party.split_digest, label.split_digest),
        ):
            known = bool(own) and bool(theirs)  # ids are optional, a split is shared
            if own != theirs and (known or what != "ids"):
                problem = f"its {what} differ from the label party '{label.name}'"
                remedy = f"Give both the same {what} in the same order"
                raise PartyError(name, problem, remedy)


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
            "passive parties report leaks of layers and membership to the server: "
            "remove these attacks, or simulate without sealing"
        )


def learning_rates(rate: float | Mapping[str, float] | None) -> dict[str, float]:
    """Return learning rates by party name, ``"*"`` for the others."""
    if rate is None:
        return {}
    rates = dict(rate) if isinstance(rate, Mapping) else {"*": rate}
    for name, value in rates.items():
        if not value > 0.0:
            raise ConfigError(f"learning rate of '{name}' must be positive: {value}")
    return rates


def read_node_table(path: Path) -> dict[str, str]:
    """Return the table in a TOML file: ``bank = "label KEY"``, one line per party."""
    try:
        return check_table(tomllib.loads(path.expanduser().read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot use the table of nodes '{path}': {error}") from None


def check_table(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table of nodes; refuse an entry that is not a role and a node."""
    for party, entry in table.items():
        role, _, node = str(entry).partition(" ")
        if role not in ("label", "passive") or not node.strip():
            raise ConfigError(
                f"'{party} = {entry}' is not an entry of the table of nodes; write "
                f'{party} = "label KEY" or {party} = "passive KEY", with the node\'s '
                "name or public key at the SuperLink"
            )
    return dict(table)


def _check_nodes(
    table: Mapping[str, str],
    descriptions: Iterable[PartyDescription],
    messenger: Messenger,
) -> None:
    """Refuse a party whose node is another one, or plays another role, than agreed."""
    try:
        known = {info.node_id: _names_of(info) for info in messenger.grid.get_nodes()}
    except NotImplementedError:  # a grid that knows nothing but numbers
        known = {}
    names = {d.name: known.get(messenger.nodes[d.name], []) for d in descriptions}
    if not table:
        if any(names.values()):
            lines = [
                f'{d.name} = "{d.role} {["?", *names[d.name]][-1]}"'
                for d in descriptions
            ]
            log(WARNING, _ADVICE, "\n".join(lines))
        return
    for each in descriptions:
        problem = ""
        role, _, node = table.get(each.name, "").partition(" ")
        if each.name not in table:
            problem = f"is not in the table of nodes: {', '.join(table)}"
        elif each.role != role:
            problem = f"says that it is a {each.role} party; the table says {role}"
        elif node.strip() not in names[each.name]:
            claimed = ", ".join(names[each.name]) or "a node without name and key"
            problem = f"is claimed by another node than '{node.strip()}': {claimed}"
        if problem:
            raise PartyError(each.name, problem, "Stop that node, or correct the table")


def _names_of(info: NodeInfo) -> list[str]:
    """Return the registered name and the public key of a node, if it has them."""
    key = base64.b64encode(info.public_key).decode()
    return [each for each in (info.name, key) if each]
