"""The loss of private labels is chosen on validation rows, without leaving a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.serverapp import Grid
from resume_cases import CountingTransform
from sealed_cases import pinned, sealed_app
from torch import nn
from vertical_cases import (
    WIDTH,
    HookedGrid,
    StatelessGrid,
    assert_equal,
    features,
    final_states,
    losses,
    rich_app,
    scores,
    simple_parties,
)

from flower_vfl import (
    InProcessGrid,
    LabelParty,
    LabelPrivacy,
    MeanSquaredError,
    NodePolicy,
    PartyError,
    in_process,
)
from flower_vfl.protocol.messages import Verb, read
from flower_vfl.strategies import (
    Checkpoints,
    Defense,
    EarlyStopping,
    VerticalStrategy,
    evaluation,
)
from flower_vfl.strategies.training import Training

LOSSES = ["plain", "unbiased", "forward"]
Trial = Callable[[Training, str], list[float]]


def strategy(**options: Any) -> VerticalStrategy:
    given: dict[str, Any] = {
        "batch_size": 16,
        "seed": 5,
        "valid_fraction": 0.3,
        "progress": False,
        "defense": Defense((), at="label", noise_seed=2),
        "checkpoints": Checkpoints(every=2, keep_final=True),
        **options,
    }
    return VerticalStrategy(**given)


def private(loss: str) -> dict[str, Any]:
    return {"label_privacy": LabelPrivacy(auc=0.8, loss=loss)}  # type: ignore[arg-type]


def outcome(grid: Grid, folder: Path, **options: Any) -> list[Any]:
    result = strategy(**options).start(grid, num_rounds=2)
    return [final_states(folder), losses(result), scores(result)]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the outcome of runs in which the label party names its loss."""
    found = {}
    for loss in LOSSES:
        folder = tmp_path_factory.mktemp(loss)
        app = rich_app(**private(loss))
        with InProcessGrid(app, 3, {"state-dir": str(folder)}) as grid:
            found[loss] = outcome(grid, folder)
    return found


@pytest.fixture
def preferring(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float, float], None]:
    """Have one loss reach this value on validation rows, and every other that one."""
    real: Trial = evaluation._try

    def prefer(loss: str, best: float, worse: float) -> None:
        order = iter(LOSSES)

        def attempt(training: Training, metric: str) -> list[float]:
            real(training, metric)  # it trains, and so might leave a trace
            return [best if next(order) == loss else worse]

        monkeypatch.setattr(evaluation, "_try", attempt)

    return prefer


@pytest.mark.parametrize(
    ("loss", "stateless"),
    [
        ("plain", False),
        ("forward", False),
        pytest.param("unbiased", False, marks=pytest.mark.extra),
        ("unbiased", True),
    ],
)
def test_trials_leave_no_trace(
    loss: str,
    stateless: bool,
    named: dict[str, list[Any]],
    preferring: Callable[[str, float, float], None],
    tmp_path: Path,
) -> None:
    """Weights, optimizers, random states and buffers are those of a named loss."""
    preferring(loss, 0.9, 0.6)
    config = {"state-dir": str(tmp_path)}
    grid: Grid = InProcessGrid(rich_app(**private("auto")), 3, config)
    if stateless:
        grid = StatelessGrid(rich_app(**private("auto")), 3, config, lambda n: n % 2)
    assert_equal(outcome(grid, tmp_path), named[loss])


