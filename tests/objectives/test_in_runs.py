"""Every objective in whole runs: one piece, resumed, and below every transform."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from flwr.app import Context, Message
from torch import Tensor, nn
from vertical_cases import (
    COLUMNS,
    ROWS,
    WIDTH,
    HookedGrid,
    StatelessGrid,
    assert_equal,
    features,
    final_states,
    losses,
    scores,
)
from vertical_cases import labels as binary_labels

from flower_vfl import (
    InProcessGrid,
    LabelParty,
    Objective,
    PassiveParty,
    in_process,
    vertical_client_app,
)
from flower_vfl.objectives import GAFM, GAFMOriginal, KDk, LADistill
from flower_vfl.parties.schedule import TRAIN, split_rows
from flower_vfl.protocol.messages import Verb
from flower_vfl.randomness import (
    Noise,
    RandomState,
    derive_seed,
    generator,
    tensor_digest,
)
from flower_vfl.strategies import (
    DEFENSES,
    Checkpoints,
    Defense,
    VerticalStrategy,
    build_defense,
)

ADAM = partial(torch.optim.Adam, lr=0.01)
EPOCHS = 2
SHORT: dict[str, Any] = {"teacher_epochs": 5}


def values() -> Tensor:
    return features(0)[:, 0] * 3 + 20


def three_classes() -> Tensor:
    return (features(1)[:, 0] > 0).long() + (features(2)[:, 0] > 0).long()


def teacher(inputs: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Dropout(0.2), nn.Linear(8, classes))


# Objectives over two passive parties of 3 columns each that are joined by their mean.
CASES: dict[str, tuple[Callable[[], Objective], Callable[[], Tensor]]] = {
    "gafm": (lambda: GAFM(WIDTH, squashed=False), binary_labels),
    "gafm-3": (lambda: GAFM(WIDTH, classes=3, delta=0.3), three_classes),
    "gafm-original": (GAFMOriginal, binary_labels),
    "gafm-original-regression": (
        lambda: GAFMOriginal("regression", gamma=1.0, center=20.0, scale=3.0),
        values,
    ),
    "ladistill": (
        lambda: LADistill(nn.Linear(WIDTH, 1), teacher(WIDTH, 2), **SHORT),
        binary_labels,
    ),
    "kdk": (
        lambda: KDk(nn.Linear(WIDTH, 3), teacher(WIDTH, 3), 3, k=2, **SHORT),
        three_classes,
    ),
    "ladistill-own": (
        lambda: LADistill(nn.Linear(WIDTH, 3), teacher(COLUMNS, 3), 3, k=2, **SHORT),
        three_classes,
    ),
}
every = pytest.mark.parametrize("name", CASES)


NOISE_SEED = 3


def make_label(name: str, context: Context | None = None, **options: Any) -> LabelParty:
    objective, labels = CASES[name]
    own: dict[str, Any] = {"trust_server": True}
    if name.endswith("-own"):
        own |= {"features": features(0), "model": nn.Linear(COLUMNS, WIDTH)}
    return LabelParty(
        labels(), objective(), optimizer=ADAM, device="cpu", **{**own, **options}
    )


def make_passive(context: Context) -> PassiveParty:
    number = int(context.node_config["partition-id"])
    model = nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.Dropout(0.2))
    return PassiveParty(features(number), model, device="cpu", optimizer=ADAM)


def app(name: str) -> Any:
    return vertical_client_app(make_passive, partial(make_label, name))


def strategy(folder: Path, every_step: int) -> VerticalStrategy:
    return VerticalStrategy(
        batch_size=16,
        seed=5,
        aggregation="mean",
        progress=False,
        defense=Defense(noise_seed=NOISE_SEED),
        checkpoints=Checkpoints(every=every_step, keep_final=True, folder=folder),
    )


def grid(name: str, folder: Path) -> InProcessGrid:
    return InProcessGrid(app(name), 3, {"state-dir": str(folder)})


class PowerCutError(Exception):
    """Ends a run where nobody expects it."""


@pytest.mark.parametrize(  # in the first and in the second epoch
    ("name", "count"), covering([*CASES], [2, 5], strength=1)
)
def test_a_run_resumed_in_mid_epoch_ends_as_the_undisturbed_one(
    name: str, count: int, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with grid(name, whole) as undisturbed:
        result = strategy(whole, 0).start(undisturbed, num_rounds=EPOCHS)
    expected = [final_states(whole), losses(result), scores(result)]

    seen = {"count": 0}

    def before(message: Message) -> None:
        seen["count"] += message.metadata.message_type == Verb.TRAIN_STEP.value
        if seen["count"] == count + 1:
            raise PowerCutError

    with grid(name, cut) as first, pytest.raises(PowerCutError):
        strategy(cut, 1).start(HookedGrid(first, before), num_rounds=EPOCHS)
    with grid(name, cut) as again:
        resumed = strategy(cut, 1).start(again, num_rounds=EPOCHS, resume=True)
    assert_equal([final_states(cut), losses(resumed), scores(resumed)], expected)


@every
def test_a_run_without_memory_is_the_same_run(name: str, tmp_path: Path) -> None:
    found = []
    for folder, stateless in ((tmp_path / "a", False), (tmp_path / "b", True)):
        config = {"state-dir": str(folder)}
        made = StatelessGrid(app(name), 3, config) if stateless else grid(name, folder)
        result = strategy(folder, 0).start(made, num_rounds=2)
        found.append([final_states(folder), losses(result)])
    assert_equal(found[0], found[1])


TRANSFORMS = [*DEFENSES, "sgsub | geno", "marvell:s=4 | gc:keep=0.5"]


def fits(name: str, defense: str) -> bool:
    """Marvell hides classes; a regression has none."""
    return not ("regression" in name and "marvell" in defense)


@pytest.mark.parametrize(
    ("name", "defense"),
    covering([*CASES], TRANSFORMS, strength=1, allowed=fits),
)
def test_every_objective_composes_with_every_transform(name: str, defense: str) -> None:
    """The transform sees the objective's gradient, and the parties what it made."""
    torch.manual_seed(0)
    passive = [
        PassiveParty(
            features(i), nn.Linear(COLUMNS, WIDTH), device="cpu", optimizer=ADAM
        )
        for i in (1, 2)
    ]
    seen: list[Tensor] = []
    built = build_defense(defense)

    class Watching:
        requires_labels = built.requires_labels
        state_dict = built.state_dict
        load_state_dict = built.load_state_dict

        def __call__(self, gradient: Tensor, batch: Any) -> Tensor | None:
            seen.append(gradient)
            return built(gradient, batch)

    label = make_label(name, trust_server=True)
    with in_process([label, *passive]) as parties:
        result = VerticalStrategy(
            batch_size=16, seed=1, aggregation="mean", defense=[Watching()]
        ).start(parties, num_rounds=2)
    assert len(seen) == 2 * 2 * 3
    assert all(gradient.shape[1] == WIDTH for gradient in seen)
    assert all(torch.isfinite(gradient).all() for gradient in seen)
    assert set(losses(result)) == {1, 2}
    for party in passive:
        assert party.model is not None
        assert all(torch.isfinite(p).all() for p in party.model.parameters())


