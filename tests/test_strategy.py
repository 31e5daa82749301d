"""What VerticalStrategy does around the exact training that test_exact shows."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import Result, Strategy
from rich.console import Console
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import Tensor, nn
from vertical_cases import (
    COLUMNS,
    ROWS,
    WIDTH,
    WrappedGrid,
    assert_equal,
    features,
    labels,
    losses,
    make_label,
    make_passive,
    rich_app,
    scores,
    simple_parties,
)

from flower_vfl import (
    Batch,
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    MeanSquaredError,
    PassiveParty,
    in_process,
    vertical_client_app,
)
from flower_vfl.arrays import to_tensor
from flower_vfl.metrics import adaptive_calibration_error
from flower_vfl.objectives import Outcome
from flower_vfl.randomness import generator
from flower_vfl.residence import is_resident
from flower_vfl.schedule import TEST, TRAIN, VALID, split_rows
from flower_vfl.sessions import party_of
from flower_vfl.strategies import EarlyStopping, VerticalStrategy

SGD = partial(torch.optim.SGD, lr=0.1)


def weights(*parties: LabelParty | PassiveParty) -> list[Tensor]:
    """Return copies of all weights of some parties."""
    found: list[Tensor] = []
    for party in parties:
        state = party.state_dict()
        for part in ("model", "objective", "aggregation"):
            found += [w.clone() for w in state.get(part, {}).values()]
    return found


def train(
    parties: Sequence[Any], epochs: int = 2, **options: Any
) -> tuple[VerticalStrategy, Result]:
    strategy = VerticalStrategy(**{"batch_size": 16, "progress": False, **options})
    return strategy, strategy.start(in_process(parties), num_rounds=epochs)


def test_the_result_is_flowers_and_no_model_is_in_it() -> None:
    label, passive = simple_parties()
    strategy, result = train([label, *passive], epochs=3)
    assert isinstance(strategy, Strategy)
    assert isinstance(result, Result)
    assert len(result.arrays) == 0
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    first = result.train_metrics_clientapp[1]
    assert first["steps"] == 3
    assert float(first["seconds"]) > 0  # type: ignore[arg-type]
    assert losses(result)[3] < losses(result)[1]


@pytest.mark.parametrize(
    ("every", "epochs", "evaluated"),
    [(1, 3, [1, 2, 3]), (2, 5, [2, 4, 5]), (9, 2, [2]), (0, 2, [])],
)
def test_evaluate_every(every: int, epochs: int, evaluated: list[int]) -> None:
    label, passive = simple_parties()
    _, result = train([label, *passive], epochs, evaluate_every=every)
    assert list(scores(result)) == evaluated


def test_evaluation_does_not_change_training() -> None:
    def final(every: int) -> list[Tensor]:
        grid = InProcessGrid(rich_app(), 3)
        VerticalStrategy(batch_size=16, evaluate_every=every).start(grid, num_rounds=3)
        return weights(*grid.parties().values())  # type: ignore[arg-type]

    assert_equal(final(1), final(0))


def test_evaluate_fn_is_called_for_every_evaluated_epoch() -> None:
    label, passive = simple_parties()
    called = []
    strategy = VerticalStrategy(evaluate_every=2)
    strategy.start(
        in_process([label, *passive]),
        num_rounds=3,
        evaluate_fn=lambda epoch, arrays: called.append((epoch, len(arrays))),  # type: ignore[func-returns-value]
    )
    assert called == [(2, 0), (3, 0)]


@pytest.mark.parametrize("evaluation_rows", [8192, 5, 0])
def test_metrics_are_those_of_scikit_learn_on_the_predictions(
    evaluation_rows: int,
) -> None:
    grid = InProcessGrid(rich_app(), 3)
    strategy = VerticalStrategy(
        batch_size=16, seed=4, valid_fraction=0.25, evaluation_rows=evaluation_rows
    )
    result = strategy.start(grid, num_rounds=2)
    codes = split_rows(ROWS, 4, 0.2, 0.25)
    found = scores(result)[2]
    assert len(found) == 8
    for name, code in (("valid", VALID), ("test", TEST)):
        y = labels().numpy()[codes == code]
        predicted = strategy.predict(name)
        assert predicted.shape == y.shape
        expected = {
            f"{name}_auc": roc_auc_score(y, predicted),
            f"{name}_accuracy": accuracy_score(y, predicted > 0.5),
            f"{name}_loss": log_loss(y, predicted),
            f"{name}_ace": adaptive_calibration_error(
                torch.from_numpy(predicted), torch.from_numpy(y)
            ),
        }
        assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-6)
    assert len(strategy.predict("train")) == (codes == TRAIN).sum()


def test_predictions_are_those_of_the_models_in_one_piece() -> None:
    label, passive = simple_parties()
    strategy, _ = train([label, *passive], seed=2)
    rows = split_rows(ROWS, 2) == TEST
    with torch.no_grad():
        parts = [p.model(features(i + 1)[rows]) for i, p in enumerate(passive)]
        expected = torch.sigmoid(label.objective.top(torch.cat(parts, 1)))[:, 0]  # type: ignore[operator]
    assert np.array_equal(strategy.predict(), expected.numpy())
    assert np.array_equal(strategy.predict(), expected.numpy())  # nothing has changed


def test_predictions_of_an_empty_split() -> None:
    label, passive = simple_parties()
    strategy, result = train([label, *passive], test_fraction=0.0)
    assert strategy.predict("test").shape == (0,)
    assert scores(result) == {1: {}, 2: {}}


def test_a_test_split_of_one_class() -> None:
    label, passive = simple_parties()
    codes = np.where(labels().numpy() == 1, TEST, TRAIN).astype(np.int8)
    codes[np.flatnonzero(codes == TEST)[::2]] = TRAIN
    for party in (label, *passive):
        party.split = codes
    _, result = train([label, *passive])
    assert set(scores(result)[1]) == {"test_accuracy", "test_loss", "test_ace"}


class Weighted(nn.Module):
    """An aggregation with weights of its own."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(0.5, 1.5, parties))

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.weights, parts, strict=True)
        return torch.stack([weight * part for weight, part in pairs]).sum(0)


