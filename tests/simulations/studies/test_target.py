"""The search for the weakest setting that keeps a leak below a target."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_cases import call
from study_cases import document_of

from flower_vfl.simulations.cli import options
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.report.data import load_report
from flower_vfl.simulations.studies import trials as trials_module
from flower_vfl.simulations.studies.methods import Method, parse_method
from flower_vfl.simulations.studies.target import STRENGTHS, Search, find_settings
from flower_vfl.specs import parse_spec
from flower_vfl.strategies import build_defense


def leak_of(text: str, worse: float = 0.0) -> float:
    """Return 0.5 + 0.5 / (1 + s) for Marvell, 0.5 + keep / 2 for compression."""
    name, given = parse_spec(text)
    if name == "marvell":
        return 0.5 + 0.5 / (1.0 + float(given["s"])) + worse
    return 0.5 + 0.5 * float(given["keep"]) if name == "gc" else 0.9


@pytest.mark.parametrize("worse", [0.0, 0.03])
def test_the_weakest_setting_is_found(worse: float) -> None:
    rounds: list[tuple[list[str], bool]] = []

    def measure(methods: Sequence[Method], all_seeds: bool) -> Mapping[str, float]:
        texts = [method.text for method in methods]
        rounds.append((texts, all_seeds))
        return {text: leak_of(text, worse * all_seeds) for text in texts}

    texts = ["none", "marvell", "gc:keep=0.5", "max-norm"]
    none, marvell, gc, norm = find_settings(
        [parse_method(text) for text in texts], 0.65, measure
    )
    assert none.at(none.strong).text == "none"
    assert norm.at(norm.strong).text == "max-norm"
    for found in (marvell, gc):
        text = found.at(found.strong).text
        assert 0.6 < leak_of(text, worse if "marvell" in text else 0.0) <= 0.65
        assert found.tried[text] == pytest.approx(
            leak_of(text, worse if "marvell" in text else 0.0)
        )
        assert len(found.tried) <= 8
    searched, last = rounds[0], rounds[-1]
    assert searched == (["marvell:s=5", "gc:keep=0.032"], False)
    assert last[1] and len(last[0]) == 4
    assert sum(all_seeds for _, all_seeds in rounds) == (1 if not worse else 2)


def test_what_never_keeps_the_target_is_shown_at_its_strongest() -> None:
    def measure(methods: Sequence[Method], all_seeds: bool) -> Mapping[str, float]:
        return {method.text: 0.8 for method in methods}

    (found,) = find_settings([parse_method("iso:t=1")], 0.65, measure)
    assert found.at(found.strong).text == "iso:t=3000" and found.chosen is None


@pytest.mark.parametrize(
    ("text", "strong"),
    [
        ("marvell:auc=0.65", "marvell:auc=0.65"),  # it decides its strength itself
        ("marvell | iso", "marvell | iso"),
        ("passive-1=iso; *=gc", "passive-1=iso; *=gc"),
        ("gafm + marvell:s=4", "gafm + marvell:s=500"),
        ("ppdl:eps=1", "ppdl:eps=1,theta=0.001"),
        ("label_dp=epsilon=1", "label_dp=epsilon=0.1"),
        ("label_dp=auc=0.6", "label_dp=auc=0.6"),
    ],
)
def test_which_part_of_a_method_is_varied(text: str, strong: str) -> None:
    search = Search(parse_method(text))
    assert search.at(1.0).text == strong
    assert search.at(1.0).over(RunConfig(), {}) == parse_method(strong).over(
        RunConfig(), {}
    )


def test_every_strength_can_be_built() -> None:
    for name, (parameter, weak, strong) in STRENGTHS.items():
        for value in (weak, math.sqrt(weak * strong), strong):
            if name == "label_dp":
                RunConfig(label_dp=f"{parameter}={value:g}")
            else:
                build_defense(f"{name}:{parameter}={value:g}")


def test_the_command_finds_settings_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []

    def pretend(config: RunConfig, engine: str) -> Any:
        runs.append(config.defense)
        leak = leak_of(config.defense) if config.defense else 1.0
        utility = 0.9 if "marvell" in config.defense else 0.8
        return document_of(config, utility, {"norm": leak}), {}

    monkeypatch.setattr(trials_module, "run_trial", pretend)
    monkeypatch.setattr(options, "write_report", lambda folder: folder)
    arguments = ["compare", "--defense", "gc", "--defense", "marvell", "--seeds", "2"]
    arguments += ["--out", str(tmp_path), "--target-leak", "0.65"]
    code, out, err = call(capsys, monkeypatch, *arguments, "--json")
    assert (code, err) == (0, "")
    found, made = json.loads(out), len(runs)
    names = [row["defense"].partition(":")[0] for row in found["rows"]]
    assert names == ["none", "marvell", "gc"]  # by utility
    assert found["verdict"][0].startswith("Choose marvell:s=")
    assert found["tried"]["marvell"]["marvell:s=5"] == pytest.approx(0.5 + 0.5 / 6)
    code, out, _ = call(capsys, monkeypatch, *arguments)
    assert code == 0 and len(runs) == made  # nothing is run again
    assert load_report(tmp_path).verdict == found["verdict"]
    arguments[-1] = "0.50001"  # no defense keeps it: the report says so too
    code, out, _ = call(capsys, monkeypatch, *arguments, "--json")
    told = json.loads(out)["verdict"]
    assert told[0].startswith("No defense keeps") and code == 0
    assert load_report(tmp_path).verdict == told
    arguments[-1] = "0.65"
    code, out, _ = call(capsys, monkeypatch, *arguments)
    assert "tried for marvell: marvell:s=5 0.58, " in out
    for wrong in ("0.4", "1.5"):
        code, _, err = call(capsys, monkeypatch, *arguments[:-1], wrong)
        assert code == 2 and "--target-leak must be from 0.5 to 1" in err
