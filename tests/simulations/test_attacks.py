"""Attacks by name: on every gradient, and model completion after the training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_cases import call, training_losses
from flwr.app import Context, RecordDict

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks import ModelCompletion
from flower_vfl.leakage.attacks.malicious import MaliciousAdam, MaliciousSGD
from flower_vfl.leakage.monitor import Leakage
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.parties.schedule import TEST, TRAIN
from flower_vfl.simulations.app import passive_at
from flower_vfl.simulations.attacks import (
    Active,
    Passive,
    check_attacks,
    complete_models,
    completions_of,
    leakage_of,
    optimizer_of,
)
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import load_rows, make_passive
from flower_vfl.simulations.results import table
from flower_vfl.simulations.runtime.engines import run_and_attack, set_log
from flower_vfl.specs import split_specs

QUICK = "labels=20,steps=30"


@pytest.fixture(autouse=True)
def flower_log() -> Iterator[None]:
    """Give Flower's log back the level that the command changes."""
    logger = logging.getLogger("flwr")
    level = logger.level
    set_log(verbose=False)
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("norm", ["norm"]),
        ("norm, cosine ,mean", ["norm", "cosine", "mean"]),
        (
            "norm,mean:hard=true,passive:labels=40,seeds=3,median",
            ["norm", "mean:hard=true", "passive:labels=40,seeds=3", "median"],
        ),
        (
            "mean:hard=true,held_out=true , active:party=0, gamma = 2",
            ["mean:hard=true,held_out=true", "active:party=0, gamma = 2"],
        ),
        ("passive:head=8+4,seed=1,", ["passive:head=8+4,seed=1"]),
    ],
)
def test_commas_between_attacks_and_within_them(text: str, expected: list[str]) -> None:
    assert split_specs(text) == expected


def test_scores_and_completions_are_told_apart() -> None:
    config = RunConfig(
        attack="norm,passive:labels=10,mean:hard=true,active:party=2,gamma=3",
        leak_limit=0.7,
        leak_action="stop",
        leak_window=7,
        coalitions="passive-1+passive-2, all",
        leak_baseline=True,
        leak_layers=True,
    )
    assert leakage_of(config) == Leakage(
        attacks=("norm", "mean:hard=true"),
        limit=0.7,
        action="stop",
        window=7,
        coalitions=("passive-1+passive-2", "all"),
        baseline=True,
        layers=True,
    )
    assert completions_of(config) == {
        "passive:labels=10": Passive(labels=10),
        "active:party=2,gamma=3": Active(party=2, gamma=3.0),
    }


@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        ({}, False),
        ({"attack": "passive"}, False),
        ({"leak_window": 5}, False),
        ({"attack": "norm"}, True),
        ({"leak_limit": 0.7}, True),
        ({"coalitions": "all"}, True),
        ({"leak_baseline": True}, True),
        ({"leak_layers": True}, True),
    ],
)
def test_what_asks_for_a_measurement(settings: dict[str, Any], measured: bool) -> None:
    """Without a name, the attacks are those that fit the task."""
    assert (leakage_of(RunConfig(**settings)) is not None) == measured


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"attack": "nrom"}, "unknown attack 'nrom'.*passive"),
        ({"attack": "norm,completion:labels=40"}, "unknown attack 'completion'"),
        ({"attack": "passive:lables=40"}, "unknown parameter 'lables'"),
        ({"attack": "passive:labels=1"}, "labels must be at least 2"),
        ({"attack": "passive:seeds=0"}, "seeds must be at least 1"),
        ({"attack": "active:gamma=x"}, "gamma.*must be a number"),
        ({"attack": "passive:party=3"}, "party 3 cannot attack: choose 1 to 2"),
        ({"attack": "active", "optimizer": "adamw"}, "no malicious form.*adam or sgd"),
        ({"attack": "passive", "dataset": "diabetes"}, "a regression"),
        ({"attack": "active,passive:labels=9"}, "party 1 cannot combine attacks"),
        ({"attack": "active:party=0,active:party=2,gamma=9"}, "party 2 cannot combine"),
        ({"leak_action": "stop"}, "needs a leak limit"),
        ({"leak_action": "nope"}, "unknown action 'nope'"),
        ({"leak_limit": -1.0}, "between 0 and 1"),
    ],
)
def test_what_is_wrong_is_said_before_the_training(
    settings: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(**settings)
    with pytest.raises(ConfigError, match=problem):
        check_attacks(config)

    def train(*arguments: object) -> dict[str, Any]:
        raise AssertionError("it trained")

    monkeypatch.setattr(
        "flower_vfl.simulations.runtime.engines.ENGINES", {"none": train}
    )
    with pytest.raises(ConfigError, match=problem):
        run_and_attack(config, "none")


def test_attacks_that_go_together() -> None:
    for attack in (
        "passive:labels=10,passive:labels=20",
        "active:party=1,passive:party=2",
        "active:labels=10,active:labels=20",
        "norm,active:party=0",
    ):
        check_attacks(RunConfig(attack=attack))


def test_an_active_party_has_a_malicious_optimizer() -> None:
    config = RunConfig(
        attack="active:party=2,gamma=1.5", optimizer="adam:lr=0.2,weight_decay=0.1"
    )
    honest, bad = optimizer_of(config, 1), optimizer_of(config, 2)
    assert isinstance(honest, partial) and honest.func is torch.optim.Adam
    assert isinstance(bad, partial) and bad.func is MaliciousAdam
    assert bad.keywords == {"lr": 0.2, "weight_decay": 0.1, "gamma": 1.5}
    sgd = RunConfig(attack="active:party=0", optimizer="sgd:momentum=0.9,nesterov=true")
    for index in (1, 2):
        made = optimizer_of(sgd, index)([torch.nn.Parameter(torch.ones(1))])
        assert isinstance(made, MaliciousSGD)
        assert made.param_groups[0]["momentum"] == 0.9
        assert made.param_groups[0]["nesterov"] is True
    passive = optimizer_of(RunConfig(attack="passive:party=1,norm"), 1)
    assert isinstance(passive, partial) and passive.func is torch.optim.Adam


def at_node(**node: Any) -> Any:
    config = RunConfig(attack="active:party=1,gamma=2")
    context = Context(7, 1, node, RecordDict(), config.to_run_config())
    return passive_at(context).make_optimizer


def test_only_simulated_nodes_can_be_told_to_attack() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1))]
    simulated = {"num-partitions": 3}
    bad = at_node(**{"partition-id": 1, **simulated})
    assert isinstance(bad(parameters), MaliciousAdam)
    others = [
        {"partition-id": 2, **simulated},
        {"partition-id": 1, "role": "passive", "name": "bank", **simulated},
    ]
    for node in others:
        assert type(at_node(**node)(parameters)) is torch.optim.Adam