JOIN: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "concat": lambda parts: torch.cat(parts, dim=1),
    "sum": lambda parts: torch.stack(parts).sum(0),
    "mean": lambda parts: torch.stack(parts).mean(0),
    "max": lambda parts: torch.stack(parts).max(0).values,
    "product": lambda parts: torch.stack(parts).prod(0),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", [*JOIN, "module"])
def test_aggregations_against_autograd_in_one_piece(kind: str, own: bool) -> None:
    torch.manual_seed(1)
    count = 2 + own
    bottoms = [nn.Linear(COLUMNS, WIDTH) for _ in range(count)]
    top = nn.Linear(WIDTH * count if kind == "concat" else WIDTH, 1)
    module = Weighted(count)
    reference = copy.deepcopy(nn.ModuleList([*bottoms, top, module]))
    label = LabelParty(
        labels(),
        CrossEntropy(top),
        optimizer=SGD,
        aggregation=module if kind == "module" else kind,
        device="cpu",
        **({"features": features(0), "model": bottoms[0]} if own else {}),  # type: ignore[arg-type]
    )
    passive = [
        PassiveParty(features(i + 1), model, SGD, device="cpu")
        for i, model in enumerate(bottoms[own:])
    ]
    _, result = train([label, *passive], epochs=2, batch_size=0, seed=6)

    rows = torch.from_numpy(np.flatnonzero(split_rows(ROWS, 6) == TRAIN))
    optimizer = SGD(reference.parameters())
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        parts = [
            model(features(i + 1 - own)[rows]) for i, model in enumerate(reference[:-2])
        ]
        joined = reference[-1](parts) if kind == "module" else JOIN[kind](parts)
        loss = F.binary_cross_entropy_with_logits(
            reference[-2](joined)[:, 0], labels()[rows].float()
        )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    assert list(losses(result).values()) == pytest.approx(expected, rel=1e-6)
    ours = nn.ModuleList([*bottoms, top, module]).state_dict()
    for name, theirs in reference.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-7)
    if kind == "module":
        assert not torch.equal(module.weights, Weighted(count).weights)


