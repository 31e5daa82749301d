"""Defenses by name: config strings, TOML tables, and the way back to a string."""

from __future__ import annotations

import inspect
import tomllib
from typing import Any

import pytest
import torch

from flower_vfl.errors import ConfigError
from flower_vfl.strategies import (
    DEFENSES,
    Compose,
    Iso,
    MaxNorm,
    NoDefense,
    PerParty,
    Scheduled,
    build_defense,
    defense_spec,
)
from flower_vfl.transform import Batch, GradientTransform


def settings(transform: object) -> dict[str, Any]:
    names = inspect.signature(type(transform)).parameters
    return {name: getattr(transform, name) for name in names}


@pytest.mark.parametrize("name", DEFENSES)
def test_every_defense_is_built_by_its_name_and_written_back(name: str) -> None:
    built = build_defense(name)
    assert isinstance(built, GradientTransform)
    assert type(built).__name__.lower() == name.replace("-", "").replace(
        "none", "nodefense"
    )
    again = build_defense(defense_spec(built))
    assert type(again) is type(built)
    assert settings(again) == settings(built)


def test_parameters_survive_the_way_through_a_string() -> None:
    built = build_defense("iso:t=0.1")
    assert isinstance(built, Iso)
    assert built.t == 0.1
    exact = Iso(1 / 3)
    assert build_defense(defense_spec(exact)).t == 1 / 3  # type: ignore[attr-defined]
    assert defense_spec(Iso()) == "iso"


def test_short_names() -> None:
    for short, name in (
        ("gc", "gradient-compression"),
        ("ng", "noisy-gradients"),
        ("mg", "multi-bucket"),
    ):
        assert type(build_defense(short)) is DEFENSES[name]


def test_in_order_by_epoch_and_by_party() -> None:
    text = "passive-1=@1 none @5 iso:t=2 | max-norm; *=iso:t=0.5"
    built = build_defense(text)
    assert isinstance(built, PerParty)
    assert list(built.parts) == ["*", "passive-1"]
    by_epoch, default = built.parts["passive-1"], built.parts["*"]
    assert isinstance(default, Iso) and default.t == 0.5
    assert isinstance(by_epoch, Scheduled)
    assert isinstance(by_epoch.epochs[1], NoDefense)
    both = by_epoch.epochs[5]
    assert isinstance(both, Compose)
    first, second = both.parts.values()
    assert isinstance(first, Iso) and first.t == 2 and isinstance(second, MaxNorm)
    assert defense_spec(build_defense(defense_spec(built))) == defense_spec(built)


TOML = """
[one]
name = "iso"
t = 4
[[chain]]
name = "iso"
[[chain]]
name = "max-norm"
[party.parties]
passive-1 = { name = "iso", t = 9.0 }
"*" = "none"
[schedule.epochs]
1 = "none"
3 = [{ name = "iso" }, "max-norm"]
"""


def test_tables_of_toml() -> None:
    tables = tomllib.loads(TOML)
    texts = {name: defense_spec(build_defense(spec)) for name, spec in tables.items()}
    assert texts == {
        "one": "iso:t=4.0",
        "chain": "iso | max-norm",
        "party": "passive-1=iso:t=9.0; *=none",
        "schedule": "@1 none @3 iso | max-norm",
    }


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("marvel", "unknown defense 'marvel'"),
        ("iso:s=1", "unknown parameter 's'; known parameters: t=1.0"),
        ("iso:t=many", "must be a number"),
        ("iso:t=-1", "t must be a number from 0, got -1"),
        ("iso |", "does not start with a name"),
        ("a=iso; iso", "does not begin with a party"),
        ("a=iso; a=none", "names the party 'a' twice"),
        ("iso @3 none", "must begin with an epoch"),
        ("@1 iso @1 none", "names the epoch 1 twice"),
        ("@0 iso", "epochs count from 1"),
        ({"name": "nothing"}, "unknown defense 'nothing'"),
        ({"name": "iso", "s": 1}, "unknown parameter 's'"),
        ({"t": 1}, "has a 'name'"),
        ({"name": "iso", "parties": {}}, "has a 'name'"),
        ({"epochs": {"first": "iso"}}, "epochs of a defense are numbers"),
        ({"parties": "iso"}, "'parties' of a defense must be a table"),
        (3, "a name, a table or a transform, not int"),
    ],
)
def test_what_cannot_be_built_is_said(spec: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_defense(spec)
    assert words in str(caught.value)


class Own(NoDefense):
    """A defense that no registry knows."""


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (Own(), "LabelParty(defense=...)"),
        (Compose([Own(), Iso()]), "Own is not one of"),
        (Scheduled({1: PerParty({})}), "has no config string"),
        (PerParty({"a;b": Iso()}), "party name 'a;b'"),
    ],
)
def test_what_has_no_text_is_said(transform: GradientTransform, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        defense_spec(transform)
    assert words in str(caught.value)


def test_a_transform_is_taken_as_it_is() -> None:
    own = Own()
    assert build_defense(own) is own


def test_a_per_party_text_reaches_the_right_party() -> None:
    built = build_defense("passive-1=iso:t=4; *=none")
    gradient = torch.ones(8, 3)
    changed = built(gradient, Batch("passive-1", 1, 0))
    assert changed is not None and not torch.equal(changed, gradient)
    assert built(gradient, Batch("passive-2", 1, 0)) is gradient