def test_transforms_with_a_state_begin_anew(tmp_path: Path) -> None:
    """At the strategy and at the label party."""
    found = []
    for loss in ("forward", "auto"):
        folder, own = tmp_path / loss, CountingTransform()
        app = rich_app(**private(loss), defense=own)
        transform = CountingTransform()
        with InProcessGrid(app, 3, {"state-dir": str(folder)}) as grid:
            applied = Defense([transform], noise_seed=2)
            results = strategy(defense=applied).start(grid, num_rounds=2)
        found.append((own.calls, transform.calls, len(losses(results))))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("metric", "better", "worse"),
    [("loss", 0.3, 0.9), ("accuracy", 0.9, 0.3), (None, 0.9, 0.3)],
)
def test_the_better_value_wins(
    metric: str | None,
    better: float,
    worse: float,
    preferring: Callable[[str, float, float], None],
    tmp_path: Path,
) -> None:
    """Which is the lower one of a loss."""
    preferring("unbiased", better, worse)
    app = rich_app(**private("auto"))
    with InProcessGrid(app, 3, {"state-dir": str(tmp_path)}) as grid:
        stopping = EarlyStopping(metric=metric)
        training = strategy(early_stopping=stopping).connect(grid, num_rounds=1)
        evaluation.choose_label_loss(training)
        assert training.state.label_losses["unbiased"] == better
        training.checkpoint("final")
    assert final_states(tmp_path)["label"]["loss"] == "unbiased"


def test_validation_rows_decide(tmp_path: Path) -> None:
    """Their metric at the end of each trial; what test rows say is not looked at."""
    splits: list[str] = []
    values: list[float] = []

    def before(message: Message) -> None:
        if message.metadata.message_type == Verb.EVALUATE.value:
            splits.append(read(message).text("split"))

    def after(reply: Message) -> Message:
        if reply.metadata.message_type == Verb.EVALUATE.value and splits[-1] == "valid":
            values.append(read(reply).metrics["auc"])
        return reply

    app = rich_app(**private("auto"))
    with InProcessGrid(app, 3, {"state-dir": str(tmp_path)}) as grid:
        training = strategy().connect(HookedGrid(grid, before, after), num_rounds=2)
        evaluation.choose_label_loss(training)
        training.checkpoint("final")
    found = training.state.label_losses
    assert list(found.items()) == list(zip(LOSSES, values, strict=True))
    assert len(set(values)) > 1
    chosen = final_states(tmp_path)["label"]["loss"]
    assert found[chosen] == max(values)


def test_without_validation_rows_it_is_forward(tmp_path: Path) -> None:
    found = {}
    for loss in ("auto", "forward"):
        app, folder = rich_app(**private(loss)), tmp_path / loss
        with InProcessGrid(app, 3, {"state-dir": str(folder)}) as grid:
            found[loss] = outcome(grid, folder, valid_fraction=0.0)
    assert_equal(found["auto"], found["forward"])
    assert found["auto"][0]["label"]["loss"] == "forward"


def test_a_sealed_run_chooses_the_same(tmp_path: Path) -> None:
    """The relay moves trials as it moves the run, and cannot read either."""
    found = []
    keys = pinned()
    for sealed in (True, False):
        folder = tmp_path / str(sealed)
        app = sealed_app(keys, **private("auto"))
        with InProcessGrid(app, 3, {"state-dir": str(folder)}) as grid:
            found.append(outcome(grid, folder, sealed=sealed))
    assert_equal(found[0], found[1])
    assert found[0][0]["label"]["loss"] in LOSSES


def test_a_party_that_reports_nothing_has_to_name_a_loss() -> None:
    app = sealed_app(policy=NodePolicy(report_metrics="none"), **private("auto"))
    with (
        InProcessGrid(app, 3) as grid,
        pytest.raises(PartyError, match="does not report their metrics") as caught,
    ):
        strategy().start(grid, num_rounds=1)
    assert caught.value.party == "label"
    assert "loss=forward" in caught.value.remedy


def test_a_regression_chooses_between_two(tmp_path: Path) -> None:
    _, passive = simple_parties()
    privacy = LabelPrivacy(auc=0.9, low=0.0, high=40.0, key=3)
    objective = MeanSquaredError(nn.Linear(2 * WIDTH, 1), 20.0, 10.0)
    label = LabelParty(features(0)[:, 0] * 3 + 20, objective, label_privacy=privacy)
    training = strategy().connect(in_process([label, *passive]), num_rounds=1)
    evaluation.choose_label_loss(training)
    assert list(training.state.label_losses) == ["plain", "forward"]
    assert label.private is not None
    found = training.state.label_losses
    assert label.private.loss == max(found, key=lambda loss: found[loss])