def test_learning_rates_by_party() -> None:
    """One step of plain SGD: what a party moves is its rate times its gradient."""

    def moved(rates: dict[str, float]) -> list[list[Tensor]]:
        label, passive = simple_parties(optimizer=SGD)
        for party in passive:
            party.make_optimizer = SGD
        before = [weights(party) for party in (label, *passive)]
        train([label, *passive], 1, batch_size=0, learning_rate=rates)
        after = [weights(party) for party in (label, *passive)]
        return [
            [b - a for a, b in zip(*pair, strict=True)]
            for pair in zip(before, after, strict=True)
        ]

    ones = moved({"*": 1.0})
    mixed = moved({"label": 0.5, "passive-2": 2.0, "*": 4.0})
    for rate, base, found in zip((0.5, 4.0, 2.0), ones, mixed, strict=True):
        for one, other in zip(base, found, strict=True):
            torch.testing.assert_close(other, rate * one, rtol=1e-3, atol=1e-6)
            assert other.abs().sum() > 0
    own = moved({"label": 1.0})  # the others keep their optimizers' 0.1
    torch.testing.assert_close(own[1][0], 0.1 * ones[1][0], rtol=1e-3, atol=1e-6)


def stopping_run(epochs: int, stopping: EarlyStopping | None) -> tuple[Any, Any, Any]:
    grid = InProcessGrid(rich_app(), 3)
    strategy = VerticalStrategy(
        batch_size=16,
        seed=8,
        learning_rate=0.15,
        valid_fraction=0.3,
        early_stopping=stopping,
    )
    result = strategy.start(grid, num_rounds=epochs)
    return weights(*grid.parties().values()), result, strategy  # type: ignore[arg-type]


@pytest.mark.parametrize("restore_best", [True, False])
def test_early_stopping_ends_at_the_best_epoch(restore_best: bool) -> None:
    stopping = EarlyStopping(patience=2, metric="loss", restore_best=restore_best)
    found, result, _ = stopping_run(40, stopping)
    history = {epoch: s["valid_loss"] for epoch, s in scores(result).items()}
    last = max(history)
    best = min(history, key=lambda epoch: (history[epoch], epoch))
    assert last < 40
    assert last == best + 2  # patience
    assert list(losses(result)) == list(range(1, last + 1))
    expected, _, _ = stopping_run(best if restore_best else last, None)
    assert_equal(found, expected)


def test_early_stopping_that_never_stops_still_restores_the_best() -> None:
    found, result, strategy = stopping_run(5, EarlyStopping(patience=50, metric="loss"))
    history = {epoch: s["valid_loss"] for epoch, s in scores(result).items()}
    best = min(history, key=lambda epoch: (history[epoch], epoch))
    assert len(history) == 5
    expected, _, _ = stopping_run(best, None)
    assert_equal(found, expected)
    y = labels().numpy()[split_rows(ROWS, 8, 0.2, 0.3) == VALID]
    assert log_loss(y, strategy.predict("valid")) == pytest.approx(history[best])


@pytest.mark.parametrize(
    ("metric", "value", "best", "better"),
    [
        ("auc", 0.8, None, True),
        ("auc", 0.8, 0.7, True),
        ("auc", 0.7, 0.7, False),
        ("loss", 0.6, 0.7, True),
        ("loss", 0.8, 0.7, False),
        ("rmse", 0.6, 0.7, True),
        ("auc", 0.705, 0.7, False),
        ("auc", float("nan"), 0.7, False),
    ],
)
def test_what_counts_as_better(
    metric: str, value: float, best: float | None, better: bool
) -> None:
    stopping = EarlyStopping(min_delta=0.01)
    assert stopping.improves(value, best, metric) is better
    with pytest.raises(ConfigError, match="patience"):
        EarlyStopping(patience=0)


