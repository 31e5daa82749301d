"""Marvell as a gradient transform: statistics, noise, metrics, state."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from marvell_cases import batch_of, changed, gradient
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.distributions import MultivariateNormal

from flower_vfl import ConfigError, PartyError
from flower_vfl.privacy.accountant import composed_auc
from flower_vfl.randomness import Noise
from flower_vfl.specs import build_from_spec, write_spec
from flower_vfl.strategies.defenses.marvell.solver import solve_marvell
from flower_vfl.strategies.defenses.marvell.transform import (
    ClassNoise,
    Marvell,
    add_noise,
    class_statistics,
)
from flower_vfl.transform import AUC_BOUND, GradientTransform


def problem_of(rows: Tensor, labels: Tensor, s: float) -> tuple[tuple, np.ndarray]:
    """Return the arguments of the solver by numpy, and the difference of the means."""
    g, y = rows.double().numpy(), labels.numpy()
    delta = g[y == 1].mean(axis=0) - g[y == 0].mean(axis=0)
    q = float(delta @ delta)
    u, v = g[y == 0].var(axis=0).mean(), g[y == 1].var(axis=0).mean()
    return (float(u), float(v), g.shape[1], q, float(y.mean()), s * q), delta


def test_is_a_gradient_transform() -> None:
    assert isinstance(Marvell(), GradientTransform)
    assert Marvell().requires_labels


@pytest.mark.parametrize("exchange", [False, True])
def test_noise_has_the_covariances_of_the_solution(exchange: bool) -> None:
    rows, labels = gradient(rows=300_000)
    labels = 1 - labels if exchange else labels  # the other class is the wider one
    problem, delta = problem_of(rows, labels, s=2.0)
    solution = solve_marvell(*problem)
    noise = (changed(Marvell(s=2.0), rows, batch_of(labels)) - rows).double()
    assert noise.square().sum(dim=1).mean() == pytest.approx(problem[-1], rel=0.02)
    unit = torch.from_numpy(delta / math.sqrt(problem[3]))
    line = torch.outer(unit, unit)
    d = rows.shape[1]
    for label, one, two in (
        (0, solution.lambda1_neg, solution.lambda2_neg),
        (1, solution.lambda1_pos, solution.lambda2_pos),
    ):
        drawn = noise[labels == label]
        assert drawn.mean(dim=0).abs().max() < 5 * math.sqrt(one / len(drawn))
        covariance = drawn.T @ drawn / len(drawn)
        expected = (one - two) * line + two * torch.eye(d)
        torch.testing.assert_close(
            covariance, expected, rtol=0, atol=7 * one / math.sqrt(len(drawn))
        )
        across = (covariance.trace() - unit @ covariance @ unit) / (d - 1)
        assert across == pytest.approx(two, rel=0.02, abs=1e-9)
    assert max(solution.lambda2_neg, solution.lambda2_pos) > 0.1


def test_the_wider_class_gets_noise_along_one_line_only() -> None:
    rows, labels = gradient()
    noise = changed(Marvell(), rows, batch_of(labels)) - rows
    assert torch.linalg.matrix_rank(noise[labels == 1], tol=1e-4) == 1
    assert torch.linalg.matrix_rank(noise[labels == 0], tol=1e-4) == rows.shape[1]


def test_reports_divergence_and_bound() -> None:
    rows, labels = gradient()
    batch = batch_of(labels)
    changed(Marvell(s=9.0), rows, batch)
    expected = solve_marvell(*problem_of(rows, labels, 9.0)[0]).sum_kl
    assert batch.metrics["sum_kl"] == pytest.approx(expected, rel=1e-9)
    assert batch.metrics[AUC_BOUND] == composed_auc([batch.metrics["sum_kl"]])
    assert batch.metrics["one_class"] == 0.0
    assert "marvell_s" not in batch.metrics


def test_no_attack_beats_the_bound() -> None:
    # Rows that are what the paper assumes; the best attack is the likelihood ratio.
    stream = torch.Generator().manual_seed(1)
    labels = (torch.arange(20_000) % 4 == 0).long()
    rows = torch.randn(20_000, 8, generator=stream) * (1 + 0.3 * labels.unsqueeze(1))
    rows[:, 0] += labels
    batch = batch_of(labels)
    noisy = changed(Marvell(s=3.0), rows, batch).double()
    densities = []
    for label in (0, 1):
        own = noisy[labels == label]
        densities.append(
            MultivariateNormal(own.mean(dim=0), own.T.cov()).log_prob(noisy)
        )
    attack = roc_auc_score(labels, densities[1] - densities[0])
    clean = roc_auc_score(labels, rows[:, 0])
    assert 0.5 < attack < batch.metrics[AUC_BOUND] < 1
    assert attack < clean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1 << 17, 50])
def test_class_statistics_are_numpys(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flower_vfl.strategies.defenses.marvell.transform._BLOCK", block
    )
    rows, labels = gradient(rows=301, classes=3)
    rows = (rows * 1e-3 + 50.0).to(dtype)  # a mean that single precision sums spoil
    sizes, means, variances = class_statistics(rows, labels, 3)
    g, y = rows.double().numpy(), labels.numpy()
    for k in range(3):
        own = g[y == k]
        assert sizes[k] == len(own)
        np.testing.assert_allclose(means[k], own.mean(axis=0), rtol=1e-13)
        assert variances[k] == pytest.approx(own.var(axis=0).mean(), rel=1e-9)


@pytest.mark.parametrize(
    "form",
    [
        lambda y: y.bool(),
        lambda y: y.float(),
        lambda y: y.to(torch.int8),
        lambda y: y.double().unsqueeze(1),
        lambda y: 2 * y - 1,
        lambda y: 5.0 + 3.0 * y,
    ],
)
def test_labels_of_any_form(form: object) -> None:
    rows, labels = gradient()
    expected = changed(Marvell(), rows, batch_of(labels))
    assert callable(form)
    assert torch.equal(changed(Marvell(), rows, batch_of(form(labels))), expected)


def test_same_step_same_noise_and_input_untouched() -> None:
    rows, labels = gradient()
    kept = rows.clone()
    first = changed(Marvell(), rows, batch_of(labels))
    assert torch.equal(first, changed(Marvell(), rows, batch_of(labels)))
    assert not torch.equal(first, changed(Marvell(), rows, batch_of(labels, step=2)))
    assert not torch.equal(first, changed(Marvell(), rows, batch_of(labels, party="b")))
    assert torch.equal(rows, kept)
    assert first.dtype == rows.dtype


@pytest.mark.parametrize("auc", [0.55, 0.7, 0.9])
@pytest.mark.parametrize("classes", [2, 4])
def test_dynamic_mode_keeps_a_bound_with_little_power(auc: float, classes: int) -> None:
    rows, labels = gradient(rows=400, classes=classes)
    batch = batch_of(labels)
    noise = changed(Marvell(auc=auc), rows, batch) - rows
    assert batch.metrics[AUC_BOUND] == pytest.approx(auc, rel=1e-9)
    needed = batch.metrics["marvell_s"]
    assert needed > 0 and bool(noise.any())
    if classes == 2:
        for s, enough in ((needed * 1.001, True), (needed * 0.999, False)):
            batch = batch_of(labels)
            changed(Marvell(s=s), rows, batch)
            assert (batch.metrics[AUC_BOUND] <= auc) == enough


def test_dynamic_mode_hides_variances_where_the_means_agree() -> None:
    stream = torch.Generator().manual_seed(5)
    half = torch.randn(100, 4, generator=stream)
    rows = torch.cat([half, -half, 3 * half, -3 * half])
    labels = torch.arange(400) // 200
    batch = batch_of(labels)
    noise = changed(Marvell(auc=0.6), rows, batch) - rows
    assert batch.metrics[AUC_BOUND] == pytest.approx(0.6)
    assert bool(noise[labels == 0].any()) and noise[labels == 1].abs().max() < 1e-4
    batch = batch_of(labels)
    assert torch.equal(changed(Marvell(s=4.0), rows, batch), rows)  # P = s·q = 0
    assert batch.metrics[AUC_BOUND] == 1.0


def test_a_batch_of_one_class_gets_the_last_noise_of_its_party() -> None:
    rows, labels = gradient(rows=20_000, d=3)
    defense = Marvell()
    batch = batch_of(torch.ones(len(rows)))
    assert defense(rows, batch) is rows  # nothing to go by yet
    assert batch.metrics == {"one_class": 1.0}
    changed(defense, rows, batch_of(labels, step=2))
    assert defense(rows, batch_of(torch.ones(len(rows)), 3, party="other")) is rows
    solution = solve_marvell(*problem_of(rows, labels, 4.0)[0])
    for label, one, two in (
        (0, solution.lambda1_neg, solution.lambda2_neg),
        (1, solution.lambda1_pos, solution.lambda2_pos),
    ):
        batch = batch_of(torch.full((len(rows),), label), step=4)
        noise = (changed(defense, rows, batch) - rows).double()
        power = noise.square().sum(dim=1).mean()
        assert power == pytest.approx(one + 2 * two, rel=0.06)
        assert batch.metrics == {"one_class": 1.0}


@pytest.mark.parametrize("classes", [2, 5])
def test_state_survives_a_file(classes: int) -> None:
    rows, labels = gradient(classes=classes)
    defense = Marvell()
    changed(defense, rows, batch_of(labels))
    changed(defense, rows, batch_of(torch.ones(len(rows)), step=2))
    file = io.BytesIO()
    torch.save(defense.state_dict(), file)
    file.seek(0)
    restored = Marvell()
    restored.load_state_dict(torch.load(file, weights_only=True))
    alone = batch_of(torch.ones(len(rows)), step=3)
    assert torch.equal(changed(restored, rows, alone), changed(defense, rows, alone))
    with pytest.raises(ConfigError, match="state"):
        restored.load_state_dict({"something": 1})


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("auc", [None, 0.6])
def test_finite_in_finite_out(size: float, classes: int, auc: float | None) -> None:
    rows, labels = gradient(rows=60, classes=classes)
    rows = rows / rows.abs().max() * size
    batch = batch_of(labels)
    result = changed(Marvell(auc=auc), rows, batch)
    assert bool(result.isfinite().all())
    assert 0.5 <= batch.metrics[AUC_BOUND] <= 1.0
    assert all(math.isfinite(value) for value in batch.metrics.values())
    if 1e-40 < size < 1e38:
        unit = batch_of(labels)
        changed(Marvell(auc=auc), rows / size, unit)
        assert batch.metrics == pytest.approx(unit.metrics, rel=1e-4)


@pytest.mark.parametrize("size", [1e-300, 1e300, 1.7e308])
@pytest.mark.parametrize("classes", [2, 3])
def test_double_precision_has_no_scale_either(size: float, classes: int) -> None:
    rows, labels = gradient(rows=60, classes=classes)
    rows = rows.double() / rows.abs().max()
    plain, scaled = batch_of(labels), batch_of(labels)
    plain, scaled = plain.with_digest(rows), scaled.with_digest(rows)  # equal noise
    expected = changed(Marvell(s=0.5), rows, plain)
    result = changed(Marvell(s=0.5), rows * size, scaled)
    assert scaled.metrics == pytest.approx(plain.metrics, rel=1e-6)
    assert bool(result.isfinite().all())
    if size < 1e308:
        torch.testing.assert_close(result / size, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("d", [1, 5])
def test_tiny_batches(rows: int, d: int) -> None:
    g, labels = torch.randn(rows, d), torch.arange(rows) % 2
    batch = batch_of(labels)
    assert bool(changed(Marvell(), g, batch).isfinite().all())
    assert 0.5 <= batch.metrics[AUC_BOUND] <= 1.0


def test_half_precision_and_extra_dimensions() -> None:
    rows, labels = gradient(d=12)
    shaped = rows.to(torch.bfloat16).reshape(-1, 3, 4)
    result = changed(Marvell(), shaped, batch_of(labels))
    assert result.shape == shaped.shape and result.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "wrong", [[0.5, 1.0, 0.0], [0.0, math.nan, 1.0], [0, 1, math.inf]]
)
def test_refuses_labels_that_are_no_classes(wrong: list[float]) -> None:
    with pytest.raises(PartyError, match="iso or max-norm") as error:
        Marvell()(torch.randn(3, 2), batch_of(torch.tensor(wrong), step=5))
    assert error.value.step == 5


def test_refuses_missing_labels_and_bad_gradients() -> None:
    with pytest.raises(PartyError, match="labels"):
        Marvell()(torch.randn(3, 2), batch_of(None))
    with pytest.raises(PartyError, match="not finite"):
        Marvell()(torch.tensor([[1.0], [math.inf]]), batch_of(torch.tensor([0, 1])))


@pytest.mark.parametrize("arguments", [{"s": -1.0}, {"s": math.inf}, {"s": math.nan}])
def test_refuses_bad_power(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="s must be"):
        Marvell(**arguments)


@pytest.mark.parametrize("auc", [0.5, 0.2, 1.0, math.nan])
def test_refuses_a_bound_that_is_none(auc: float) -> None:
    with pytest.raises(ConfigError, match="auc must be"):
        Marvell(auc=auc)


def test_config_string() -> None:
    built = build_from_spec("defense", "marvell:s=2,auc=0.6", {"marvell": Marvell})
    assert (built.s, built.auc) == (2.0, 0.6)
    assert write_spec("marvell", built, Marvell) == "marvell:s=2.0,auc=0.6"
    assert write_spec("marvell", Marvell(), Marvell) == "marvell"


def test_add_noise_of_nothing_is_the_rows() -> None:
    rows, labels = gradient()
    zero = torch.zeros(2, dtype=torch.float64)
    noise = ClassNoise(zero, torch.zeros(1, 6), zero.unsqueeze(1), zero)
    assert add_noise(rows, labels, noise, Noise(1)) is rows
