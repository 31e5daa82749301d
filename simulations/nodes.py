"""Build the party of a node from the run config and the node config."""

from __future__ import annotations

import json
from dataclasses import replace

from flwr.app import Context

from flower_vfl.alignment import AlignmentSettings
from flower_vfl.errors import ConfigError
from flower_vfl.parties.checkpoints import DirectoryStore, open_store
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.protocol.replay import node_name, node_role

from .attacks import optimizer_of
from .config import RunConfig
from .parties import FIT_FILE, PartyRows, load_rows, make_label, make_passive
from .plugins import load_plugins


def rows_at(context: Context) -> tuple[RunConfig, PartyRows]:
    """Return a node's settings and rows; store what prediction needs later."""
    load_plugins()  # a client process starts here
    config = RunConfig.from_run_config(context.run_config)
    file = context.node_config.get("data")
    number = context.node_config.get("partition-id")
    if file is None and number is None:
        raise ConfigError(
            "this node has no data; start its SuperNode with --node-config "
            "'... data=\"/path/of/its/file.csv\"'"
        )
    index = 0
    if node_role(context) == "passive":
        index = 1 if number is None else max(int(number), 1)
    rows = load_rows(config, index, None if file is None else str(file))
    store = open_store(context, node_name(context))
    if isinstance(store, DirectoryStore):
        store.folder.mkdir(parents=True, exist_ok=True)
        fit = rows.data.fit.state_dict() if rows.data.fit is not None else None
        known = {
            "fit": fit,
            "columns": list(rows.data.columns),
            "task": rows.task,
            "classes": list(rows.classes),
        }
        (store.folder / FIT_FILE).write_text(json.dumps(known))
    return config, rows


def passive_at(context: Context) -> PassiveParty:
    """Return the passive party of a node."""
    config, rows = rows_at(context)
    number = context.node_config.get("partition-id")
    if number is None or not _simulated(context):
        return make_passive(config, rows)
    # Only a simulated party attacks because the run config says so.
    return make_passive(config, rows, optimizer_of(config, int(number)), True)


def label_at(context: Context) -> LabelParty:
    """Return the label party of a node."""
    return make_label(*rows_at(context), trust_server=_simulated(context))


def aligning_at(context: Context) -> AlignmentSettings:
    """Return a node's alignment settings; a simulated node trusts the server."""
    own = AlignmentSettings.from_node(context.node_config)
    config = RunConfig.from_run_config(context.run_config)
    normalise = own.normalise or config.normalise or None
    trust = own.trust_server or _simulated(context)
    return replace(own, normalise=normalise, trust_server=trust)


def _simulated(context: Context) -> bool:
    return not {"role", "data"} & set(context.node_config)
