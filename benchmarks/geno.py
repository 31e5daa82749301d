"""Does Geno find a malicious party? Detection rate and false alarms on real data.

Three passive parties train with Geno switched on; the first attacks, the others are
honest. Geno sees the norm of the gradient that the label party makes for each party,
and withholds it where the norm is above λ. One line for each dataset and attack, over
all seeds:

- detected: share of the attacker's steps, from the begin of the attack, withheld;
- false alarms: share of the honest parties' steps withheld, of all three if none
  attacks;
- norm: the median norm of the attacker's gradient from the begin of the attack over the
  same in an honest run, without Geno: what there is to be seen;
- drift: the same of how far its embeddings move from one epoch to the next, which the
  label party sees too: the mean distance of the embeddings of the same rows over their
  mean length; and how far apart the honest parties are in that;
- the split model's test metric.

The attacks: ``malicious`` is the active attack of Fu et al., MaliciousAdam or
MaliciousSGD, from the first step, or ``late``, from the middle of the training on, when
Geno knows what the party's gradients are like; ``rate`` multiplies its learning rate
instead, and ``gradient`` the gradient itself on its way to Geno: a party cannot do
that, but it is what a norm can show. λ is learned (Geno's default), or fixed at the
largest norm of an honest run with another seed.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor

from flower_vfl.attacks.malicious import MaliciousAdam, MaliciousSGD
from flower_vfl.client_app import vertical_client_app
from flower_vfl.grid import InProcessGrid
from flower_vfl.label import LabelParty, LabelStep
from flower_vfl.metrics import MAIN_METRIC
from flower_vfl.passive import PassiveParty
from flower_vfl.sessions import node_name
from flower_vfl.simulations.app import make_strategy
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.nodes import label_at, passive_at
from flower_vfl.simulations.optimizers import build_optimizer
from flower_vfl.strategies.geno import Geno, gradient_norm
from flower_vfl.strategies.no_defense import NoDefense
from flower_vfl.transform import Batch

ATTACKER = "passive-1"
OTHER_SEED = 100
EPOCHS = {"spambase": 20, "credit-default": 6}
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
    *(Case(f"malicious sgd, γ {g}", g, optimizer=SGD) for g in (1, 25)),
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


def watched(party: LabelParty, drifts: dict[str, list[float]]) -> LabelParty:
    """Keep how far embeddings have moved since the epoch before."""
    train = party.train_step
    before: dict[str, Tensor] = {}

    def step(
        step: int, epoch: int, index: int, embeddings: Mapping[str, Tensor]
    ) -> LabelStep:
        rows = party.agreed().training_rows(epoch, index)
        for name, embedding in embeddings.items():
            known = before.setdefault(
                name, torch.zeros(party.rows, embedding[0].numel())
            )
            now = embedding.flatten(1)
            if epoch > 1:
                moved = (now - known[rows]).norm(dim=1).mean() / now.norm(dim=1).mean()
                drifts.setdefault(name, []).append(float(moved))
            else:  # there is nothing to compare with
                drifts.setdefault(name, []).append(math.nan)
            known[rows] = now
        return train(step, epoch, index, embeddings)

    party.train_step = step  # type: ignore[method-assign]
    return party


def middle(values: Iterable[float]) -> float:
    """Return the median of the numbers among some values."""
    return statistics.median(value for value in values if not math.isnan(value))


@dataclass
class Outcome:
    """What one run gave."""

    withheld: dict[str, list[float]]
    norms: dict[str, list[float]]
    drifts: dict[str, list[float]]
    score: float
    start: int

    def attacked(self, values: list[float]) -> list[float]:
        """Return the part of a series from the begin of the attack on."""
        return values[self.start - 1 :]


def run(dataset: str, case: Case, seed: int, geno: Geno | None) -> Outcome:
    """Train once."""
    config = RunConfig(
        dataset=dataset,
        seed=seed,
        parties=3,
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

    drifts: dict[str, list[float]] = {}

    def label(context: Context) -> LabelParty:
        return watched(label_at(context), drifts)

    strategy = make_strategy(config, False)
    strategy.transforms = [observer] if geno is None else [observer, geno]
    app = vertical_client_app(passive, label)
    with InProcessGrid(app, 4, config.to_run_config()) as grid:
        result = strategy.start(grid, num_rounds=config.epochs)
    withheld = {
        name.partition("/")[2]: series["values"]
        for name, series in result.series.items()
        if name.startswith("withheld/")
    }
    final = list(result.evaluate_metrics_clientapp.values())[-1]
    score = float(final[f"test_{MAIN_METRIC['binary']}"])  # type: ignore[arg-type]
    return Outcome(withheld, observer.norms, drifts, score, observer.start)


@cache
def undefended(dataset: str, case: Case, seed: int) -> Outcome:
    """Train once without Geno."""
    return run(dataset, case, seed, None)


def line(dataset: str, case: Case, seeds: int, lambda_: float | None) -> str:
    """Return what one attack came to."""
    found, ratios, drifts, spread = [], [], [], []
    for seed in range(seeds):
        found.append(run(dataset, case, seed, Geno(lambda_)))
        plain = undefended(dataset, case, seed)
        reference = undefended(dataset, case.honest, seed)
        ratios.append(
            statistics.median(plain.attacked(plain.norms[ATTACKER]))
            / statistics.median(plain.attacked(reference.norms[ATTACKER]))
        )
        seen = {
            name: middle(plain.attacked(values))
            for name, values in reference.drifts.items()
        }
        drifts.append(middle(plain.attacked(plain.drifts[ATTACKER])) / seen[ATTACKER])
        spread.append(max(seen.values()) / min(seen.values()))
    detected = [v for o in found for v in o.attacked(o.withheld[ATTACKER])]
    others = [
        value
        for outcome in found
        for party, values in outcome.withheld.items()
        if party != ATTACKER or not case.attacks
        for value in values
    ]
    rate = f"{statistics.mean(detected):.3f}" if case.attacks else "-"
    kind = "learned" if lambda_ is None else f"{lambda_:.3g}"
    return (
        f"| {dataset} | {case.name} | {kind} | {rate} | {statistics.mean(others):.4f} "
        f"| {statistics.mean(ratios):.2f} "
        f"| {statistics.mean(drifts):.2f} ({statistics.mean(spread):.2f}) "
        f"| {statistics.mean(o.score for o in found):.3f} |"
    )


def main() -> None:
    """Print one line per dataset, attack and kind of λ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--datasets", nargs="+", default=list(EPOCHS), choices=EPOCHS)
    arguments = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    head = (
        "dataset | attack | λ | detected | false alarms | norm | embedding | test AUC"
    )
    print(f"| {head} |")
    print("|---|---|---|---|---|---|---|---|")
    for dataset in arguments.datasets:
        for case in CASES:
            print(line(dataset, case, arguments.seeds, None), flush=True)
        norms = undefended(dataset, CASES[0], OTHER_SEED).norms
        largest = max(norm for values in norms.values() for norm in values)
        for case in CASES:
            if case.name in FIXED:
                print(line(dataset, case, arguments.seeds, largest), flush=True)


if __name__ == "__main__":
    main()