@every
def test_split_training_is_bit_equal_to_one_piece(name: str) -> None:
    """One model, one loop: the parties' mean, the objective, one optimizer each."""
    torch.manual_seed(0)
    models = [nn.Linear(COLUMNS, WIDTH) for _ in range(2)]
    label = make_label(name)
    own = [] if label.model is None else [label.model]
    twins = copy.deepcopy([*own, *models])
    objective = copy.deepcopy(label.objective)
    passive = [
        PassiveParty(features(i + 1), model, device="cpu", optimizer=ADAM)
        for i, model in enumerate(models)
    ]
    with in_process([label, *passive]) as parties:
        defense = Defense(noise_seed=NOISE_SEED)
        VerticalStrategy(
            batch_size=16, seed=5, aggregation="mean", defense=defense
        ).start(parties, num_rounds=3)

    data = ([features(0)] if own else []) + [features(1), features(2)]
    labels = objective.encode(CASES[name][1]())
    objective.configure(ADAM)
    training = torch.from_numpy((split_rows(ROWS, 5, 0.2) == TRAIN).nonzero()[0])
    objective.prepare((features(0),) if own else (), labels, training)
    optimizers = [ADAM(model.parameters()) for model in twins]
    stream = RandomState(derive_seed(5, "training", "label"))
    if objective.hides:
        stream = RandomState(Noise(NOISE_SEED, "training"))
    step = 0
    for epoch in (1, 2, 3):
        order = torch.randperm(len(training), generator=generator(5, "batches", epoch))
        for rows in training[order].split(16):
            parts = [m(x[rows]) for m, x in zip(twins, data, strict=True)]
            joined = parts[0]
            for part in parts[1:]:
                joined = joined + part
            joined = joined / len(parts)
            objective.rows = rows
            leaf = joined.detach().requires_grad_()
            step += 1
            received = [part.detach() for part in parts[len(own) :]]
            digests = [tensor_digest(part, NOISE_SEED, step) for part in received]
            objective.noise = Noise(NOISE_SEED, "objective", step, *digests)
            with stream:
                gradient = objective.step(leaf, labels[rows]).gradient
            for optimizer in optimizers:
                optimizer.zero_grad()
            joined.backward(gradient)
            for optimizer in optimizers:
                optimizer.step()
    for ours, theirs in zip([*own, *models], twins, strict=True):
        assert_equal(ours.state_dict(), theirs.state_dict())
    assert_equal(dict(label.objective.state_dict()), dict(objective.state_dict()))
