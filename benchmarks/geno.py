"""Does Geno find a malicious party? Detection rate and false alarms on real data.

Three passive parties train with Geno switched on; the first attacks, the others are
honest. Geno withholds a gradient whose norm is above λ, and suspects a party whose
embeddings move too far for the gradients that it gets; here with ``exclude``, so that
a suspect gets no gradients any more. One line for each dataset and attack, over all
seeds:

- recognised: runs in which the attacker was suspected after the attack had begun;
- wrongly: honest parties that were suspected, of all runs, the first party too if it
  does not attack;
- withheld: share of the attacker's steps, from the begin of the attack, withheld;
- false alarms: share of the honest parties' steps withheld;
- norm: the median norm of the attacker's gradient from the begin of the attack over the
  same in an honest run, when nothing is withheld: what there is for λ to see;
- response: the median of the attacker's response over that of the others, from the
  begin of the attack, when nothing is withheld;
- the split model's test metric.

The attacks: ``malicious`` is the active attack of Fu et al., MaliciousAdam or
MaliciousSGD, from the first step, or ``late``, from the middle of the training on;
``rate`` multiplies its learning rate instead, and ``gradient`` the gradient itself on
its way to Geno: a party cannot do that, but it is what a norm can show. λ is learned
(Geno's default), or fixed at the largest norm of an honest run with another seed.

Geno's limits of 5 and 2 were chosen on seeds 100 to 104 of the same datasets, after a
single limit of 4 had suspected an honest party in seeds 0 to 2 of credit default. So
the seeds here begin with 10.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pandas as pd
import torch
from flwr.app import Context
from torch import Tensor

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.leakage.attacks.malicious import MaliciousAdam, MaliciousSGD
from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.protocol.client_app import vertical_client_app
from flower_vfl.protocol.replay import node_name
from flower_vfl.simulations.app import label_at, make_strategy, passive_at
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.models.registry import build_optimizer
from flower_vfl.strategies.defenses.compose import NoDefense
from flower_vfl.strategies.defenses.geno import LARGEST_NORM, Geno, gradient_norm
from flower_vfl.transform import Batch

ATTACKER = "passive-1"
PARTIES = 3
FIRST_SEED, OTHER_SEED = 10, 100
EPOCHS = {"spambase": 20, "credit-default": 6, "cifar10": 8}
IMAGES = {"bottom": "cnn:batch_norm=true", "top": "ladsg-fcnn4", "batch_size": 128}
ADAM, SGD = RunConfig().optimizer, "sgd:lr=0.1,momentum=0.9"


@dataclass(frozen=True)
class Case:
    """How the first party attacks."""

    name: str
    gamma: float = 0.0
    rate: float = 1.0
    gradient: float = 1.0
    late: bool = False
    optimizer: str = ADAM

    @property
    def honest(self) -> Case:
        """The same party if it did not attack."""
        return Case("honest", late=self.late, optimizer=self.optimizer)

    @property
    def attacks(self) -> bool:
        """Whether it attacks at all."""
        return (self.gamma, self.rate, self.gradient) != (0.0, 1.0, 1.0)


FIXED = (
    "honest",
    "malicious adam, γ 1",
    "late malicious adam, γ 25",
    "late gradient x2",
    "late gradient x5",
)
CASES = (
    Case("honest"),
    *(Case(f"malicious adam, γ {gamma}", gamma) for gamma in (1, 5, 25)),
    *(Case(f"late malicious adam, γ {g}", g, late=True) for g in (1, 5, 25)),
    Case("honest sgd", optimizer=SGD),
    *(Case(f"malicious sgd, γ {g}", g, optimizer=SGD) for g in (1, 5, 25)),
    Case("late malicious sgd, γ 5", 5, late=True, optimizer=SGD),
    *(Case(f"late rate x{k}", rate=k, late=True) for k in (10, 100)),
    *(Case(f"late gradient x{k}", gradient=k, late=True) for k in (1.5, 2, 5, 10)),
)


class Observer(NoDefense):
    """Keeps the norm of every gradient, after an amplification of the attacker's."""

    def __init__(self, factor: float, epoch: int) -> None:
        self.factor, self.epoch = factor, epoch
        self.start = 0  # the first step of the attack, once it has begun
        self.norms: dict[str, list[float]] = {}

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        """Return the gradient as Geno is to see it."""
        if batch.epoch >= self.epoch and not self.start:
            self.start = batch.step
        if batch.party == ATTACKER and self.start:
            gradient = gradient * self.factor
        norm = gradient_norm(gradient.flatten(1))
        self.norms.setdefault(batch.party, []).append(norm)
        return gradient


def attacking(case: Case, observer: Observer) -> Callable[..., torch.optim.Optimizer]:
    """Return the attacker's optimizer, which is honest until the attack begins."""
    honest = build_optimizer(case.optimizer)
    assert isinstance(honest, partial)
    kinds: dict[Any, Any] = {
        torch.optim.Adam: MaliciousAdam,
        torch.optim.SGD: MaliciousSGD,
    }
    kind = kinds[honest.func]

    class Late(kind):  # type: ignore[misc,valid-type]
        begun = False

        def step(self, closure: Any = None) -> Any:
            """Take a step."""
            if observer.start and not self.begun:
                self.begun = True
                for group in self.param_groups:
                    group["gamma"], group["lr"] = case.gamma, group["lr"] * case.rate
            return super().step(closure)

    return partial(Late, **honest.keywords, gamma=0.0)


