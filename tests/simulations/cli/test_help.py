"""What ``flower-vfl --help`` and the help of each command show, and how soon."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys

import click
import pytest
import typer
from cli_cases import call
from click.shell_completion import ShellComplete

from flower_vfl.simulations.cli import main as cli
from flower_vfl.simulations.studies.methods import parse_method, parse_values

GROUP = typer.main.get_command(cli.app)
COMMON = {"--dataset", "--passive", "--epochs", "--defense", "--attack", "--out"}
WATCHED = """
import sys
from flower_vfl.simulations.cli.main import main
sys.argv[0] = "flower-vfl"
try:
    main()
finally:
    heavy = {"torch", "flwr", "pandas", "sklearn", "altair"} & set(sys.modules)
    print(sorted(heavy), file=sys.stderr)
"""


def quick(*arguments: str, **environment: str) -> str:
    """Return what the command prints, in a new process that imports nothing heavy."""
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    assert done.stderr == "[]\n"
    return done.stdout


def command(name: str) -> click.Command:
    assert isinstance(GROUP, click.Group)
    context = GROUP.commands[name].make_context(name, [], resilient_parsing=True)
    return context.command


def options(shown: str) -> set[str]:
    return set(re.findall(r"^[│ *]+(--[\w-]+)", shown, flags=re.MULTILINE))


def test_the_help_needs_neither_torch_nor_flower() -> None:
    shown = quick("--help")
    assert all(f" {name} " in shown for name in cli.COMMANDS)
    assert "--install-completion" in shown


def test_the_version_needs_neither_torch_nor_flower() -> None:
    assert re.match(
        r"flower-vfl \d+\.\d+.*, flwr 1\.\d+.*, torch \d", quick("--version")
    )


def test_commands_are_completed() -> None:
    words = {"COMP_WORDS": "flower-vfl s", "COMP_CWORD": "1"}
    found = quick(_FLOWER_VFL_COMPLETE="complete_bash", **words)
    assert found.split() == ["select", "scale", "sweep"]


def test_options_are_completed_also_those_of_the_long_help() -> None:
    shell = ShellComplete(GROUP, {}, "flower-vfl", "_FLOWER_VFL_COMPLETE")
    found = shell.get_completions(["run"], "--leak-l")
    assert [each.value for each in found] == ["--leak-limit", "--leak-layers"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_has_their_own_texts(name: str) -> None:
    assert isinstance(GROUP, click.Group)
    module = importlib.import_module(f"flower_vfl.simulations.cli.{cli.COMMANDS[name]}")
    assert getattr(module, name).__doc__
    assert GROUP.commands[name].help == command(name).help


@pytest.mark.parametrize("name", ["run", "compare", "sweep"])
def test_the_help_is_short_and_help_all_has_every_option(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, short, _ = call(capsys, monkeypatch, name, "--help")
    assert code == 0 and f"{name} --help-all" in short
    assert options(short) >= COMMON and len(options(short)) <= 22
    code, long, _ = call(capsys, monkeypatch, name, "--help-all")
    assert code == 0
    every = {opt for each in command(name).params for opt in each.opts}
    assert options(long) == every | {"--help"} and len(every) > 55


@pytest.mark.parametrize("name", ["run", "compare", "sweep"])
def test_the_help_has_two_examples_that_can_be_run(name: str) -> None:
    text = command(name).help or ""
    examples = re.findall(r"^flower-vfl (\w+) (.*)$", text, flags=re.MULTILINE)
    assert [used for used, _ in examples] == [name, name]
    for _, line in examples:
        assert len(f"flower-vfl {name} {line}") <= 78  # one line of a terminal
        given = command(name).make_context(name, shlex.split(line)).params
        for text in given.get("defenses") or ():
            parse_method(text)
        parse_values(given.get("values") or ())


def test_a_short_help_hides_nothing_from_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = call(capsys, monkeypatch, "run", "--leak-window", "x")
    assert code == 2 and "--leak-window" in error
    code, shown, _ = call(capsys, monkeypatch, "align", "--help")
    assert "--padding" in shown and "--help-all" not in shown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("report", "Folder of a study"),
        ("audit", "An .npz or Parquet file"),
        ("predict", "The --out folder of a run"),
    ],
)
def test_arguments_are_explained(
    name: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, shown, _ = call(capsys, monkeypatch, name, "--help")
    assert code == 0 and words in shown
