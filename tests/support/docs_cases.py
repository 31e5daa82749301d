"""What a document holds, and how its examples are run."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer

from flower_vfl.leakage.attacks import SCORE_ATTACKS
from flower_vfl.simulations import plugins
from flower_vfl.simulations.cli import main as cli
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.objectives import OBJECTIVES, PRESETS
from flower_vfl.strategies import DEFENSES

ROOT = Path(__file__).parents[2]
# A metric on another machine, whose last bits differ: a defended run has other noise.
TOLERANCE = 0.05  # one of 114 test rows is 0.009
_COMMENT = re.compile(r"<!-- not run: (.+) -->")
_FILE = re.compile(r"# ([\w-]+\.py)\n")
_NUMBER = re.compile(r"([±(]?)([-−]?\d+(?:\.\d+(?:e-?\d+)?|e-?\d+))(×?)([).:;}\]]?)")


# --- what a document holds --------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block, and the reason why it is only checked, if there is one."""

    language: str
    code: str
    line: int
    not_run: str | None


def blocks_of(text: str) -> list[Block]:
    found, fence, before = [], None, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if fence is None:
            assert not re.match(r"\s+```", line), f"line {number}: an indented block"
            if line.startswith("```"):
                fence, code = (line[3:].strip(), number), []
                comment = _COMMENT.fullmatch(before)
            before = line.strip()
        elif line == "```":
            why = comment[1] if comment else None
            found.append(Block(fence[0], "\n".join(code) + "\n", fence[1], why))
            fence, before = None, ""
        else:
            code.append(line)
    assert fence is None, "a block does not end"
    return found