class Recorder:
    """A transform that multiplies and notes what it was given."""

    requires_labels = False

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.seen: list[tuple[Tensor, Batch]] = []

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        self.seen.append((gradient.clone(), batch))
        noise = torch.randn(gradient.shape, generator=batch.generator())
        return gradient * self.factor + 0.01 * noise

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_transforms_are_called_in_order_with_their_batch() -> None:
    def run() -> tuple[Recorder, Recorder, list[Tensor]]:
        label, passive = simple_parties(trust_server=True)
        one, two = Recorder(2.0), Recorder(-3.0)
        train([label, *passive], epochs=2, transforms=[one, two], noise_seed=5)
        return one, two, weights(label, *passive)

    one, two, found = run()
    steps = [(b.party, b.step, b.epoch) for _, b in one.seen]
    assert steps == [
        (party, step, 1 + (step > 3))
        for step in range(1, 7)
        for party in ("passive-1", "passive-2")
    ]
    for (first, batch), (second, later) in zip(one.seen, two.seen, strict=True):
        assert batch == later
        assert batch.seed == 5 and batch.labels is None
        noise = torch.randn(first.shape, generator=batch.generator())
        assert torch.equal(second, first * 2.0 + 0.01 * noise)
    streams = {torch.randn(1, generator=b.generator()).item() for _, b in one.seen}
    assert len(streams) == len(one.seen)  # one for each party and step
    assert_equal(run()[2], found)


def test_what_a_transform_returns_is_what_the_party_trains_on() -> None:
    class Nothing(Recorder):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            return gradient * 0 if batch.party == "passive-1" else gradient

    label, passive = simple_parties(trust_server=True)
    before = weights(*passive)
    train([label, *passive], transforms=[Nothing(0)])
    after = weights(*passive)
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert moved == [False, False, True, True]


@pytest.mark.parametrize("aggregation", ["sum", "mean", "concat"])
def test_a_transform_that_works_in_place_does_not_reach_other_parties(
    aggregation: str,
) -> None:
    """With a sum both parties' gradients are one tensor at the label party."""

    class InPlace(Recorder):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            return gradient.mul_(2.0)

    class Copying(Recorder):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            return gradient * 2.0

    def run(transform: Recorder) -> list[Tensor]:
        torch.manual_seed(3)
        width = 2 * WIDTH if aggregation == "concat" else WIDTH
        label = LabelParty(
            labels(), CrossEntropy(nn.Linear(width, 1)), device="cpu", trust_server=True
        )
        passive = simple_parties()[1]
        train([label, *passive], transforms=[transform], aggregation=aggregation)
        return weights(label, *passive)

    assert_equal(run(InPlace(0)), run(Copying(0)))


@pytest.mark.parametrize("aggregation", ["sum", "concat", "max"])
@pytest.mark.parametrize("parties", [1, 2])
def test_modules_that_work_in_place_disturb_nobody(
    parties: int, aggregation: str
) -> None:
    def run(inplace: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(4)
        width = WIDTH * parties if aggregation == "concat" else WIDTH
        top = nn.Sequential(nn.LeakyReLU(0.1, inplace), nn.Linear(width, 1))
        label = LabelParty(
            labels(), CrossEntropy(top), aggregation=aggregation, device="cpu"
        )
        passive = [
            PassiveParty(
                features(i + 1),
                nn.Sequential(
                    nn.LeakyReLU(0.2, inplace),
                    nn.Linear(COLUMNS, WIDTH),
                    nn.LeakyReLU(0.3, inplace),
                ),
                device="cpu",
            )
            for i in range(parties)
        ]
        data = [p.features[0].clone() for p in passive]
        strategy, result = train([label, *passive])
        predicted = [strategy.predict().tolist() for _ in range(2)]
        assert predicted[0] == predicted[1]
        assert_equal([p.features[0] for p in passive], data)
        return weights(label, *passive), [losses(result), scores(result), predicted]

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("aggregation", ["sum", "product", "mean", "max", "concat"])
@pytest.mark.parametrize("parties", [1, 2])
def test_what_was_sent_is_never_changed_afterwards(
    parties: int, aggregation: str
) -> None:
    """In one process a message shares its tensors with the party that made it."""
    torch.manual_seed(0)
    width = WIDTH * parties if aggregation == "concat" else WIDTH
    top = nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(width, 1))
    label = LabelParty(labels(), CrossEntropy(top), optimizer=SGD, device="cpu")
    passive = [
        PassiveParty(
            features(i + 1),
            nn.Sequential(nn.Linear(COLUMNS, WIDTH), nn.LeakyReLU(0.2, inplace=True)),
            SGD,
            device="cpu",
        )
        for i in range(parties)
    ]
    sent: list[tuple[Array, Tensor]] = []

    def note(message: Message) -> Message:
        for record in message.content.array_records.values():
            sent.extend((a, to_tensor(a).clone()) for a in record.values())
        return message

    grid = WrappedGrid(in_process([label, *passive]), note, note)  # type: ignore[arg-type]
    strategy = VerticalStrategy(batch_size=16, aggregation=aggregation, progress=False)
    strategy.start(grid, num_rounds=2)
    strategy.predict("train")
    assert len(sent) > 20 * parties
    for array, then in sent:
        assert torch.equal(to_tensor(array), then)
        assert np.array_equal(array.numpy(), then.numpy())


