"""A registered node cannot take the name or the role of another."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from flwr.app import Context
from flwr.proto.node_pb2 import NodeInfo
from leak_cases import flower_warnings
from torch import nn
from vertical_cases import features, labels

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    PartyError,
    PassiveParty,
    vertical_client_app,
)
from flower_vfl.strategies import VerticalStrategy
from flower_vfl.strategies.setup import read_node_table

KEYS = {1: b"key of the bank", 2: b"key of the shop", 3: b"key of a stranger"}
TEXT = {node: base64.b64encode(key).decode() for node, key in KEYS.items()}
TABLE = {"bank": f"label {TEXT[1]}", "shop": f"passive {TEXT[2]}"}


class Registered(InProcessGrid):
    """A grid that knows the nodes' public keys, as that of a SuperLink does."""

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=n, public_key=KEYS[n], name=f"node {n}")
            for n in self.get_node_ids()
        ]


def grid(*claims: tuple[str, str]) -> Registered:
    def passive(context: Context) -> PassiveParty:
        return PassiveParty(features(1), nn.Linear(features(1).shape[1], 3))

    def label(context: Context) -> LabelParty:
        return LabelParty(labels(), CrossEntropy(nn.Linear(3, 1)), trust_server=True)

    nodes = [{"role": role, "name": name} for role, name in claims]
    return Registered(vertical_client_app(passive, label), nodes)


HONEST = (("label", "bank"), ("passive", "shop"))


def start(parties: Registered, table: dict[str, str] | None = None) -> None:
    strategy = VerticalStrategy(batch_size=16, progress=False, nodes=table)
    strategy.start(parties, num_rounds=1)


def test_parties_that_are_who_they_say() -> None:
    start(grid(*HONEST), TABLE)
    start(grid(*HONEST), {"bank": "label node 1", "shop": "passive node 2"})


def test_without_a_table_a_node_may_claim_to_be_the_label_party() -> None:
    """As in the first version; a warning says how to make a table."""
    with flower_warnings() as told:
        start(grid(("passive", "shop"), ("label", "bank")))
    (advice,) = [line for line in told if "names itself" in line]
    assert f'bank = "label {TEXT[2]}"' in advice and "nodes.toml" in advice


@pytest.mark.parametrize(
    ("claims", "party", "words"),
    [
        ((("passive", "shop"), ("label", "bank")), "shop", "another node"),
        ((("label", "shop"), ("passive", "bank")), "shop", "label party; the table"),
        ((("label", "bank"), ("passive", "mill")), "mill", "not in the table"),
        ((*HONEST, ("passive", "third")), "third", "not in the table"),
    ],
)
def test_a_node_that_claims_to_be_another_party(
    claims: tuple[tuple[str, str], ...], party: str, words: str
) -> None:
    with pytest.raises(PartyError, match=words) as caught:
        start(grid(*claims), TABLE)
    assert caught.value.party == party


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "nodes.toml"
    path.write_text("".join(f'{name} = "{v}"\n' for name, v in TABLE.items()))
    assert read_node_table(path) == TABLE
    for wrong in ('bank = "boss KEY"', 'bank = "label"', "bank"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="table of nodes"):
            read_node_table(path)
    with pytest.raises(ConfigError, match="table of nodes"):
        VerticalStrategy(nodes={"bank": "KEY"})


def test_simulations_need_no_table() -> None:
    torch.manual_seed(0)
    with flower_warnings() as told:
        nodes = [{"role": role, "name": name} for role, name in HONEST]
        start(InProcessGrid(grid(*HONEST)._app, nodes))  # type: ignore[arg-type]
    assert not [line for line in told if "names itself" in line]
