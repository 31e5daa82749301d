"""What a run with several batches under way computes, on every grid."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flwr.app import Message
from flwr.serverapp import Grid
from pipeline_cases import (
    EPOCHS,
    SEED,
    STEPS,
    OneByOne,
    in_sessions,
    outcome,
    rich,
    run,
    stateless,
    strategy,
)
from torch import Tensor, nn
from vertical_cases import (
    ADAM,
    COLUMNS,
    ROWS,
    WIDTH,
    HookedGrid,
    PushedGrid,
    assert_equal,
    bottom,
    features,
    labels,
    losses,
    rich_app,
    simple_parties,
    top,
    train,
)

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    LabelParty,
    Leakage,
    PartyError,
    PassiveParty,
    in_process,
)
from flower_vfl.parties.schedule import TRAIN, split_rows
from flower_vfl.randomness import RandomState, derive_seed, generator
from flower_vfl.strategies import (
    Defense,
    VerticalStrategy,
    build_defense,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with rich(folder) as grid:
        return run(folder, grid)


def delayed_training(
    pipeline: int, epochs: int, size: int, bottoms: list[nn.Module], head: nn.Module
) -> list[float]:
    """Train in plain PyTorch: batch i is embedded with the weights after i - 1 - k.

    The last update is added once for each batch whose gradient is missing.
    """
    updates: list[list[Tensor]] = [[] for _ in bottoms]
    optimizers = [ADAM(module.parameters()) for module in bottoms]
    head_optimizer = ADAM(head.parameters())
    names = [f"passive-{i + 1}" for i in range(len(bottoms))]
    streams = {
        name: RandomState(derive_seed(SEED, "training", name))
        for name in [*names, "label"]
    }
    rows = torch.from_numpy((split_rows(ROWS, SEED, 0.2) == TRAIN).nonzero()[0])
    found = []
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(rows), generator=generator(SEED, "batches", epoch))
        batches = rows[order].split(size)
        waiting: deque[list[tuple[nn.Module, Tensor]]] = deque()
        total, asked = 0.0, 0
        for index, batch in enumerate(batches):
            while asked <= min(index + pipeline, len(batches) - 1):
                passes = []
                for i, (name, module) in enumerate(zip(names, bottoms, strict=True)):
                    stale = copy.deepcopy(module).train()
                    with torch.no_grad():
                        for weight, update in zip(
                            stale.parameters(), updates[i], strict=False
                        ):  # none before the first
                            weight.add_(update, alpha=len(waiting))
                    with streams[name]:
                        output = stale(features(i + 1)[batches[asked]])
                    stats = dict(stale.named_buffers())
                    module.load_state_dict({**module.state_dict(), **stats})
                    passes.append((stale, output))
                waiting.append(passes)
                asked += 1
            passes = waiting.popleft()
            joined = torch.cat([o.detach() for _, o in passes], dim=1).requires_grad_()
            head_optimizer.zero_grad()
            with streams["label"]:
                output = head(joined)[:, 0]
            loss = F.binary_cross_entropy_with_logits(output, labels()[batch].float())
            loss.backward()
            head_optimizer.step()
            total += loss.item() * len(batch)
            assert joined.grad is not None
            gradients = joined.grad.split([o.shape[1] for _, o in passes], dim=1)
            for i, (stale, output) in enumerate(passes):
                output.backward(gradients[i])
                for mine, its in zip(
                    bottoms[i].parameters(), stale.parameters(), strict=True
                ):
                    mine.grad = its.grad
                before = [weight.detach().clone() for weight in bottoms[i].parameters()]
                optimizers[i].step()
                after = bottoms[i].parameters()
                updates[i] = [
                    w.detach() - b for w, b in zip(after, before, strict=True)
                ]
        found.append(total / len(rows))
    return found


def tied() -> nn.Module:
    """Return a bottom model with a layer that has two names, and a weight that has."""
    shared, other = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, COLUMNS)
    other.weight = shared.weight
    layers = shared, nn.Tanh(), shared, nn.Tanh(), other, nn.Linear(COLUMNS, WIDTH)
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("pipeline", "make"),
    [(1, bottom), (2, bottom), (3, bottom), (20, bottom), (2, tied)],
)
def test_a_run_equals_a_plain_loop_with_delayed_gradients(
    pipeline: int, make: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    bottoms, head = [make(), make()], top(2)
    reference = copy.deepcopy((bottoms, head))
    parties = [
        PassiveParty(features(i + 1), module, optimizer=ADAM, device="cpu")
        for i, module in enumerate(bottoms)
    ]
    label = LabelParty(labels(), CrossEntropy(head), optimizer=ADAM, device="cpu")
    given = {"batch_size": 8, "seed": SEED, "pipeline": pipeline}
    _, result = train([label, *parties], 3, **given)
    expected = delayed_training(pipeline, 3, 8, *reference)
    assert list(losses(result).values()) == expected
    ours = nn.ModuleList([*bottoms, head]).state_dict()
    assert_equal(ours, nn.ModuleList([*reference[0], reference[1]]).state_dict())


def test_stale_gradients_change_the_run() -> None:
    found = []
    for pipeline in (0, 1):
        label, passive = simple_parties()
        found.append(losses(train([label, *passive], pipeline=pipeline)[1]))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda folder: HookedGrid(rich(folder)), id="one at a time"),
        pytest.param(lambda folder: OneByOne(rich(folder)), id="replies out of order"),
        pytest.param(stateless, id="a new process per message"),
        pytest.param(in_sessions, id="resident"),
    ],
)
def test_every_grid_gives_the_same(
    make: Callable[[Path], Any], undisturbed: list[object], tmp_path: Path
) -> None:
    with make(tmp_path) as grid:
        assert_equal(run(tmp_path, grid), undisturbed)


class DistantGrid(PushedGrid):
    """A clock instead of a network: every reply takes one round trip."""

    now = 0.0

    def __init__(self, inner: Grid) -> None:
        super().__init__(inner)
        self.arrivals: dict[str, float] = {}

    def send_and_receive(self, messages: Any, *, timeout: Any = None) -> Any:
        self.now += 1.0
        return self.inner.send_and_receive(messages, timeout=timeout)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = list(super().push_messages(messages))
        self.arrivals |= dict.fromkeys(ids, self.now + 1.0)
        return ids

    def receive(self, message_ids: Iterable[str], timeout: float) -> Iterable[Message]:
        wanted = list(message_ids)
        self.now = max(self.now, min(self.arrivals[each] for each in wanted))
        return self.pull_messages([i for i in wanted if self.arrivals[i] <= self.now])


@pytest.mark.parametrize("pipeline", [1, 3])
def test_k_hides_k_of_k_plus_one_round_trips(pipeline: int) -> None:
    taken = []
    for k in (0, pipeline):
        label, passive = simple_parties(rows=400)
        grid = DistantGrid(in_process([label, *passive]))
        given = {"batch_size": 8, "evaluate_every": 0, "progress": False}
        training = VerticalStrategy(pipeline=k, **given).connect(grid, EPOCHS)
        before = grid.now
        training.run()
        taken.append(grid.now - before)
    steps = 40 * EPOCHS
    assert taken[0] == 2 * steps + 1  # and the last gradient
    assert taken[1] == 2 * steps / (pipeline + 1) + 2


@pytest.mark.parametrize("pipeline", [1, 3])
def test_the_next_epoch_begins_before_the_evaluation_ends(pipeline: int) -> None:
    """With the same results, and fewer round trips, as when something waits for it."""
    ends, trips = [], []
    for waits in (True, False):
        label, passive = simple_parties(rows=100)
        grid = DistantGrid(in_process([label, *passive]))
        given = {"batch_size": 8, "valid_fraction": 0.2, "progress": False}
        made = VerticalStrategy(pipeline=pipeline, **given)
        training = made.connect(grid, 3)
        training.evaluate_fn = (lambda epoch, arrays: None) if waits else None
        before = grid.now
        state = training.run()
        trips.append(grid.now - before)
        models = [each.state_dict() for each in (label, *passive)]
        sizes = [metrics["bytes"] for metrics in state.train.values()]
        ends.append([models, state.steps, state.evaluate, sizes])
    assert_equal(*ends)
    assert list(ends[0][2]) == [1, 2, 3]
    # Twice two splits with two trips each, and one trip for the last gradients.
    assert trips[0] - trips[1] == 2 * 5


def test_an_error_names_the_step_that_it_belongs_to() -> None:
    class Failing(PassiveParty):
        def embed_rows(self, rows: Tensor, *given: Any) -> Tensor:
            found = super().embed_rows(rows, *given)
            return found[:-1] if self.step + self.ahead == 4 else found

    label, passive = simple_parties()
    passive[1].__class__ = Failing
    with pytest.raises(PartyError, match="an embedding of shape") as caught:
        train([label, *passive], batch_size=6, pipeline=2, evaluate_every=0)
    assert (caught.value.party, caught.value.step) == ("passive-2", 5)


@pytest.mark.parametrize("at", ["strategy", "label"])
def test_defense_meter_and_probes_measure_the_same_on_every_grid(
    at: Any, tmp_path: Path
) -> None:
    found = []
    for number, kind in enumerate((HookedGrid, OneByOne)):
        app = rich_app(build_defense=build_defense)
        grid = kind(rich(tmp_path / str(number), app))
        leakage = Leakage(("norm", "cosine"), layers=True)
        options = {"leakage": leakage, "defense": Defense("iso:t=4", at, noise_seed=1)}
        result = strategy(None, 2, **options).start(grid, num_rounds=EPOCHS)
        found.append([outcome(tmp_path / str(number), result), result.records])
    assert_equal(*found)
    steps = {each.step for each in found[0][1] if each.layer}
    assert steps == {*range(1, EPOCHS * STEPS + 1)}


def test_a_negative_pipeline_is_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline must not be negative"):
        VerticalStrategy(pipeline=-1)