def test_extra_metrics_of_an_objective_are_means_over_rows() -> None:
    class Telling(CrossEntropy):
        def step(self, embedding: Tensor, labels: Tensor) -> Outcome:
            outcome = super().step(embedding, labels)
            outcome.metrics["size"] = float(len(labels))
            return outcome

    _, passive = simple_parties()
    label = LabelParty(labels(), Telling(nn.Linear(2 * WIDTH, 1)), device="cpu")
    _, result = train([label, *passive], epochs=2, batch_size=20)  # 20, 20 and 8 rows
    for epoch in (1, 2):
        found = result.train_metrics_clientapp[epoch]["size"]
        assert found == pytest.approx((20 * 20 + 20 * 20 + 8 * 8) / 48)


def show_progress(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> str:
    screen = io.StringIO()
    console = partial(Console, file=screen, force_terminal=terminal, width=150)
    monkeypatch.setattr(
        "flower_vfl.strategies.progress.Console", lambda stderr: console()
    )
    label, passive = simple_parties()
    train([label, *passive], epochs=4, progress=None)
    return screen.getvalue()


def test_the_progress_bar_shows_where_the_run_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = show_progress(monkeypatch, terminal=True)
    for text in ("epoch 4/4", "12/12", "steps/s", "loss 0.", "test_auc 0."):
        assert text in shown


def test_the_progress_bar_is_silent_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert show_progress(monkeypatch, terminal=False) == ""


def test_a_bar_that_is_switched_off_stays_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        "flower_vfl.strategies.progress.Console",
        lambda stderr: Console(file=screen, force_terminal=True),
    )
    label, passive = simple_parties()
    train([label, *passive], progress=False)
    assert screen.getvalue() == ""


class TwoInputs(nn.Module):
    """Categories and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 2), nn.Linear(COLUMNS, 2)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        return torch.cat([self.table(categories), self.linear(numbers)], dim=1)


def test_parties_of_different_kinds_in_one_run() -> None:
    """Tuple features, a recurrent model, no parameters, frozen, own optimizers."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(2, 7, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.gru(x.view(len(x), 2, 2))[0]
            return output[:, -1]

    torch.manual_seed(0)
    frozen = nn.Linear(COLUMNS, 5).requires_grad_(False)
    categories = torch.arange(ROWS) % 5
    passive = [
        PassiveParty((categories, features(1)), TwoInputs(), device="cpu"),
        PassiveParty(features(2).numpy(), Last(), SGD, device="cpu"),
        PassiveParty(features(3).double().numpy(), nn.Identity(), device="cpu"),
        PassiveParty(features(4), frozen, device="cpu"),
    ]
    label = LabelParty(
        labels().numpy(),
        CrossEntropy(nn.Linear(4 + 7 + 4 + 5, 1)),
        optimizer=partial(torch.optim.Adagrad, lr=0.1),
        device="cpu",
    )
    before = [weights(party) for party in passive]
    _, result = train([label, *passive], epochs=4)
    assert losses(result)[4] < losses(result)[1]
    moved = [
        not all(torch.equal(a, b) for a, b in zip(old, weights(party), strict=True))
        for old, party in zip(before, passive, strict=True)
    ]
    assert moved == [True, True, False, False]
    assert [party.step for party in passive] == [12] * 4
    assert all(party.device == torch.device("cpu") for party in (label, *passive))


