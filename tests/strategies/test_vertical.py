"""What VerticalStrategy does around the exact training that test_exact shows."""

from __future__ import annotations

import io
import threading
from functools import partial

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import Result, Strategy
from rich.console import Console
from sklearn.metrics import accuracy_score, f1_score, log_loss, roc_auc_score
from torch import Tensor, nn
from vertical_cases import (
    COLUMNS,
    ROWS,
    SGD,
    WIDTH,
    assert_equal,
    features,
    labels,
    losses,
    rich_app,
    scores,
    simple_parties,
    train,
    weights,
)

from flower_vfl import CrossEntropy, InProcessGrid, LabelParty, PassiveParty, in_process
from flower_vfl.metrics import adaptive_calibration_error
from flower_vfl.objectives import Outcome
from flower_vfl.parties.schedule import TEST, TRAIN, VALID, split_rows
from flower_vfl.strategies import VerticalStrategy


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
    assert len(found) == 10
    for name, code in (("valid", VALID), ("test", TEST)):
        y = labels().numpy()[codes == code]
        predicted = strategy.predict(name)
        assert predicted.shape == y.shape
        expected = {
            f"{name}_auc": roc_auc_score(y, predicted),
            f"{name}_accuracy": accuracy_score(y, predicted > 0.5),
            f"{name}_f1": f1_score(y, predicted > 0.5),
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
    names = {f"test_{metric}" for metric in ("accuracy", "f1", "loss", "ace")}
    assert set(scores(result)[1]) == names


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
    assert [d.shape for d in training.participants.passive.values()] == [
        (2,),
        (3,),
        (4,),
    ]
    assert list(training.participants.passive) == ["p1", "p2", "p10"]


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
