"""Geno by permutation: does what the label party relies on tell who attacks it.

Geno looks at how far embeddings move for their gradients, which tells nothing where
bottom models have batch norm. The label party can also permute one party's embedding
within a batch: the loss rises by as much as its top model relies on that party. This
script tries that on CIFAR-10 with batch norm (three strips of an image, 2,000 images)
against ``MaliciousAdam`` and ``MaliciousSGD`` at the first party.

At every step the rise of the loss is measured for each party. A party's reliance is
the median of its last 50 rises over that of the other parties. It is compared with the
other parties (``ratio``), and with its own first value (``growth``). One line for each
kind of run, over the seeds: the smallest, median and largest value over runs of the
maximum that the first party reached, and the same for the honest parties.

Limits are chosen on seeds from 100 on: just above what any honest party reached there.
Then new seeds, from 10 on, are judged with them: runs in which the attacker was found,
and honest runs with a false alarm, for each limit alone and for both together.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd
import torch
from flwr.app import Context
from geno import ADAM, ATTACKER, PARTIES, SGD, Case, Observer, attacking
from torch import Tensor

from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.objectives.base import Outcome
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.protocol.client_app import vertical_client_app
from flower_vfl.protocol.replay import node_name
from flower_vfl.simulations.app import label_at, make_strategy, passive_at
from flower_vfl.simulations.config import RunConfig

STEPS = 50  # over which a reliance is a median
MARGIN = 1.05  # of a limit over what honest parties reached
TESTED, CHOSEN = 10, 100  # first seeds
HONEST = (Case("honest adam"), Case("honest sgd", optimizer=SGD))
ATTACKS = tuple(
    Case(f"{when}malicious {name}, γ {gamma}", gamma, late=bool(when), optimizer=text)
    for name, text in (("adam", ADAM), ("sgd", SGD))
    for gamma in (5, 25)
    for when in ("", "late ")
)


@dataclass(frozen=True)
class Reached:
    """The largest ratio and growth of each party of a run."""

    ratio: dict[int, float]
    growth: dict[int, float]


def rises(objective: LabelParty, kept: list[list[float]], width: int) -> None:
    """Measure at every step how much the loss rises without each party."""
    task = objective.objective
    inner: Callable[[Tensor, Tensor], Outcome] = task.step
    draws = torch.Generator().manual_seed(0)

    def step(embedding: Tensor, labels: Tensor) -> Outcome:
        with torch.no_grad():
            base = float(task.loss(task.top(embedding), labels))
            found = []
            for party in range(PARTIES):
                changed = embedding.clone()
                own = slice(party * width, (party + 1) * width)
                order = torch.randperm(len(changed), generator=draws)
                changed[:, own] = embedding[order, own]
                found.append(float(task.loss(task.top(changed), labels)) - base)
        kept.append(found)
        return inner(embedding, labels)

    task.step = step  # type: ignore[method-assign]


def run(case: Case, seed: int, limit: int, epochs: int) -> Reached:
    """Train once and return what each party reached."""
    config = RunConfig(
        dataset="cifar10",
        limit=limit,
        bottom="cnn:batch_norm=true,stride=2",
        top="ladsg-fcnn4",
        width=32,
        batch_size=64,
        seed=seed,
        parties=PARTIES,
        epochs=epochs,
        optimizer=case.optimizer,
        evaluate_every=epochs,
    )
    observer = Observer(1.0, epochs // 2 + 1 if case.late else 1)
    kept: list[list[float]] = []

    def passive(context: Context) -> PassiveParty:
        party = passive_at(context)
        if node_name(context) == ATTACKER and case.attacks:
            party.make_optimizer = attacking(case, observer)
        return party

    def label(context: Context) -> LabelParty:
        party = label_at(context)
        rises(party, kept, config.width)
        return party

    strategy = make_strategy(config, False)
    strategy.defense = replace(strategy.defense, what=[observer])
    app = vertical_client_app(passive, label)
    with InProcessGrid(app, PARTIES + 1, config.to_run_config()) as grid:
        strategy.start(grid, num_rounds=epochs)
    smooth = pd.DataFrame(kept).rolling(STEPS).median().dropna()
    smooth = smooth.clip(lower=1e-3)
    ratios = pd.DataFrame(
        {p: smooth[p] / smooth.drop(columns=p).median(axis=1) for p in smooth}
    )
    growth = ratios / ratios.iloc[0]
    return Reached(dict(ratios.max()), dict(growth.max()))


def spread(values: list[float]) -> str:
    """Return the smallest, median and largest value."""
    return f"{min(values):.2f} {statistics.median(values):.2f} {max(values):.2f}"


def main() -> None:
    """Choose limits, then judge new seeds with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--honest", type=int, default=18, help="seeds per optimizer")
    parser.add_argument("--attacked", type=int, default=3, help="seeds per attack")
    parser.add_argument("--limit", type=int, default=2000, help="images")
    parser.add_argument("--epochs", type=int, default=8)
    text = "ratio and growth; without them they are chosen on seeds from 100 on"
    parser.add_argument("--limits", type=float, nargs=2, help=text)
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)

    def runs(case: Case, first: int, count: int) -> list[Reached]:
        seeds = range(first, first + count)
        found = [run(case, seed, given.limit, given.epochs) for seed in seeds]
        attackers = [0] if case.attacks else []
        others = [p for p in range(PARTIES) if p not in attackers]
        for kind in ("ratio", "growth"):
            values = [getattr(each, kind) for each in found]
            own = spread([each[0] for each in values])
            honest = spread([each[p] for each in values for p in others])
            print(f"| {first} | {case.name} | {kind} | {own} | {honest} |", flush=True)
        return found

    print("| seeds from | run | measure | first party | honest parties |")
    print("|---|---|---|---|---|")
    kinds = ("ratio", "growth")
    limits = dict(zip(kinds, given.limits or (), strict=False))
    if not limits:
        few = max(given.honest // 3, 1)
        known = [each for case in HONEST for each in runs(case, CHOSEN, few)]
        for kind in kinds:
            largest = max(max(getattr(each, kind).values()) for each in known)
            limits[kind] = MARGIN * float(largest)
        print(f"limits: {limits}")
    attacked = {case.name: runs(case, TESTED, given.attacked) for case in ATTACKS}
    honest = [r for case in HONEST for r in runs(case, TESTED, given.honest)]

    def above(each: Reached, party: int, kinds: tuple[str, ...]) -> bool:
        return all(getattr(each, kind)[party] > limits[kind] for kind in kinds)

    for chosen in (("ratio",), ("growth",), kinds):
        wrong = sum(any(above(r, p, chosen) for p in range(PARTIES)) for r in honest)
        print(f"{' and '.join(chosen)}: false alarms in {wrong} of {len(honest)} runs")
        for name, found in attacked.items():
            right = sum(above(each, 0, chosen) for each in found)
            also = sum(any(above(r, p, chosen) for p in (1, 2)) for r in found)
            print(f"  {name}: found {right} of {len(found)}, others accused in {also}")


if __name__ == "__main__":
    main()