def test_the_order_of_parties_is_that_of_their_numbers() -> None:
    label, _ = simple_parties()
    sizes = {1: 2, 2: 3, 10: 4}
    passive = [
        PassiveParty(features(i), nn.Linear(COLUMNS, w), name=f"p{i}", device="cpu")
        for i, w in sizes.items()
    ]
    label = LabelParty(labels(), CrossEntropy(nn.Linear(9, 1)), device="cpu")
    strategy = VerticalStrategy()
    training = strategy.connect(in_process([passive[2], passive[0], label, passive[1]]))
    assert [d.shape for d in training.meeting.passive.values()] == [(2,), (3,), (4,)]
    assert list(training.meeting.passive) == ["p1", "p2", "p10"]


def test_a_convolution_as_the_cut_layer() -> None:
    """Embeddings with four dimensions, joined by channel, against one piece."""
    torch.manual_seed(0)
    images = torch.randn(ROWS, 1, 6, 6)
    halves = images[..., :3], images[..., 3:]
    bottoms = [nn.Conv2d(1, 2 + i, 3, padding=1) for i in range(2)]
    top = nn.Sequential(nn.Conv2d(5, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))
    reference = copy.deepcopy(nn.ModuleList([*bottoms, top]))
    label = LabelParty(labels(), CrossEntropy(top), optimizer=SGD, device="cpu")
    passive = [
        PassiveParty(x, m, SGD, device="cpu")
        for x, m in zip(halves, bottoms, strict=True)
    ]
    _, result = train([label, *passive], epochs=1, batch_size=0, seed=1)
    rows = torch.from_numpy(np.flatnonzero(split_rows(ROWS, 1) == TRAIN))
    order = torch.randperm(len(rows), generator=generator(1, "batches", 1))
    rows = rows[order]
    joined = torch.cat([reference[i](halves[i][rows]) for i in range(2)], dim=1)
    loss = F.binary_cross_entropy_with_logits(
        reference[2](joined)[:, 0], labels()[rows].float()
    )
    loss.backward()  # type: ignore[no-untyped-call]
    SGD(reference.parameters()).step()
    assert losses(result)[1] == pytest.approx(loss.item())
    ours = nn.ModuleList([*bottoms, top]).state_dict()
    for name, theirs in reference.state_dict().items():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-5, atol=1e-7)


def test_half_precision_bottom_models_train() -> None:
    label, (one, _) = simple_parties()
    half = nn.Linear(COLUMNS, WIDTH).bfloat16()
    two = PassiveParty(features(2).bfloat16(), half, SGD, device="cpu")
    before = half.weight.detach().clone()
    train([label, one, two])
    assert half.weight.dtype == torch.bfloat16
    assert not torch.equal(half.weight, before)


def test_regression_in_the_labels_own_unit() -> None:
    torch.manual_seed(0)
    y = features(1)[:, 0] * 70 + 150
    label = LabelParty(
        y,
        MeanSquaredError(nn.Linear(WIDTH, 1), center=150, scale=70),
        optimizer=SGD,
        device="cpu",
    )
    passive = PassiveParty(features(1), nn.Linear(COLUMNS, WIDTH), SGD, device="cpu")
    strategy, result = train([label, passive], epochs=30)
    test = y[split_rows(ROWS, 0) == TEST].numpy()
    found = scores(result)[30]
    assert found["test_pearson"] > 0.95
    assert found["test_rmse"] == pytest.approx(
        float(np.sqrt(np.mean((strategy.predict() - test) ** 2))), rel=1e-5
    )


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    def run(seed: int) -> list[Tensor]:
        grid = InProcessGrid(rich_app(), 3)
        VerticalStrategy(batch_size=16, seed=seed).start(grid, num_rounds=1)
        return weights(*grid.parties().values())  # type: ignore[arg-type]

    first = run(1)
    torch.manual_seed(99)  # what happens elsewhere in the process does not matter
    torch.rand(7)
    assert_equal(run(1), first)
    assert not torch.equal(run(2)[0], first[0])


