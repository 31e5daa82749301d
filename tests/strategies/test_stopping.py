"""When a run ends early, and with which weights."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.metrics import log_loss
from vertical_cases import ROWS, assert_equal, labels, losses, rich_app, scores, weights

from flower_vfl import ConfigError, InProcessGrid
from flower_vfl.parties.schedule import VALID, split_rows
from flower_vfl.strategies import EarlyStopping, VerticalStrategy


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