def prose_of(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def slugs_of(text: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose_of(text), flags=re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def table_of(text: str, first: str) -> list[list[str]]:
    """Return the rows of the table whose first heading is given."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first} |"):
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    return rows
                rows.append([cell.strip() for cell in row.strip("|").split("|")])
            return rows
    raise AssertionError(f"there is no table '{first}'")


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- outputs ----------------------------------------------------------------------


def _words(text: str) -> list[str]:
    words = re.split(r"[\s,–]+", re.sub(r"[─-╿]{2,}", "", text))  # without borders
    return [word for word in words if word]


def _differs(expected: str, unit: str, word: str, tolerance: float) -> bool:
    number, got = _NUMBER.fullmatch(expected), _NUMBER.fullmatch(word)
    if "…" in expected:
        pattern = ".*".join(map(re.escape, expected.split("…")))
        return re.fullmatch(pattern, word) is None
    if number is None or got is None:
        return expected != word
    if number.group(1, 3, 4) != got.group(1, 3, 4):
        return True
    timed = unit.rstrip(".;:") in ("s", "ms") or number[3] == "×"
    values = [float(found[2].replace("−", "-")) for found in (number, got)]
    return not timed and abs(values[0] - values[1]) > tolerance


def _mismatch(words: Sequence[str], got: Sequence[str], tolerance: float) -> str | None:
    """Return the first word that differs, compared up to the end of the shorter."""
    for index, (expected, word) in enumerate(zip(words, got, strict=False)):
        unit = words[index + 1] if index + 1 < len(words) else ""
        if _differs(expected, unit, word, tolerance):
            return f"the document shows '{expected}', we got '{word}'"
    return None


def same_output(shown: str, printed: str, tolerance: float = TOLERANCE) -> None:
    """Compare word by word: texts and whole numbers exactly, fractions nearly.

    Times differ from run to run, ``…`` in a word stands for anything, and a line with
    nothing but ``…`` for any number of lines.
    """
    parts = [_words(part) for part in re.split(r"^…$", shown, flags=re.MULTILINE)]
    got, full = _words(printed), f"the document shows\n{shown}\nand we got\n{printed}"
    at = 0
    for number, part in enumerate(parts):
        first, last = number == 0, number == len(parts) - 1
        end = len(got) - len(part)
        assert end >= at, full
        starts = range(at, at + 1) if first else range(at, end + 1)
        starts = range(end, end + 1) if last else starts
        assert not (first and last) or end == at, full
        reasons = {s: _mismatch(part, got[s:], tolerance) for s in starts}
        fits = [start for start, reason in reasons.items() if reason is None]
        assert fits, f"{reasons[starts[0]]}\n{full}"
        at = fits[0] + len(part)


# --- commands ---------------------------------------------------------------------


def run_flower_vfl(arguments: list[str]) -> None:
    sys.argv = ["flower-vfl", *arguments]
    try:
        cli.main()
    except SystemExit as leave:
        assert not leave.code, f"flower-vfl {shlex.join(arguments)} failed"


def parse_flower_vfl(arguments: list[str]) -> None:
    """See whether the command and its options exist, and run nothing."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group)
    at, name = next((i, a) for i, a in enumerate(arguments) if a in group.commands)
    assert set(arguments[:at:2]) <= {"--plugin"}
    group.commands[name].make_context(name, arguments[at + 1 :])


def run_head(arguments: list[str]) -> None:
    option, count, file = arguments
    assert option == "-n"
    print("\n".join(Path(file).read_text().splitlines()[: int(count)]))


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in arguments:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\[(.+)\]", arguments[1]):
        assert extra in project["optional-dependencies"]


def check_flwr(arguments: list[str]) -> None:
    """Look at what would be run: running it would leave a SuperLink behind."""
    assert arguments[0] == "run"
    own = Path(arguments[1]).is_dir()  # written by an earlier example
    folder = Path(arguments[1]) if own else ROOT / arguments[1]
    settings = tomllib.loads((folder / "pyproject.toml").read_text())
    given = dict(pairwise(arguments))
    text = re.sub(r" (?=[\w-]+=)", "\n", given.get("--run-config", ""))
    chosen = tomllib.loads(text)
    known = settings["tool"]["flwr"]["app"]["config"]
    assert set(chosen) <= set(known)
    passive = {**known, **chosen}["parties"]
    if not own:
        passive = RunConfig.from_run_config({**known, **chosen}).parties
    nodes = re.search(r"num-supernodes=(\d+)", given["--federation-config"])
    assert nodes is not None and int(nodes[1]) == passive + 1


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "flower-vfl": run_flower_vfl,
    "head": run_head,
    "make": check_make,
    "pip": check_pip,
    "flwr": check_flwr,
}
CHECKS = {**COMMANDS, "flower-vfl": parse_flower_vfl}


# --- documents --------------------------------------------------------------------


def _once(command: re.Match[str]) -> str:
    seeds = " --seeds 1" if command[2] else ""
    words = command[1].replace("seed=0,1", "seed=0")
    return f"{words} --epochs 1 --batch-size 128{seeds}"


def shortened(blocks: Sequence[Block], every: bool = False) -> list[Block]:
    """Let trainings whose numbers are not shown last for one epoch of a few steps.

    The folder of a run may be read by a later example, so runs with one stay. With
    ``every``, trainings whose numbers are shown are as short, and without the numbers.
    """
    pattern = r"^(flower-vfl (?:--plugin \S+ )*(?:sweep|run(?!.* --out)|(compare)) .*)$"
    found, left_out = list[Block](), False
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        shown = after is not None and after.language == "text"
        if block.language == "sh" and (every or not shown):
            code = re.sub(pattern, _once, block.code, flags=re.MULTILINE)
            left_out = shown and code != block.code
            block = replace(block, code=code)
        elif block.language == "text" and left_out:
            left_out = False
            continue
        found.append(block)
    return found


def run_document(
    blocks: Sequence[Block],
    name: str,
    capsys: pytest.CaptureFixture[str],
    module: ModuleType,
    never: str | None = None,
    tolerance: float = TOLERANCE,
) -> int:
    """Run the blocks of a document in order; return how many were run.

    ``never`` is a reason why none of them is run; fractions may differ by `tolerance`.
    """
    printed, count = None, 0
    for block in blocks:
        block = replace(block, not_run=block.not_run or never)
        where = f"{name}, line {block.line}"
        if block.language == "text":
            assert printed is not None, f"{where}: whose output is this?"
            same_output(block.code, printed, tolerance)
            printed = None
            continue
        run_block(block, where, module)
        output = capsys.readouterr().out
        printed = output if block.not_run is None else None
        count += block.not_run is None
    return count


def run_block(block: Block, where: str, module: ModuleType) -> None:
    """Run a block, or look at it if it says that it is not run."""
    if block.language == "python":
        compiled = compile(block.code, where, "exec")
        if block.not_run is None:
            exec(compiled, vars(module))
        if file := _FILE.match(block.code):  # a file of the reader's own
            Path(file[1]).write_text(block.code)
    elif block.language == "sh":
        commands = COMMANDS if block.not_run is None else CHECKS
        for line in block.code.splitlines():
            command, *arguments = shlex.split(line, comments=True)
            assert command in commands, f"{where}: how is '{command}' checked?"
            commands[command](arguments)
    else:
        raise AssertionError(f"{where}: unknown language '{block.language}'")


@contextmanager
def plugins_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget at the end which methods of one's own were loaded."""
    monkeypatch.setenv(plugins.VARIABLE, "")
    known: list[Any] = [DEFENSES, SCORE_ATTACKS, OBJECTIVES, PRESETS]
    known += [plugins.ADDED, plugins._LOADED]
    before = [registry.copy() for registry in known]
    plugins.ADDED.clear()
    plugins._LOADED.clear()
    yield
    for registry, old in zip(known, before, strict=True):
        registry.clear()
        registry.update(old)