def test_a_run_leaves_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    grid = InProcessGrid(rich_app(), 3)
    VerticalStrategy(batch_size=16).start(grid, num_rounds=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_runs_in_two_threads_do_not_disturb_each_other() -> None:
    """They share torch's one generator, from which dropout draws."""
    found: dict[int, list[Tensor]] = {}

    def run(number: int) -> None:
        grid = InProcessGrid(rich_app(), 3)
        VerticalStrategy(batch_size=16, seed=number % 2).start(grid, num_rounds=4)
        found[number] = weights(*grid.parties().values())  # type: ignore[arg-type]

    run(0)
    run(1)
    threads = [threading.Thread(target=run, args=(n,)) for n in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (2, 3, 4):
        assert_equal(found[number], found[number % 2])


def test_messages_can_be_pushed_and_pulled() -> None:
    app = vertical_client_app(make_passive, make_label)
    with InProcessGrid(app, 3) as grid:
        content = RecordDict({"c": ConfigRecord({"a": 1})})
        sent = [
            grid.create_message(content, "query.vfl_hello", node, "1")
            for node in grid.get_node_ids()
        ]
        ids = list(grid.push_messages(sent))
        assert len(set(ids)) == 3
        assert [m.metadata.message_id for m in sent] == ids
        replies = list(grid.pull_messages([ids[2], "unknown", ids[0]]))
        assert [r.metadata.src_node_id for r in replies] == [3, 1]
        assert [r.metadata.reply_to_message_id for r in replies] == [ids[2], ids[0]]
        assert list(grid.pull_messages(ids[:1])) == []  # only once
        assert len(list(grid.pull_messages(ids))) == 1


def test_a_node_that_does_not_exist() -> None:
    grid = InProcessGrid(rich_app(), 2)
    with pytest.raises(ConfigError, match=r"no node 9; nodes: \[1, 2\]"):
        grid.send_and_receive([Message(RecordDict(), 9, "query.vfl_hello")])
    with pytest.raises(ConfigError, match="make a new grid"):
        grid.set_run(grid.run)


def test_close_frees_the_parties() -> None:
    made: list[weakref.ref[Any]] = []

    def passive(context: Context) -> PassiveParty:
        party = make_passive(context)
        made.append(weakref.ref(party))
        return party

    grid = InProcessGrid(vertical_client_app(passive, make_label), 3)
    VerticalStrategy(batch_size=16).start(grid, num_rounds=1)
    run_id = grid.run.run_id
    assert len(grid.parties()) == 3 and is_resident(run_id, 1)
    grid.close()
    gc.collect()
    assert [ref() for ref in made] == [None, None]
    assert grid.parties() == {} and not is_resident(run_id, 1)
    grid.close()  # twice is once


def test_a_grid_that_is_dropped_frees_its_parties() -> None:
    grid = InProcessGrid(rich_app(), 3)
    VerticalStrategy(batch_size=16).connect(grid)
    run_id = grid.run.run_id
    assert party_of(run_id, 1) is not None
    del grid
    gc.collect()
    assert party_of(run_id, 1) is None


def test_data_is_loaded_once_per_node() -> None:
    calls: list[int] = []

    def passive(context: Context) -> PassiveParty:
        calls.append(int(context.node_config["partition-id"]))
        return make_passive(context)

    grid = InProcessGrid(vertical_client_app(passive, make_label), 4)
    VerticalStrategy(batch_size=16).start(grid, num_rounds=2)
    assert calls == [1, 2, 3]
