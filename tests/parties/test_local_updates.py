"""Local updates: a plain PyTorch reference, the weights, and runs on every engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.serverapp import Grid
from resident_cases import PlainGrid
from resume_cases import PowerCutError, cut_at
from sealed_cases import EPOCHS, RecordingGrid, sealed_app, sealed_grid, strategy
from torch import Tensor, nn
from vertical_cases import (
    ADAM,
    COLUMNS,
    WIDTH,
    StatelessGrid,
    assert_equal,
    features,
    final_states,
    labels,
    losses,
    scores,
    simple_parties,
    train,
    weights,
)

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    LabelPrivacy,
    MeanSquaredError,
    PartyError,
    PassiveParty,
    in_process,
    resident,
)
from flower_vfl.grids.resident import ResidentGrid
from flower_vfl.objectives import GAFM, MID, DistanceCorrelation
from flower_vfl.parties.local_updates import (
    BatchCache,
    CachedBatch,
    LocalUpdates,
    update_passive,
)
from flower_vfl.parties.schedule import Plan, Schedule, split_rows
from flower_vfl.protocol.messages import Verb
from flower_vfl.strategies import Checkpoints

ROWS, SEED, STEPS, CACHE = 90, 4, 3, 2
THRESHOLD = 0.9  # high, so that some rows are below it


def models() -> tuple[list[nn.Module], nn.Module]:
    torch.manual_seed(1)
    bottoms: list[nn.Module] = [
        nn.Sequential(nn.Linear(COLUMNS, 6), nn.Tanh(), nn.Linear(6, WIDTH))
        for _ in range(2)
    ]
    return bottoms, nn.Sequential(nn.Linear(2 * WIDTH, 5), nn.ReLU(), nn.Linear(5, 1))


def cosine_weights(now: Tensor, cached: Tensor) -> Tensor:
    """Return the cosines of rows, written out."""
    product = (now * cached).sum(dim=1)
    cosine = product / (now.norm(dim=1) * cached.norm(dim=1)).clamp_min(1e-8)
    return torch.where(cosine < THRESHOLD, 0.0, cosine)


def reference(rate: float = 0.01) -> tuple[list[Tensor], int]:
    """Train the two parties and the label party in one plain loop.

    Returns all weights, and how many rows of local updates had no influence.
    """
    bottoms, top = models()
    optimizers = [torch.optim.Adam(m.parameters(), lr=rate) for m in (*bottoms, top)]
    data, truth = [features(i, ROWS) for i in (1, 2)], labels(ROWS).float()
    schedule = Schedule(split_rows(ROWS, SEED, 0.2), Plan(SEED, 16))
    exchanged: list[tuple[Any, ...]] = []  # the newest two batches
    uses: list[int] = []  # numbers of batches, the one used longest ago first
    number = dropped = 0
    for epoch in (1, 2):
        for rows in schedule.training_batches(epoch):
            sent = [model(x[rows]) for model, x in zip(bottoms, data, strict=True)]
            leaves = [z.detach().requires_grad_() for z in sent]
            for optimizer in optimizers:
                optimizer.zero_grad()
            output = top(torch.cat(leaves, dim=1))[:, 0]
            F.binary_cross_entropy_with_logits(output, truth[rows]).backward()
            got = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
            for z, gradient in zip(sent, got, strict=True):
                z.backward(gradient)
            for optimizer in optimizers:
                optimizer.step()
            exchanged = [*exchanged, (rows, [z.detach() for z in sent], got)][-CACHE:]
            number += 1
            uses = [u for u in uses if u > number - CACHE] + [number]
            for _ in range(STEPS - 1):
                uses.append(uses.pop(0))
                old, embeddings, gradients = exchanged[uses[-1] - number - 1]
                for i, model in enumerate(bottoms):
                    optimizers[i].zero_grad()
                    now = model(data[i][old])
                    weight = cosine_weights(now.detach(), embeddings[i])
                    dropped += int((weight == 0).sum())
                    (weight[:, None] * gradients[i] * now).sum().backward()
                    optimizers[i].step()
                leaves = [z.requires_grad_() for z in embeddings]
                logits = top(torch.cat(leaves, dim=1))[:, 0]
                loss = F.binary_cross_entropy_with_logits(
                    logits, truth[old], reduction="none"
                )
                found = torch.autograd.grad(loss.mean(), leaves, retain_graph=True)
                weight = cosine_weights(
                    torch.cat(found, dim=1), torch.cat(gradients, dim=1)
                )
                dropped += int((weight == 0).sum())
                optimizers[2].zero_grad()
                (weight * loss).mean().backward()
                optimizers[2].step()
                embeddings[:] = [z.detach() for z in embeddings]
    modules = (top, *bottoms)
    return [p.detach() for module in modules for p in module.parameters()], dropped


def run(local: LocalUpdates | int, **options: Any) -> list[Tensor]:
    bottoms, top = models()
    rate = partial(torch.optim.Adam, lr=0.01)
    label = LabelParty(labels(ROWS), CrossEntropy(top), optimizer=rate, device="cpu")
    passive = [
        PassiveParty(features(i + 1, ROWS), model, optimizer=rate, device="cpu")
        for i, model in enumerate(bottoms)
    ]
    train([label, *passive], seed=SEED, local_steps=local, **options)
    return weights(label, *passive)


def furthest(ours: list[Tensor], theirs: list[Any]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_a_run_equals_a_plain_loop() -> None:
    expected, dropped = reference()
    assert dropped > 20  # the threshold matters
    found = run(LocalUpdates(STEPS, CACHE, THRESHOLD))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    plain = run(1)
    distance = max(
        float((a - b).abs().max()) for a, b in zip(found, plain, strict=True)
    )
    assert distance > 0.01


def test_the_batch_used_longest_ago_comes_first() -> None:
    cache, used = BatchCache(LocalUpdates(steps=3, cache=3)), []
    for step in range(1, 6):
        batch = CachedBatch(step, torch.arange(2), [], [])
        used.append([each.step for each in cache.exchanged(batch)])
    assert used == [[1, 1], [1, 2], [1, 2], [3, 2], [4, 3]]


def test_rows_below_the_threshold_have_no_influence() -> None:
    cache = BatchCache(LocalUpdates(2, 1, 0.5))
    party = simple_parties(1)[1][0]
    party.optimizer = torch.optim.SGD(party.model.parameters(), lr=1.0)
    rows = torch.arange(3)
    output = party.model(party.features[0][rows]).detach()
    opposite = output * torch.tensor([[1.0], [-1.0], [1.0]])
    gradient = torch.zeros_like(output)
    gradient[1] = 1e6  # of the row that now points the other way
    before = [p.clone() for p in party.model.parameters()]
    update_passive(party, cache, CachedBatch(1, rows, [opposite], [gradient]))
    assert all(map(torch.equal, before, party.model.parameters()))
    gradient[0] = 1.0
    update_passive(party, cache, CachedBatch(2, rows, [opposite], [gradient]))
    moved = furthest(before, [*party.model.parameters()])
    assert 0.0 < moved < 100.0


def outcome(grid: Grid, folder: Path, **start: Any) -> list[object]:
    result = strategy(False, local_steps=3).start(grid, num_rounds=EPOCHS, **start)
    return [final_states(folder), losses(result), scores(result)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("in-process")
    with sealed_grid(folder) as grid:
        return outcome(grid, folder)


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda count: -1, id="a new process per message"),
        pytest.param(lambda count: count // 4 % 2, id="two processes, now and then"),
    ],
)
def test_flowers_messages(
    choose: Callable[[int], int], undisturbed: list[object], tmp_path: Path
) -> None:
    grid = StatelessGrid(sealed_app(), 3, {"state-dir": str(tmp_path)}, choose)
    assert_equal(outcome(grid, tmp_path), undisturbed)


def test_resident_sessions(undisturbed: list[object], tmp_path: Path) -> None:
    plain = PlainGrid(resident(sealed_app()), 3)
    for context in plain.contexts.values():
        context.node_config["state-dir"] = str(tmp_path)
    with ResidentGrid(plain) as grid:
        assert_equal(outcome(grid, tmp_path), undisturbed)


def test_a_resumed_run_is_equal(undisturbed: list[object], tmp_path: Path) -> None:
    def start(grid: Grid, steps: int = 3, **options: Any) -> None:
        kept = Checkpoints(every=4, keep_final=True, folder=tmp_path)
        given = strategy(False, local_steps=steps, checkpoints=kept)
        given.start(grid, num_rounds=EPOCHS, **options)

    app, config = sealed_app(), {"state-dir": str(tmp_path)}
    with InProcessGrid(app, 3, config) as grid, pytest.raises(PowerCutError):
        start(cut_at(grid, Verb.TRAIN_STEP, 6))
    with (
        InProcessGrid(app, 3, config) as grid,
        pytest.raises(ConfigError, match="local_steps was LocalUpdates"),
    ):
        start(grid, 1, resume=True)
    with InProcessGrid(app, 3, config) as grid:
        start(grid, resume=True)
    assert_equal(final_states(tmp_path), undisturbed[0])


def test_no_message_changes_in_number_or_kind() -> None:
    def sent(steps: int) -> tuple[Counter[Any], Any]:
        label, passive = simple_parties()
        with in_process([label, *passive]) as inner:
            grid = RecordingGrid(inner)
            strategy(False, local_steps=steps).start(grid, num_rounds=1)
        shapes = [
            (kind, name, array.dtype, tuple(array.shape), sorted(content.metrics))
            for kind, content in grid.contents
            for name, array in content.arrays.items()
        ]
        return Counter(kind for kind, _ in grid.contents), Counter(map(str, shapes))

    assert sent(1) == sent(3)


@pytest.mark.parametrize(
    "objective",
    [
        partial(DistanceCorrelation, nn.Linear(WIDTH, 1)),
        partial(MID, nn.Linear(WIDTH, 1), width=WIDTH),
        partial(GAFM, WIDTH),
    ],
)
def test_objectives_without_row_losses_are_refused(objective: Any) -> None:
    _, passive = simple_parties(1)
    label = LabelParty(labels(), objective(), device="cpu")
    with pytest.raises(PartyError, match="use cross-entropy or mean-squared-error"):
        train([label, *passive], local_steps=2)


@pytest.mark.parametrize("aggregation", ["concat", "mean", "max"])
@pytest.mark.parametrize("kind", ["private", "regression"])
def test_label_privacy_and_regression_learn(kind: str, aggregation: str) -> None:
    width = 2 * WIDTH if aggregation == "concat" else WIDTH
    _, passive = simple_parties()
    private = LabelPrivacy(epsilon=1.0) if kind == "private" else None
    objective: Any = CrossEntropy(nn.Linear(width, 1))
    truth: Any = labels()
    if kind == "regression":
        objective, truth = MeanSquaredError(nn.Linear(width, 1)), features(1)[:, 0]
    given = {"aggregation": aggregation, "optimizer": ADAM, "device": "cpu"}
    label = LabelParty(truth, objective, label_privacy=private, **given)
    _, result = train([label, *passive], 6, local_steps=3)
    found = losses(result)
    assert found[6] < found[1]


def test_settings_that_cannot_be_meant() -> None:
    for wrong in ({"steps": 0}, {"cache": 0}, {"threshold": 1.0}):
        with pytest.raises(ConfigError, match="must be"):
            LocalUpdates(**wrong)  # type: ignore[arg-type]
