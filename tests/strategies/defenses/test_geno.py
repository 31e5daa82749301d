"""Geno: gradients of a norm out of the ordinary are withheld."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import Result
from scipy.stats import median_abs_deviation
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
from flower_vfl.errors import ConfigError
from flower_vfl.strategies import VerticalStrategy
from flower_vfl.strategies.defenses.geno import Geno, gradient_norm, outlier_limit
from flower_vfl.transform import Batch, GradientTransform

ATTACK = 60  # the step from which on a party's gradients are amplified


def feed(geno: Geno, norms: list[float], party: str = "passive-1") -> list[float]:
    """Return what Geno reports for one-row gradients of given norms."""
    reported = []
    for step, norm in enumerate(norms, 1):
        batch = Batch(party, step, 0)
        rows = torch.tensor([[0.6 * norm, -0.8 * norm]], dtype=torch.float64)
        found = geno(rows, batch)
        assert (found is None) == (batch.metrics["withheld"] == 1.0)
        assert found is None or found.equal(rows)
        reported.append(batch.metrics["withheld"])
    return reported


def honest(number: int, seed: int = 0, spread: float = 0.1) -> list[float]:
    drawn = np.random.default_rng(seed).normal(1.0, spread, number)
    return [float(abs(norm)) for norm in drawn]


def test_the_norm_is_that_of_the_whole_gradient() -> None:
    rows = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    expected = float(np.linalg.norm(rows.numpy().astype(np.float64)))
    assert gradient_norm(rows) == pytest.approx(expected, rel=1e-6)
    assert gradient_norm(rows.double() * 1e250) == pytest.approx(expected * 1e250)
    assert gradient_norm(torch.zeros(3, 2)) == 0.0
    assert math.isfinite(gradient_norm(torch.full((9, 9), 1e308, dtype=torch.float64)))


def test_a_given_limit() -> None:
    reported = feed(Geno(lambda_=2.0), [1.0, 2.0, 2.1, 0.0, 1e9, 1.9])
    assert reported == [0.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert Geno(lambda_=2.0).limit("anybody", 64) == 2.0


@pytest.mark.parametrize("spread", [0.2, 0.5])
def test_the_limit_is_median_and_six_deviations(spread: float) -> None:
    norms = honest(101, spread=spread)
    expected = np.median(norms) + 6 * median_abs_deviation(norms)
    assert outlier_limit(norms) == pytest.approx(expected)
    assert outlier_limit([1.0, 2.0, 3.0, 10.0]) == 2.5 + 6 * 1.0


def test_a_constant_history_does_not_drop_honest_noise() -> None:
    assert outlier_limit([2.0] * 30) == pytest.approx(3.2)
    assert feed(Geno(), [2.0] * 30 + [2.2, 3.1, 3.3]) == [0.0] * 32 + [1.0]


def test_a_history_of_zeros_says_nothing() -> None:
    assert outlier_limit([0.0] * 30) == math.inf
    assert sum(feed(Geno(), [0.0] * 30 + [1.0] * 100)) == 0


def test_the_warm_up_passes_everything() -> None:
    norms = honest(19)
    assert feed(Geno(), [*norms, 100.0, 100.0]) == [0.0] * 20 + [1.0]
    assert feed(Geno(warmup=5), [*norms[:4], 100.0, 100.0]) == [0.0] * 5 + [1.0]


def test_every_party_has_its_own_history() -> None:
    geno = Geno()
    feed(geno, honest(30), "small")
    feed(geno, [100 * norm for norm in honest(30)], "large")
    assert feed(geno, [100.0], "large") == [0.0]
    assert feed(geno, [100.0], "small") == [1.0]
    assert feed(geno, [1e6], "new") == [0.0]


@pytest.mark.parametrize("amplified", [10.0, 1e12])
def test_an_attacker_cannot_move_the_limit_by_being_withheld(amplified: float) -> None:
    geno, undisturbed = Geno(window=100), Geno(window=100)
    norms = honest(900)
    feed(geno, norms[:100])
    feed(undisturbed, norms[:100])
    for norm in norms[100:]:
        assert feed(geno, [norm * amplified] * 3 + [norm]) == [1.0, 1.0, 1.0, 0.0]
        assert feed(undisturbed, [norm]) == [0.0]
    assert geno.limit("passive-1", 1) == undisturbed.limit("passive-1", 1)


@pytest.mark.parametrize("jump", [3.0, 10.0, 100.0])
def test_nobody_is_locked_out_for_ever(jump: float) -> None:
    jumped = [jump * norm for norm in honest(300, seed=1)]
    geno = Geno(patience=50)
    feed(geno, honest(200))
    assert feed(geno, jumped) == [1.0] * 50 + [0.0] * 250
    assert feed(geno, [10 * jump]) == [1.0]  # what is ordinary now was learned anew
    locked = Geno(patience=None)
    feed(locked, honest(200))
    assert feed(locked, jumped) == [1.0] * 300


def test_the_history_is_bounded() -> None:
    geno = Geno(warmup=5, window=30)
    feed(geno, honest(100))
    assert len(geno.history["passive-1"]) == 30
    assert list(geno.history["passive-1"]) == pytest.approx(honest(100)[-30:])


def test_short_batches_of_a_mean_loss_are_not_out_of_the_ordinary() -> None:
    """Rows of a mean over B rows are of size 1/B: the norm goes with 1/√B."""
    source = torch.Generator().manual_seed(0)
    geno, withheld = Geno(), 0.0
    for step in range(1, 200):
        rows = 4 if step % 10 == 0 else 64
        batch = Batch("passive-1", step, 0)
        geno(torch.randn(rows, 8, generator=source) / rows, batch)
        withheld += batch.metrics["withheld"]
    assert withheld == 0.0
    assert geno.limit("passive-1", 4) == pytest.approx(4 * geno.limit("passive-1", 64))


def test_a_restored_history_goes_on_as_if_nothing_had_happened() -> None:
    norms = honest(100) + [5.0] * 20 + [1.0] * 40
    whole = feed(Geno(window=60, patience=12), norms)
    assert whole == [0.0] * 100 + [1.0] * 12 + [0.0] * 48
    for at in (10, 70, 105):
        first, second = (Geno(window=60, patience=12) for _ in range(2))
        begun = feed(first, norms[:at])
        second.load_state_dict(first.state_dict())
        assert begun + feed(second, norms[at:]) == whole
    with pytest.raises(ConfigError, match="history"):
        Geno().load_state_dict({"other": 1})


class Recorder:
    """A transform that changes nothing and keeps what it saw."""

    requires_labels = False

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, Tensor]] = []

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        self.seen.append((batch.party, batch.step, gradient.clone()))
        return gradient

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Amplifier(Recorder):
    """Multiplies what one party gets from a step on, and keeps nothing."""

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        attacked = batch.party == "passive-2" and batch.step >= ATTACK
        return gradient * 10.0 if attacked else gradient


def train(transforms: list[GradientTransform], epochs: int) -> Result:
    """Train on real data with two passive parties, seven steps an epoch."""
    data = load_breast_cancer()
    columns = torch.tensor((data.data - data.data.mean(0)) / data.data.std(0)).float()
    torch.manual_seed(0)

    def party(features: Tensor) -> PassiveParty:
        model = nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Linear(32, 8))
        return PassiveParty(features, model, device="cpu")

    top = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    labels = torch.tensor(data.target)
    label = LabelParty(labels, CrossEntropy(top), device="cpu", trust_server=True)
    strategy = VerticalStrategy(
        batch_size=65, evaluate_every=0, progress=False, defense=transforms
    )
    with in_process([label, party(columns[:, :15]), party(columns[:, 15:])]) as grid:
        return strategy.start(grid, num_rounds=epochs)


def test_a_recorded_run() -> None:
    """The amplified party is dropped at every step, the honest one at none."""
    recorder = Recorder()
    train([recorder], epochs=20)
    recorded = recorder.seen

    def withheld(amplified: str | None) -> dict[str, list[int]]:
        geno = Geno()
        steps: dict[str, list[int]] = {"passive-1": [], "passive-2": []}
        for party, step, gradient in recorded:
            scale = 10.0 if party == amplified and step >= ATTACK else 1.0
            batch = Batch(party, step, 0)
            found = geno(gradient * scale, batch)
            if found is None:
                steps[party].append(step)
            assert batch.metrics["withheld"] == float(found is None)
        return steps

    last = recorded[-1][1]
    assert last == 140
    assert withheld(None) == {"passive-1": [], "passive-2": []}
    for attacker, other in (("passive-1", "passive-2"), ("passive-2", "passive-1")):
        found = withheld(attacker)
        assert found[other] == []
        assert found[attacker] == list(range(ATTACK, last + 1))


def test_a_run_with_an_amplified_party() -> None:
    metrics = train([Amplifier(), Geno()], epochs=10).train_metrics_clientapp
    rates = {
        party: [float(m[f"withheld/{party}"]) for m in metrics.values()]  # type: ignore[arg-type]
        for party in ("passive-1", "passive-2")
    }
    assert rates["passive-1"] == [0.0] * 10
    # Step 60 is the fourth of the seven of epoch 9.
    assert rates["passive-2"] == pytest.approx([0.0] * 8 + [4 / 7, 1.0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lambda_": 0.0}, "lambda_ must be a positive number or none, got 0"),
        ({"lambda_": math.inf}, "lambda_"),
        ({"lambda_": math.nan}, "lambda_"),
        ({"warmup": 0}, "warmup must be at least 1"),
        ({"warmup": 20, "window": 19}, r"window must be at least warmup \(20\)"),
        ({"patience": 0}, "patience must be at least 1 or none, got 0"),
    ],
)
def test_parameters_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Geno(**settings)
