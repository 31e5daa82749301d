"""No part of a run sees a true label: with other labels, all that leaves is the same.

Two runs have different labels, whose randomised labels are made the same. Every weight,
gradient, loss and validation metric must then be equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from imputation_cases import REPEATABLE, aligned_app
from torch import Tensor, nn
from vertical_cases import (
    ADAM,
    COLUMNS,
    WIDTH,
    HookedGrid,
    assert_equal,
    bottom,
    features,
    final_states,
    make_passive,
    top,
)
from vertical_cases import labels as binary

from flower_vfl import (
    CrossEntropy,
    Imputation,
    InProcessGrid,
    LabelParty,
    LabelPrivacy,
    Leakage,
    MeanSquaredError,
    Objective,
    vertical_client_app,
)
from flower_vfl.objectives import GAFM, KDk, LADistill
from flower_vfl.privacy.label_privacy import Mechanism, row_uniforms
from flower_vfl.protocol.messages import Verb, read, to_tensor
from flower_vfl.strategies import (
    DEFENSES,
    Checkpoints,
    Defense,
    EarlyStopping,
    VerticalResult,
    VerticalStrategy,
    build_defense,
)

PRIVATE = "auc=0.8,key=7"
RANGE = "auc=0.8,key=7,low=0,high=40"


def three() -> Tensor:
    return (features(1)[:, 0] > 0).long() + (features(2)[:, 0] > 0).long()


def values() -> Tensor:
    return features(0)[:, 0] * 3 + 20


def others(labels: Tensor) -> Tensor:
    """Return labels that differ from these in every row."""
    if labels.is_floating_point():
        return 40.0 - labels
    return (labels + 1) % (int(labels.max()) + 1)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """Have every label randomised as if these were the labels."""

    def set_labels(known: Tensor) -> None:
        def randomise(
            self: Mechanism, labels: Tensor, ids: Iterable[object], key: int
        ) -> Tensor:
            assert len(labels) == len(known)
            numbers = known.double()
            given = numbers.tolist(), self.text, self.columns
            return self.apply(numbers, row_uniforms(key, ids, *given))

        monkeypatch.setattr(Mechanism, "randomise", randomise)

    return set_labels


class Recorder:
    """Keeps all that parties answer, but metrics that are outside of the promise."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self._split = ""

    def before(self, message: Message) -> None:
        if message.metadata.message_type == Verb.EVALUATE.value:
            self._split = read(message).text("split")

    def after(self, reply: Message) -> Message:
        kind, content = reply.metadata.message_type, read(reply)
        tensors = {name: to_tensor(part) for name, part in content.arrays.items()}
        labels = None if content.labels is None else to_tensor(content.labels)
        metrics = dict(content.metrics)
        if kind == Verb.EVALUATE.value and self._split != "valid":
            metrics = {}
        self.answers.append([kind, tensors, labels, metrics])
        return reply


def run(
    app: ClientApp, folder: Path, recorder: Recorder, rounds: int = 2, **options: Any
) -> tuple[list[Any], VerticalResult]:
    """Return all that left and all that was learned, and the result."""
    given: dict[str, Any] = {
        "batch_size": 16,
        "seed": 3,
        "valid_fraction": 0.3,
        "progress": False,
        "defense": Defense((), at="label", noise_seed=5),
        "checkpoints": Checkpoints(keep_final=True),
        **options,
    }
    with InProcessGrid(app, 3, {"state-dir": str(folder)}) as grid:
        hooked = HookedGrid(grid, recorder.before, recorder.after)
        result = VerticalStrategy(**given).start(hooked, num_rounds=rounds)
    states = final_states(folder)
    for state in states.values():
        state.pop("plan")  # its digest of the data never leaves the party
        state["defense" if "defense" in state else "step"] = None
    valid = {e: found["valid"] for e, found in result.evaluations.items()}
    learned = [states, valid, result.stopped, result.label_privacy]
    loss = [dict(m)["loss"] for m in result.train_metrics_clientapp.values()]
    return [recorder.answers, learned, loss], result


def assert_no_true_label(
    make: Callable[[Tensor], ClientApp],
    labels: Tensor,
    pretend: Callable[[Tensor], None],
    folder: Path,
    **options: Any,
) -> VerticalResult:
    """Run with labels and with others; only metrics of true labels may differ."""
    pretend(labels)
    first, result = run(make(labels), folder / "first", Recorder(), **options)
    second, changed = run(
        make(others(labels)), folder / "second", Recorder(), **options
    )
    assert_equal(first, second)
    tests = [[e["test"] for e in r.evaluations.values()] for r in (result, changed)]
    assert tests[0] != tests[1]  # these are of true labels
    return result


