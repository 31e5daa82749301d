"""Settings of a run from a TOML file."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.cli import main as cli
from flower_vfl.simulations.cli.options import defaults_of, read_settings
from flower_vfl.simulations.config import ABOUT, RunConfig


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_keys_become_options(file: Path) -> None:
    file.write_text(
        """
        dataset = "spambase"
        bottom = "mlp:hidden=8"
        batch-size = 64
        test-fraction = 0
        leak-layers = true
        attack = "norm,mean:hard=true,passive:labels=40,seeds=2"
        passive = "a.csv, b.csv"
        label-party = "l.csv"
        label-column = "y"
        """
    )
    assert defaults_of(file) == {
        "dataset": "spambase",
        "model": "mlp:hidden=8",
        "batch_size": 64,
        "test_fraction": 0,
        "leak_layers": True,
        "attack": ["norm", "mean:hard=true", "passive:labels=40,seeds=2"],
        "passive": ["a.csv", "b.csv"],
        "label_party": "l.csv",
        "label_column": "y",
    }


def test_files_count_the_parties(file: Path) -> None:
    file.write_text('passive = ["a.csv"]\nlabel-party = "l.csv"\nlabel-column = "y"')
    assert defaults_of(file)["passive"] == ["a.csv"]
    file.write_text(file.read_text() + "\nparties = 3")
    with pytest.raises(ConfigError, match=r"parties is 3, .* files is 1"):
        defaults_of(file)


def test_lists_are_texts_with_commas(file: Path) -> None:
    file.write_text('attack = ["norm,mean", "passive:labels=4,seeds=2"]')
    assert read_settings(file) == {"attack": "norm,mean,passive:labels=4,seeds=2"}
    assert defaults_of(file)["attack"] == [
        "norm",
        "mean",
        "passive:labels=4,seeds=2",
    ]
    file.write_text("attack = []")
    assert defaults_of(file) == {"attack": []}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('defense = "iso:t=2"', "iso:t=2"),
        ('[defense]\nname = "iso"\nt = 2.0', "iso:t=2.0"),
        (
            '[[defense]]\nname = "gc"\nkeep = 0.2\n[[defense]]\nname = "iso"',
            "gradient-compression:keep=0.2 | iso",
        ),
    ],
)
def test_a_defense_may_be_a_table_or_several(
    text: str, expected: str, file: Path
) -> None:
    file.write_text(text)
    assert read_settings(file)["defense"] == expected


def test_an_empty_file_and_an_empty_folder(file: Path) -> None:
    file.write_text("")
    assert defaults_of(file) == {}
    file.write_text('out = ""')
    assert defaults_of(file) == {}  # and not the folder one is in


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("epochs = ", "is not TOML"),
        ("epochs = 1\nepochs = 2", "is not TOML"),
        ("epoch = 3", "unknown setting 'epoch'.*epochs"),
        ("batch_size = 3", "unknown setting 'batch_size'.*batch-size"),
        ('epochs = "three"', "must be a int"),
        ("epochs = 1.5", "must be a int"),
        ("epochs = true", "must be a int"),
        ("epochs = 0", "epochs must be at least 1"),
        ('coalitions = ["all"]', "must be a str"),
        ("[optimizer]\nlr = 0.1", "must be a str"),
        ('[defense]\nname = "nope"', "unknown defense 'nope'"),
        ('[defense]\nname = "iso"\ntemperature = 3', "temperature"),
        ("[defense]\nt = 3.0", "name"),
        ('state-dir = "x"', "'state-dir' is set by the command itself"),
        ('transport = "plain"', "'transport' is set by the command itself"),
    ],
)
def test_what_is_wrong_with_a_file(text: str, problem: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){problem}"):
        defaults_of(file)


def test_files_that_cannot_be_read(tmp_path: Path, file: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            defaults_of(path)
    file.write_bytes(b'dataset = "\xff\xfe"')
    with pytest.raises(ConfigError, match="is not TOML"):
        defaults_of(file)


def test_text_is_utf_8_whatever_the_locale_says(file: Path) -> None:
    file.write_bytes('dataset = "données"'.encode())
    assert read_settings(file) == {"dataset": "données"}


def test_the_command_says_it_in_a_line(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("epoch = 3")
    monkeypatch.setattr(sys, "argv", ["flower-vfl", "run", "--config", str(file)])
    with pytest.raises(SystemExit) as leave:
        cli.main()
    assert leave.value.code == 2
    error = capsys.readouterr().err
    assert "unknown setting 'epoch'" in error and "Traceback" not in error


def test_every_setting_is_described() -> None:
    assert list(ABOUT) == [field.name for field in fields(RunConfig)]
    assert {key for about in ABOUT.values() for key in about} == {"panel", "help"}
