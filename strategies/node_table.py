"""Which registered node may be which party: names and roles that cannot be claimed."""

import base64
import tomllib
from collections.abc import Iterable, Mapping
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.protocol.config import PartyDescription

NodeTable = Mapping[str, str]
_ROLES = ("label", "passive")


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