def app_of(
    labels: Tensor, objective: Callable[[], Objective], privacy: str, **options: Any
) -> ClientApp:
    """Return an app with some objective at the label party."""

    def label(context: Context) -> LabelParty:
        own = {"trust_server": True, "build_defense": build_defense, **options}
        if privacy:
            own |= {"label_privacy": LabelPrivacy.from_text(privacy)}
        if own.pop("featured", False):
            own |= {"features": features(0), "model": bottom()}
        return LabelParty(labels, objective(), optimizer=ADAM, device="cpu", **own)

    return vertical_client_app(make_passive, label)


def teacher(inputs: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 4), nn.Dropout(0.2), nn.Linear(4, classes))


SHORT: dict[str, Any] = {"teacher_epochs": 3}
WITH_OWN = {"featured": True}
GAUSSIAN = f"{PRIVATE},mechanism=gaussian"


def entropy() -> Objective:
    return CrossEntropy(top(3))


def three_entropy() -> Objective:
    return CrossEntropy(nn.Linear(2 * WIDTH, 3), 3)


def gafm(classes: int = 2) -> Objective:
    more: dict[str, Any] = {} if classes == 2 else {"classes": 3, "delta": 0.3}
    return GAFM(2 * WIDTH, **more, squashed=False)


def squared_error() -> Objective:
    return MeanSquaredError(nn.Linear(2 * WIDTH, 1), 20.0, 10.0)


def kdk() -> Objective:
    return KDk(nn.Linear(2 * WIDTH, 3), teacher(2 * WIDTH, 3), 3, **SHORT)


