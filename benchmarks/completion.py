"""Success of the model-completion attack, passive and active, beside its baselines.

For each dataset and seed a vanilla split model is trained with two passive parties,
once by honest parties and once with a malicious optimizer at the first of them. That
party then completes its bottom model with a few auxiliary labels.

One line for each dataset and attack, mean and deviation over the seeds, of training and
test rows: success; what the auxiliary labels alone give, to a new model of the same
architecture and to a logistic regression on the party's features; the figure of LADSG
(tables 4 and 5), which has other amounts of data; the split model's own test metric.

How each set is attacked was chosen on validation rows of other seeds (100 to 102, fewer
for the slower sets): whether the bottom model is frozen, the weight of the unlabelled
loss (50 makes two classes collapse into one), the shift of images, the number of steps.
On a busy machine with one thread CIFAR-10 took 14 minutes, credit default 6 and the
other two 3 together.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import Context
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from flower_vfl.attacks.completed import completion_scores
from flower_vfl.attacks.completion import (
    CompletionResult,
    ModelCompletion,
    summarise_completion,
)
from flower_vfl.attacks.malicious import MaliciousAdam
from flower_vfl.attacks.mixmatch import Inputs, can_mix
from flower_vfl.client_app import vertical_client_app
from flower_vfl.grid import InProcessGrid
from flower_vfl.label import LabelParty
from flower_vfl.passive import PassiveParty
from flower_vfl.schedule import TEST, TRAIN
from flower_vfl.sessions import node_name
from flower_vfl.simulations.app import train
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.nodes import label_at, passive_at
from flower_vfl.simulations.optimizers import build_optimizer

ATTACKER = "passive-1"


@dataclass(frozen=True)
class Case:
    """One dataset: how the split model is trained, and how it is attacked."""

    run: RunConfig
    attack: ModelCompletion
    passive: str = "no figure"
    active: str = "no figure"


_TABLE = ModelCompletion(labels=100, steps=1024, freeze_bottom=True, lambda_u=5.0)
_LOAN = ("0.7897 (Loan)", "0.7729 (Loan)")

CASES = {
    # Two halves of the image, 4000 of them; LADSG: ResNet-20, 50 000 images, 50 labels.
    "cifar10": Case(
        RunConfig(
            dataset="cifar10",
            bottom="cnn:batch_norm=true",
            top="ladsg-fcnn4",
            width=64,
            optimizer="adam:lr=0.001",
            epochs=15,
            batch_size=128,
            evaluate_every=15,
        ),
        ModelCompletion(labels=40, steps=512, freeze_bottom=True, shift=0),
        "0.7632",
        "0.7826",
    ),
    "digits": Case(
        RunConfig(dataset="digits", top="ladsg-fcnn4", optimizer="adam:lr=0.001"),
        ModelCompletion(labels=40, steps=1024),
    ),
    "spambase": Case(
        RunConfig(dataset="spambase", top="ladsg-fcnn3", optimizer="adam:lr=0.001"),
        _TABLE,
        *_LOAN,
    ),
    "credit-default": Case(
        RunConfig(
            dataset="credit-default", top="ladsg-fcnn3", optimizer="adam:lr=0.001"
        ),
        _TABLE,
        *_LOAN,
    ),
}


def trained_parties(
    config: RunConfig, malicious: bool
) -> tuple[PassiveParty, LabelParty, dict[str, Any]]:
    """Train a split model; return the attacker, the label party and the metrics."""

    def passive(context: Context) -> PassiveParty:
        party = passive_at(context)
        if malicious and node_name(context) == ATTACKER:
            honest = build_optimizer(config.optimizer)
            assert isinstance(honest, partial) and honest.func is torch.optim.Adam
            party.make_optimizer = partial(MaliciousAdam, **honest.keywords)
        return party

    app = vertical_client_app(passive=passive, label=label_at)
    with InProcessGrid(app, config.parties + 1, config.to_run_config()) as grid:
        document = train(grid, config, "in-process", progress=False)
        parties = grid.parties()
    attacker, label = parties[ATTACKER], parties["label"]
    assert isinstance(attacker, PassiveParty) and isinstance(label, LabelParty)
    return attacker, label, document["final"]


def linear_scores(
    inputs: Inputs, labels: Tensor, known: Tensor, asked: list[Tensor]
) -> list[dict[str, float]]:
    """Return the scores of a logistic regression on the auxiliary labels alone."""
    columns = [
        part.float().flatten(1)
        if can_mix(part)
        else torch.cat([F.one_hot(c).float() for c in part.unbind(dim=1)], dim=1)
        for part in inputs
    ]
    joined = torch.cat(columns, dim=1)
    joined = (joined - joined.mean(dim=0)) / joined.std(dim=0).clamp_min(1e-6)
    model = LogisticRegression(max_iter=5000).fit(joined[known], labels[known])
    return [
        completion_scores(
            torch.from_numpy(model.predict_proba(joined[rows])), labels[rows]
        )
        for rows in asked
    ]


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    result: CompletionResult
    linear: tuple[float, float]
    split: float


def attack(case: Case, seed: int, malicious: bool) -> Outcome:
    """Train, attack, and compare."""
    config = replace(case.run, seed=seed)
    party, label, final = trained_parties(config, malicious)
    assert party.split is not None and label.raw_labels is not None
    train_rows = torch.from_numpy((party.split == TRAIN).nonzero()[0])
    test_rows = torch.from_numpy((party.split == TEST).nonzero()[0])
    labels = label.raw_labels.long()
    result = replace(case.attack, seed=seed).run(
        party.model,
        party.take(train_rows),
        labels[train_rows],
        int(labels.max()) + 1,
        party.take(test_rows),
        labels[test_rows],
    )
    known = train_rows[list(result.rows)]
    rest = train_rows[~torch.isin(train_rows, known)]
    linear = linear_scores(party.features, labels, known, [rest, test_rows])
    found = [scores[result.metric] for scores in linear]
    return Outcome(result, (found[0], found[1]), final["test_accuracy"])


def report(name: str, kind: str, outcomes: list[Outcome], paper: str) -> None:
    """Print one line."""
    first = outcomes[0].result
    summary = summarise_completion([outcome.result for outcome in outcomes])
    success, test, base, base_test = (
        f"{mean:.3f}±{deviation:.3f}" for mean, deviation in summary.values()
    )
    linear, linear_test = (
        f"{statistics.mean(values):.3f}"
        for values in zip(*(outcome.linear for outcome in outcomes), strict=True)
    )
    accuracy = statistics.mean(outcome.split for outcome in outcomes)
    print(
        f"{name} {kind} ({first.metric}, {len(first.rows)} labels): train {success}, "
        f"test {test}; labels alone {base}, {base_test}; linear {linear}, "
        f"{linear_test}; paper {paper}; split model's accuracy {accuracy:.3f}",
        flush=True,
    )


def main() -> None:
    """Attack every dataset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--datasets", nargs="+", default=list(CASES), choices=CASES)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    for name in arguments.datasets:
        case = CASES[name]
        for kind, paper in (("passive", case.passive), ("active", case.active)):
            malicious = kind == "active"
            seeds = range(arguments.seeds)
            report(name, kind, [attack(case, s, malicious) for s in seeds], paper)


if __name__ == "__main__":
    main()
