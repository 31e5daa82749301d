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

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from victims import complete, train

from flower_vfl.leakage.completion import CompletionResult, ModelCompletion
from flower_vfl.leakage.mixmatch import Inputs, can_mix, completion_scores
from flower_vfl.parties.schedule import TEST, TRAIN
from flower_vfl.simulations.config import RunConfig


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
    attack = "active" if malicious else ""
    trained = train(replace(case.run, seed=seed, attack=attack))
    party, labels = trained.attacker, trained.labels
    assert party.model is not None
    result = complete(case.attack, trained, party.model, seed)
    train_rows, test_rows = trained.rows(TRAIN), trained.rows(TEST)
    known = train_rows[list(result.rows)]
    rest = train_rows[~torch.isin(train_rows, known)]
    linear = linear_scores(party.features, labels, known, [rest, test_rows])
    found = [scores[result.metric] for scores in linear]
    return Outcome(
        result, (found[0], found[1]), trained.document["final"]["test_accuracy"]
    )


def report(name: str, kind: str, outcomes: list[Outcome], paper: str) -> None:
    """Print one line."""
    first = outcomes[0].result
    columns = [
        (
            result.train_success,
            result.test_success,
            result.baseline_train_success,
            result.baseline_test_success,
        )
        for result in (outcome.result for outcome in outcomes)
    ]
    success, test, base, base_test = (
        f"{statistics.mean(values):.3f}±{statistics.pstdev(values):.3f}"
        for values in zip(*columns, strict=True)
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