def test_completion_is_that_of_the_saved_modules(tmp_path: Path) -> None:
    attack = f"norm,passive:{QUICK},party=0,seeds=2,ema=0.9,lambda_u=1"
    parties = tmp_path / "parties"
    config = RunConfig(
        attack=attack, epochs=3, out=str(tmp_path), state_dir=str(parties)
    )
    document = run_and_attack(config, "in-process")
    found = document["completion"]
    assert [(entry["party"], entry["seed"]) for entry in found] == [
        ("passive-1", 0),
        ("passive-1", 1),
        ("passive-2", 0),
        ("passive-2", 1),
    ]
    kept = json.loads((tmp_path / "result.json").read_text())
    assert kept["completion"] == found == complete_models(config, parties)
    leaks = table(kept).query("metric == 'leak'")
    assert set(leaks["party"]) == {"passive-1", "passive-2"}

    # The same by hand, for the second party with the second set of known labels.
    rows, label = load_rows(config, 2), load_rows(config, 0)
    model = make_passive(config, rows).model
    model.load_state_dict(DirectoryStore(parties / "passive-2").load("final")["model"])
    assert label.labels is not None
    truth = torch.from_numpy(np.asarray(label.labels, dtype=np.int64))
    train, test = (torch.from_numpy(rows.codes == code) for code in (TRAIN, TEST))
    result = ModelCompletion(labels=20, steps=30, ema=0.9, lambda_u=1.0, seed=1).run(
        model,
        tuple(part[train] for part in rows.data.inputs),
        truth[train],
        2,
        tuple(part[test] for part in rows.data.inputs),
        truth[test],
    )
    assert found[3]["metric"] == result.metric
    assert found[3]["train"] == result.train_success
    assert found[3]["test"] == result.test_success


def test_nothing_of_a_temporary_folder_is_left() -> None:
    config = RunConfig(attack=f"passive:{QUICK}", epochs=1)
    document = run_and_attack(config, "in-process")
    assert RunConfig(**document["config"]) == config
    assert len(document["completion"]) == 1


def test_a_malicious_optimizer_trains_another_model() -> None:
    """At its own party only: the others differ because they train with it."""
    losses = []
    for attack in ("passive", "active", "active:gamma=0"):
        quick = f"{attack}{',' if ':' in attack else ':'}labels=4,steps=1"
        document = run_and_attack(RunConfig(attack=quick, epochs=2), "in-process")
        losses.append(training_losses(document))
    assert losses[1][1] != losses[0][1]
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5)  # a γ of 0 is honest