OBJECTIVES: dict[str, tuple[Callable[[], Objective], Callable[[], Tensor], str, Any]]
OBJECTIVES = {
    **{
        f"cross-entropy, {loss}": (entropy, binary, f"{PRIVATE},loss={loss}", WITH_OWN)
        for loss in ("plain", "unbiased", "forward", "auto")
    },
    **{
        f"gaussian, {loss}": (entropy, binary, f"{GAUSSIAN},loss={loss}", WITH_OWN)
        for loss in ("plain", "forward")
    },
    "three classes": (three_entropy, three, f"{PRIVATE},loss=auto", {}),
    "a prior": (three_entropy, three, "epsilon=1,key=7,prior=0.45+0.45+0.1", {}),
    "three classes, gaussian": (three_entropy, three, f"{GAUSSIAN},loss=forward", {}),
    "gafm": (gafm, binary, PRIVATE, {}),
    "gafm, gaussian": (gafm, binary, GAUSSIAN, {}),
    "gafm, three classes": (partial(gafm, 3), three, PRIVATE, {}),
    "ladistill, features": (
        lambda: LADistill(top(3), teacher(COLUMNS, 2), **SHORT),
        binary,
        PRIVATE,
        WITH_OWN,
    ),
    "ladistill, embeddings": (
        lambda: LADistill(top(2), teacher(2 * WIDTH, 2), **SHORT),
        binary,
        PRIVATE,
        {},
    ),
    "kdk": (kdk, three, PRIVATE, {}),
    **{
        f"regression, {loss}": (squared_error, values, f"{RANGE},loss={loss}", {})
        for loss in ("plain", "forward", "auto")
    },
    "regression, gaussian": (squared_error, values, f"{RANGE},mechanism=gaussian", {}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives(
    name: str, pretend: Callable[[Tensor], None], tmp_path: Path
) -> None:
    objective, labels, privacy, own = OBJECTIVES[name]

    def make(known: Tensor) -> ClientApp:
        return app_of(known, objective, privacy, **own)

    assert_no_true_label(make, labels(), pretend, tmp_path)


@pytest.mark.parametrize("aggregation", ["sum", "mean", "max", "product", "module"])
def test_aggregations(
    aggregation: str, pretend: Callable[[Tensor], None], tmp_path: Path
) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, parts: list[Tensor]) -> Tensor:
            return (torch.stack(parts, 2) * self.weight).sum(dim=2)

    def make(known: Tensor) -> ClientApp:
        joined = Weighted() if aggregation == "module" else aggregation
        given = {"aggregation": joined, **WITH_OWN}
        return app_of(
            known, lambda: CrossEntropy(top(1)), f"{PRIVATE},loss=plain", **given
        )

    assert_no_true_label(make, binary(), pretend, tmp_path)


@pytest.mark.parametrize("defense", [*DEFENSES, "marvell:s=4 | max-norm"])
def test_transforms_at_the_label_party(
    defense: str, pretend: Callable[[Tensor], None], tmp_path: Path
) -> None:
    """The noise of a transform, the rows that it picks, the gradients it withholds."""

    def make(known: Tensor) -> ClientApp:
        privacy = f"{PRIVATE},loss=forward"
        return app_of(known, lambda: CrossEntropy(top(3)), privacy, **WITH_OWN)

    applied = Defense(defense, at="label", noise_seed=5)
    assert_no_true_label(make, binary(), pretend, tmp_path, defense=applied)


def test_labels_for_a_transform_at_the_strategy(
    pretend: Callable[[Tensor], None], tmp_path: Path
) -> None:
    def make(known: Tensor) -> ClientApp:
        return app_of(known, lambda: CrossEntropy(top(2)), f"{PRIVATE},loss=plain")

    applied = Defense("marvell:s=4", noise_seed=5)
    assert_no_true_label(make, binary(), pretend, tmp_path, defense=applied)


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_early_stopping(
    metric: str, pretend: Callable[[Tensor], None], tmp_path: Path
) -> None:
    """When a run stops, and which epoch was the best, are seen by all parties."""
    stopping = EarlyStopping(patience=1, metric=metric)

    def make(known: Tensor) -> ClientApp:
        privacy = f"{PRIVATE},loss=forward"  # "auto" is one of the objectives above
        return app_of(known, lambda: CrossEntropy(top(3)), privacy, **WITH_OWN)

    given: dict[str, Any] = {
        "early_stopping": stopping,
        "learning_rate": 0.3,
        "rounds": 4,
    }
    result = assert_no_true_label(make, binary(), pretend, tmp_path, **given)
    assert "no longer improved" in result.stopped


@pytest.mark.parametrize(
    ("labels", "calibration", "privacy"),
    [
        ("random_pos", "", "loss=auto"),
        ("random_pred", "te", "loss=plain"),
        ("random_pred", "tr", "loss=forward"),
        ("random_pred:samples=3", "", "loss=plain"),
        ("majority", "te", "loss=plain"),
        ("minority", "", "loss=forward"),
    ],
)
def test_a_union_with_missing_rows(
    labels: str,
    calibration: str,
    privacy: str,
    pretend: Callable[[Tensor], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Class frequencies, synthetic labels and calibration are of randomised labels."""
    imputation = Imputation(labels=labels, calibration=calibration, secret=7)

    def make(known: Tensor) -> ClientApp:
        private = LabelPrivacy.from_text(f"{PRIVATE},{privacy}")
        monkeypatch.setattr("vertical_cases.labels", lambda: known)
        return aligned_app(imputation, REPEATABLE, label_privacy=private)

    assert_no_true_label(make, binary(), pretend, tmp_path)


@pytest.mark.parametrize("privacy", [PRIVATE, f"{PRIVATE},canaries=8"])
def test_what_is_measured_changes_nothing(
    privacy: str, pretend: Callable[[Tensor], None], tmp_path: Path
) -> None:
    """The meter looks at true labels, and only its own numbers depend on them."""
    leakage = Leakage(("norm", "stale"), coalitions=("all",))

    def make(known: Tensor) -> ClientApp:
        text = f"{privacy},loss=forward"
        return app_of(known, lambda: CrossEntropy(top(3)), text, **WITH_OWN)

    result = assert_no_true_label(make, binary(), pretend, tmp_path, leakage=leakage)
    attacks = {each.attack for each in result.records}
    assert {"norm", "stale"} <= attacks
    audited = {e.metric for e in result.records if e.metric.startswith("canary")}
    assert bool(audited) == ("canaries" in privacy)


def test_measured_leakage_is_of_true_labels(
    pretend: Callable[[Tensor], None], tmp_path: Path
) -> None:
    """Otherwise it would say how well randomised labels are found, which is no leak."""
    pretend(binary())
    found = []
    for number, known in enumerate((binary(), others(binary()))):
        app = app_of(known, lambda: CrossEntropy(top(2)), f"{PRIVATE},loss=plain")
        given = {"leakage": Leakage(("cosine",))}
        result = run(app, tmp_path / str(number), Recorder(), **given)[1]
        found.append([e.value for e in result.records if e.metric == "leak"])
    assert found[0] and found[0] != found[1]


def test_the_comparison_finds_a_true_label(
    pretend: Callable[[Tensor], None], tmp_path: Path
) -> None:
    """Without label privacy the same comparison fails."""

    def make(known: Tensor) -> ClientApp:
        return app_of(known, lambda: CrossEntropy(top(2)), "")

    with pytest.raises(AssertionError):
        assert_no_true_label(make, binary(), pretend, tmp_path)
