"""Key files, pins and what a node config says about alignment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flower_vfl.alignment import AlignmentSettings, Identity
from flower_vfl.alignment.keys import key_text, read_key, read_pins, write_key
from flower_vfl.errors import ConfigError, PartyError

ONE, TWO = Identity(b"1" * 32).public, Identity(b"2" * 32).public


def test_a_key_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "party.key"
    identity = write_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path).private_bytes() == identity.private_bytes()
    assert read_key(path).public == identity.public


def test_a_key_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "party.key"
    before = write_key(path).public
    with pytest.raises(ConfigError, match="exists already"):
        write_key(path)
    assert read_key(path).public == before
    with pytest.raises(ConfigError, match="cannot be written"):
        write_key(tmp_path / "nowhere" / "party.key")


@pytest.mark.skipif(os.name != "posix", reason="file modes are those of POSIX")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "party.key"
    write_key(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_key(path)


def test_a_file_that_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "party.key"
    with pytest.raises(ConfigError, match=f"make one with 'flower-vfl key {path}'"):
        read_key(path)
    for text in ("", "short", "x" * 64, "AAAA" * 11, "=" * 44):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="is not a key of 32 bytes") as caught:
            read_key(path)
        assert not text or text not in str(caught.value)  # it could be a key, mistyped


@pytest.mark.parametrize("write", [key_text, bytes.hex])
def test_pins_in_a_file_and_inline(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    expected = {"bank": ONE, "shop-2": TWO}
    file = tmp_path / "pins.toml"
    file.write_text(f'bank = "{write(ONE)}"\n"shop-2" = "{write(TWO)}"\n')
    assert read_pins(str(file)) == expected
    assert read_pins(f"bank={write(ONE)}, shop-2={write(TWO)}") == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("bank", "'bank' is not a pin"),
        ("=" + key_text(ONE), "is not a pin"),
        (
            f"bank={key_text(ONE)},bank={key_text(TWO)}",
            "two keys are pinned for 'bank'",
        ),
        ("bank=abc", "the pin of 'bank' is not a key"),
        ("missing.toml", "the pins 'missing.toml' cannot be read"),
    ],
)
def test_invalid_pins(given: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_pins(given)


def test_a_pins_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "pins.toml"
    for text, problem in (("bank = ", "cannot be read"), ("bank = 7", "is not a key")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            read_pins(str(file))


def test_settings_of_a_node_config(tmp_path: Path) -> None:
    assert AlignmentSettings.from_node({}) == AlignmentSettings()
    identity = write_key(tmp_path / "key")
    found = AlignmentSettings.from_node(
        {
            "alignment-key": str(tmp_path / "key"),
            "alignment-pins": f"bank={key_text(ONE)}",
            "trust-server": True,
            "alignment-normalise": "lower_email",
            "alignment-methods": "psu",
        }
    )
    assert found.identity is not None
    assert found.identity.public == identity.public
    assert found.pins == {"bank": ONE}
    assert found.trust_server
    assert found.normalise == "lower_email"
    assert found.methods == ("psu",)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"trust-server": "false"}, "trust-server must be true or false"),
        ({"trust-server": 1}, "trust-server must be true or false"),
        ({"alignment-methods": "psu,all"}, "unknown alignment method 'all'"),
    ],
)
def test_wrong_settings(config: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AlignmentSettings.from_node(config)


def test_a_party_may_ask_for_padding_and_choose_who_merges() -> None:
    config = {"min-padding": 100, "merging-party": "bank, mill"}
    own = AlignmentSettings.from_node(config)
    own.check("shop", 100, "mill")
    with pytest.raises(PartyError, match=r"100 dummy ids or more, not with 99"):
        own.check("shop", 99, "bank")
    with pytest.raises(PartyError, match=r"does not let 'shop' merge"):
        own.check("mill", 100, "shop")
    with pytest.raises(ConfigError, match="min-padding must be a whole number"):
        AlignmentSettings.from_node({"min-padding": "100"})
