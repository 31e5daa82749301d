"""Attacks of a run by name: scores of gradients, and model completion at the end."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam

from flower_vfl.errors import ConfigError, check_name, require
from flower_vfl.leakage.attacks.malicious import MaliciousAdam, MaliciousSGD
from flower_vfl.leakage.attacks.registry import SCORE_ATTACKS
from flower_vfl.leakage.completion import ModelCompletion
from flower_vfl.leakage.monitor import Leakage, Membership
from flower_vfl.objectives import OptimizerFactory
from flower_vfl.parties.checkpoints import DirectoryStore
from flower_vfl.parties.schedule import TEST, TRAIN
from flower_vfl.simulations.models.registry import build_optimizer
from flower_vfl.specs import build_from_spec, parse_spec, split_specs

from .config import RunConfig, parts
from .models import build_bottom
from .parties import PartyRows, load_rows, make_passive


@dataclass(frozen=True)
class Passive(ModelCompletion):
    """Model completion by one passive party that trains honestly."""

    party: int = 1
    seeds: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.seeds >= 1, "seeds", "at least 1", self.seeds)

    def attackers(self, parties: int) -> list[int]:
        """Return the numbers of the passive parties that attack."""
        if not 0 <= self.party <= parties:
            known = f"choose 1 to {parties}, or 0 for all"
            raise ConfigError(f"party {self.party} cannot attack: {known}")
        return [self.party] if self.party else list(range(1, parties + 1))


@dataclass(frozen=True)
class Active(Passive):
    """Model completion by a party that trains with a malicious optimizer."""

    gamma: float = 1.0


COMPLETIONS: dict[str, Callable[..., Passive]] = {"passive": Passive, "active": Active}


def membership(joint: bool = False) -> Membership:
    """Return the mode of the spectral membership attack."""
    return "joint" if joint else "own"


MEMBERSHIP: dict[str, Callable[..., Membership]] = {"membership": membership}


def leakage_of(config: RunConfig) -> Leakage | None:
    """Return the leakage measurements of a run, None if there are none."""
    scores: list[str] = []
    told: Membership = ""
    for text in split_specs(config.attack):
        name, _ = parse_spec(text)
        if name in MEMBERSHIP:
            told = build_from_spec("attack", text, MEMBERSHIP)
        elif name in SCORE_ATTACKS:
            scores.append(text)
        else:
            check_name("attack", name, [*SCORE_ATTACKS, *COMPLETIONS, *MEMBERSHIP])
    leakage = Leakage(
        attacks=tuple(scores),
        limit=config.leak_limit or None,
        action=config.leak_action,  # type: ignore[arg-type]  # checked there
        window=config.leak_window,
        every=config.leak_every,
        coalitions=tuple(parts(config.coalitions)),
        baseline=config.leak_baseline,
        layers=config.leak_layers,
        membership=told,
    )
    idle = Leakage(window=leakage.window, every=leakage.every)
    return None if leakage == idle and not config.canaries else leakage


def check_attacks(config: RunConfig) -> None:
    """Refuse attacks that cannot work."""
    leakage_of(config)
    kinds: dict[int, float | None] = {}
    for attack in completions_of(config).values():
        gamma = attack.gamma if isinstance(attack, Active) else None
        for index in attack.attackers(config.parties):
            if kinds.setdefault(index, gamma) != gamma:  # it has one optimizer
                remedy = "run once for passive, once for each gamma of active"
                raise ConfigError(f"party {index} cannot combine attacks: {remedy}")
    for index in kinds:
        optimizer_of(config, index)
    if kinds:
        _classes_of(load_rows(config, 0))


def _classes_of(label: PartyRows) -> Tensor:
    """Return the class of every row; refuse a regression."""
    if label.task == "regression" or label.labels is None:
        raise ConfigError("model completion infers classes; this task is a regression")
    return torch.tensor(label.labels.tolist(), dtype=torch.int64)


def completions_of(config: RunConfig) -> dict[str, Passive]:
    """Return the model-completion attacks of a run by their config strings."""
    return {
        text: build_from_spec("attack", text, COMPLETIONS)
        for text in split_specs(config.attack)
        if parse_spec(text)[0] in COMPLETIONS
    }


def optimizer_of(config: RunConfig, index: int) -> OptimizerFactory:
    """Return a passive party's optimizer, malicious if it attacks actively."""
    kinds: dict[Any, Any] = {Adam: MaliciousAdam, SGD: MaliciousSGD}
    honest = build_optimizer(config.optimizer)
    for attack in completions_of(config).values():
        if isinstance(attack, Active) and index in attack.attackers(config.parties):
            if honest.func not in kinds:
                text = f"there is no malicious form of '{config.optimizer}'"
                raise ConfigError(f"{text}; use adam or sgd")
            return partial(kinds[honest.func], **honest.keywords, gamma=attack.gamma)
    return honest


def complete_models(config: RunConfig, state_dir: Path) -> list[dict[str, Any]]:
    """Run the model-completion attacks of a run on its saved modules."""
    if config.threads:  # as for the parties, for equal results
        torch.set_num_threads(config.threads)
    found = []
    for text, attack in completions_of(config).items():
        for index in attack.attackers(config.parties):
            for seed, figures in _repeat(config, state_dir, attack, index):
                entry = {"attack": text, "party": f"passive-{index}", "seed": seed}
                found.append(entry | figures)
    return found


def _repeat(
    config: RunConfig, state_dir: Path, attack: Passive, index: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the seed and the success of each repetition of an attack."""
    rows, label = load_rows(config, index), load_rows(config, 0)
    party, truth = make_passive(config, rows), _classes_of(label)
    state = DirectoryStore(state_dir / f"passive-{index}").load("final")
    party.model.load_state_dict(state["model"])
    spec = rows.data.spec
    assert spec is not None  # it is a passive party

    def split(code: int) -> tuple[tuple[Tensor, ...], Tensor]:
        chosen = torch.from_numpy(rows.codes == code)
        inputs = tuple(part[chosen] for part in rows.data.inputs)
        return inputs, truth[chosen]

    train, test = split(TRAIN), split(TEST)
    for repetition in range(attack.seeds):
        own = replace(attack, seed=attack.seed + repetition)
        result = own.run(
            party.model.cpu(),
            *train,
            len(label.classes),
            test_inputs=test[0] if len(test[1]) else None,
            test_labels=test[1] if len(test[1]) else None,
            fresh=lambda: build_bottom(config.bottom, spec, config.width),
        )
        figures = {
            "train": result.train_success,
            "test": result.test_success,
            "labels_only_train": result.baseline_train_success,
            "labels_only_test": result.baseline_test_success,
        }
        known = {k: None if v != v else v for k, v in figures.items()}  # no NaN in JSON
        yield own.seed, {"metric": result.metric, **known}