@dataclass
class Outcome:
    """What one run gave."""

    records: pd.DataFrame
    norms: dict[str, list[float]]
    score: float
    start: int

    def attacked(self, metric: str) -> list[float]:
        """Return a metric of the attacker from the begin of the attack on."""
        found = self.of(metric, ATTACKER)
        return found["value"][found["step"] >= self.start].tolist()

    def of(self, metric: str, party: str) -> pd.DataFrame:
        """Return the records of a metric of one party."""
        chosen = self.records["metric"].eq(metric) & self.records["party"].eq(party)
        return self.records[chosen]


def run(dataset: str, case: Case, seed: int, geno: Geno) -> Outcome:
    """Train once."""
    more: dict[str, Any] = IMAGES if dataset == "cifar10" else {}
    config = RunConfig(
        **more,
        dataset=dataset,
        seed=seed,
        parties=PARTIES,
        epochs=EPOCHS[dataset],
        optimizer=case.optimizer,
        evaluate_every=EPOCHS[dataset],
    )
    observer = Observer(case.gradient, config.epochs // 2 + 1 if case.late else 1)

    def passive(context: Context) -> PassiveParty:
        party = passive_at(context)
        if node_name(context) == ATTACKER:
            party.make_optimizer = attacking(case, observer)
        return party

    strategy = make_strategy(config, False)
    strategy.defense = replace(strategy.defense, what=[observer, geno])
    app = vertical_client_app(passive, label_at)
    with InProcessGrid(app, PARTIES + 1, config.to_run_config()) as grid:
        result = strategy.start(grid, num_rounds=config.epochs)
    final = list(result.evaluate_metrics_clientapp.values())[-1]
    task = "multiclass" if dataset == "cifar10" else "binary"
    score = float(final[f"test_{MAIN_METRIC[task]}"])  # type: ignore[arg-type]
    return Outcome(result.table(), observer.norms, score, observer.start)


@cache
def undefended(dataset: str, case: Case, seed: int) -> Outcome:
    """Train once with a Geno that only looks."""
    return run(dataset, case, seed, Geno(LARGEST_NORM))


def line(dataset: str, case: Case, seeds: int, lambda_: float | None) -> str:
    """Return what one attack came to."""
    runs, norms, responses = [], [], []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        runs.append(run(dataset, case, seed, Geno(lambda_, exclude=True)))
        plain = undefended(dataset, case, seed)
        reference = undefended(dataset, case.honest, seed)
        norms.append(
            statistics.median(plain.norms[ATTACKER][plain.start - 1 :])
            / statistics.median(reference.norms[ATTACKER][plain.start - 1 :])
        )
        responses += plain.attacked("response")
    honest = [
        (each.of("suspected", party)["value"], each.of("withheld", party)["value"])
        for each in runs
        for party in each.records["party"][
            each.records["metric"] == "withheld"
        ].unique()
        if party != ATTACKER or not case.attacks
    ]
    wrongly = sum(suspected.max() for suspected, _ in honest)
    alarms = [value for _, withheld in honest for value in withheld]
    recognised = withheld = "-"
    if case.attacks:
        found = sum(max(each.attacked("suspected")) for each in runs)
        recognised = f"{found:.0f} of {seeds}"
        steps = [value for each in runs for value in each.attacked("withheld")]
        withheld = f"{statistics.mean(steps):.3f}"
    kind = "learned" if lambda_ is None else f"{lambda_:.3g}"
    return (
        f"| {dataset} | {case.name} | {kind} | {recognised} "
        f"| {wrongly:.0f} of {len(honest)} | {withheld} "
        f"| {statistics.mean(alarms):.4f} | {statistics.mean(norms):.2f} "
        f"| {statistics.median(responses):.2f} "
        f"| {statistics.mean(each.score for each in runs):.3f} |"
    )


def main() -> None:
    """Print one line per dataset, attack and kind of λ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument(
        "--datasets", nargs="+", default=list(EPOCHS)[:2], choices=EPOCHS
    )
    known = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", default=known, choices=known)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    print(
        "| dataset | attack | λ | recognised | wrongly | withheld | false alarms "
        "| norm | response | test AUC |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    cases = [case for case in CASES if case.name in arguments.cases]
    for dataset in arguments.datasets:
        for case in cases:
            print(line(dataset, case, arguments.seeds, None), flush=True)
        fixed = [case for case in cases if case.name in FIXED and dataset != "cifar10"]
        if fixed:
            norms = undefended(dataset, CASES[0], OTHER_SEED).norms
            largest = max(norm for values in norms.values() for norm in values)
        for case in fixed:
            print(line(dataset, case, arguments.seeds, largest), flush=True)


if __name__ == "__main__":
    main()