def test_every_option_on_the_command_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--epochs", "3", "--batch-size", "64", "--parties", "3"]
    arguments += ["--attack", "norm,cosine,mean,median", "--leak-baseline"]
    arguments += ["--attack", f"passive:{QUICK},seeds=2"]
    arguments += ["--attack", f"active:party=2,{QUICK}", "--leak-layers"]
    arguments += ["--coalitions", "passive-1+passive-3,all", "--leak-window", "4"]
    arguments += ["--leak-limit", "0.6", "--leak-action", "raise"]
    arguments += ["--defense", "iso:t=0.1", "--out", str(tmp_path)]
    code, output, error = call(capsys, monkeypatch, "run", *arguments, "--json")
    assert code == 0, error
    document = json.loads(output)
    assert document == json.loads((tmp_path / "result.json").read_text())
    coalitions = {"passive-1+passive-3", "passive-1+passive-2+passive-3"}
    three = {f"passive-{i}" for i in (1, 2, 3)}
    records = table(document)
    leaks = records.query("metric == 'leak'")
    assert set(leaks["party"]) == coalitions | three
    assert "passive-1" in set(records.query("metric == 'leak_random'")["party"])
    second = leaks.query("party == 'passive-2'")
    assert set(second["attack"]) == {"norm", "cosine", "mean", "median"}
    assert second.query("attack == 'norm'")["layer"].any()
    assert "passive-1" in set(records.query("metric == 'leak_limit'")["party"])
    attackers = [
        (entry["attack"].partition(":")[0], entry["party"], entry["seed"])
        for entry in document["completion"]
    ]
    assert attackers == [
        ("passive", "passive-1", 0),
        ("passive", "passive-1", 1),
        ("active", "passive-2", 0),
    ]


def test_a_person_is_shown_what_leaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    arguments = ["--epochs", "2", "--attack", f"norm,mean,passive:{QUICK},seeds=2"]
    arguments += ["--leak-limit", "0.7", "--leak-action", "stop", "--leak-window", "2"]
    code, output, error = call(
        capsys, monkeypatch, "run", *arguments, "--leak-layers", "--leak-baseline"
    )
    assert code == 0, error
    for words in (
        "leak AUC, mean over all batches (0.5: nothing leaks)",
        "passive-2 random",
        "layer ",
        "model completion, and what the known labels alone achieve",
        " ± ",
        "stopped early: the leak limit was exceeded for passive-1, passive-2",
    ):
        assert words in output
    _, output, _ = call(
        capsys,
        monkeypatch,
        *("run", "--dataset", "diabetes", "--epochs", "2", "--attack", "norm,direct"),
    )
    assert "|rho| of score and label" in output and "leak AUC" not in output


def test_a_person_is_shown_who_is_suspected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "run --dataset breast-cancer --batch-size 64 --epochs 15 --defense geno"
    attack = "active:gamma=25,labels=40,steps=2"
    code, out, _ = call(capsys, monkeypatch, *text.split(), "--attack", attack)
    assert code == 0
    assert "passive-1 is suspected from step" in out
    assert "passive-2 is suspected" not in out
    assert "got no gradient" not in out


def test_settings_of_a_file_with_lists_and_tables(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        epochs = 2
        attack = ["norm,mean:hard=true", "passive:{QUICK}"]
        leak-limit = 0.6
        leak-window = 2
        leak-baseline = true
        coalitions = "all"
        out = "{tmp_path / "first"}"
        defense-at = "label"

        [defense]
        name = "iso"
        t = 2.0
        """
    )
    code, output, error = call(
        capsys, monkeypatch, "run", "--config", str(file), "--json"
    )
    assert code == 0, error
    document = json.loads(output)
    config = document["config"]
    assert config["attack"] == f"norm,mean:hard=true,passive:{QUICK}"
    assert (config["defense"], config["defense_at"]) == ("iso:t=2.0", "label")
    both = table(document).query("metric == 'leak' and party == 'passive-1+passive-2'")
    assert set(both["attack"]) == {"norm", "mean:hard=true"}
    assert document == json.loads((tmp_path / "first" / "result.json").read_text())

    # What the command line says comes first.
    more = ["--attack", "cosine", "--epochs", "1", "--out", str(tmp_path / "second")]
    code, output, error = call(
        capsys, monkeypatch, "run", "--config", str(file), *more, "--json"
    )
    assert code == 0, error
    document = json.loads(output)
    assert document["config"]["attack"] == "cosine"
    assert len(training_losses(document)) == 1
    assert set(table(document).query("metric == 'leak'")["attack"]) == {"cosine"}
    assert document.get("completion") is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--attack", "nope"], "known: active, cosine, direct"),
        (["--attack", "norm", "--coalitions", "passive-1+me"], "passive-2"),
        (["--leak-limit", "0.7", "--leak-action", "raise"], "iso, noisy-gradients"),
        (["--attack", "cosine", "--dataset", "diabetes"], "needs classes"),
    ],
)
def test_a_wrong_argument_says_what_would_be_right(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, _, error = call(capsys, monkeypatch, "run", *arguments)
    assert code in (1, 2)
    assert expected in error
    assert "Traceback" not in error
