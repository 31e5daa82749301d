"""Marvell as a gradient transform: statistics, noise, metrics, state, many classes."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from flower_vfl import ConfigError, PartyError
from flower_vfl.spec import build_from_spec, write_spec
from flower_vfl.strategies.marvell import (
    Marvell,
    Noise,
    add_noise,
    class_statistics,
)
from flower_vfl.strategies.marvell_multiclass import (
    solve_multiclass,
    water_fill,
    worst_pair,
)
from flower_vfl.strategies.marvell_solver import solve_marvell
from flower_vfl.transform import AUC_BOUND, Batch, GradientTransform


def batch_of(labels: Tensor | None, step: int = 1, party: str = "p1") -> Batch:
    return Batch(party=party, step=step, seed=7, labels=labels)


def gradient(
    rows: int = 200, d: int = 6, positive: float = 0.3, classes: int = 2
) -> tuple[Tensor, Tensor]:
    """Return rows whose classes differ in mean and in variance, and their labels."""
    stream = torch.Generator().manual_seed(3)
    if classes == 2:
        labels = (torch.rand(rows, generator=stream) < positive).long()
    else:
        labels = torch.arange(rows) % classes
    means = torch.randn(classes, d, generator=stream)
    spread = torch.linspace(0.5, 1.0, classes)[labels].unsqueeze(1)
    return torch.randn(rows, d, generator=stream) * spread + means[labels], labels


def changed(defense: Marvell, rows: Tensor, batch: Batch) -> Tensor:
    result = defense(rows, batch)
    assert result is not None
    return result


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
    assert batch.metrics[AUC_BOUND] == Marvell.bound(batch.metrics["sum_kl"])
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
    monkeypatch.setattr("flower_vfl.strategies.marvell._BLOCK", block)
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
    assert defense.state_dict()["one_class"] == {"p1": 3, "other": 1}


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
    assert restored.state_dict()["one_class"] == {"p1": 2}
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


# More than two classes.


def test_water_filling_is_optimal() -> None:
    scatter, within, power = np.array([9.0, 4.0, 1.0, 0.01]), 0.7, 5.0
    found = minimize(
        lambda x: (scatter / (x + within)).sum(),
        np.full(4, power / 4),
        bounds=[(0, None)] * 4,
        constraints={"type": "eq", "fun": lambda x: x.sum() - power},
        options={"ftol": 1e-15},
    )
    filled = water_fill(scatter, within, power)
    np.testing.assert_allclose(filled, found.x, atol=1e-5)
    assert filled.sum() == pytest.approx(power) and filled[3] == 0.0
    assert not water_fill(scatter, within, 0.0).any()
    assert water_fill(scatter[:0], within, power).size == 0


@pytest.mark.parametrize("d", [3, 7])
def test_worst_pair_is_the_largest_divergence_of_torch(d: int) -> None:
    stream = torch.Generator().manual_seed(2)
    means = torch.randn(4, d, generator=stream, dtype=torch.float64)
    variances, weights = np.array([0.5, 1.0, 0.8, 2.0]), np.array([0.1, 0.2, 0.3, 0.4])
    noise = solve_multiclass(means, variances, weights, 2.0, None)
    shared = noise.directions.T @ torch.diag(torch.from_numpy(noise.along))
    shared = shared @ noise.directions
    normals = [
        MultivariateNormal(mean, shared + variance * torch.eye(d, dtype=torch.float64))
        for mean, variance in zip(means, variances, strict=True)
    ]
    pairs = [
        float(kl_divergence(a, b) + kl_divergence(b, a))
        for a in normals
        for b in normals
    ]
    assert noise.sum_kl == pytest.approx(max(pairs), rel=1e-9)
    assert noise.power == pytest.approx(2.0 * noise.spread)


def test_worst_pair_without_variance() -> None:
    means, zeros = np.array([[0.0], [1.0], [3.0]]), np.zeros(3)
    assert worst_pair(means, zeros, np.array([2.0]), 5) == pytest.approx(9 / 2)
    assert worst_pair(means, zeros, np.array([0.0]), 0) == math.inf
    assert worst_pair(means[:, :0], zeros, np.array([]), 3) == 0.0
    assert worst_pair(means[:, :0], np.arange(3.0), np.array([]), 3) == math.inf


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_two_classes_reduce_to_the_paper(p: float) -> None:
    means = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 0.0]], dtype=torch.float64)
    q, s = 13.0, 4.0
    noise = solve_multiclass(means, np.full(2, 0.2), np.array([1 - p, p]), s, None)
    assert noise.spread == pytest.approx(q)
    assert noise.along == pytest.approx([s * q])
    solution = solve_marvell(0.2, 0.2, 3, q, p, s * q)
    if p == 0.5:  # otherwise covariances of their own hide a little more
        assert solution.lambda1_neg == pytest.approx(s * q)
        assert noise.sum_kl == pytest.approx(solution.sum_kl)
    else:
        assert solution.sum_kl < noise.sum_kl < 1.05 * solution.sum_kl


def test_spread_is_the_mean_distance_of_two_classes() -> None:
    rows, labels = gradient(classes=3)
    sizes, means, variances = class_statistics(rows, labels, 3)
    weights = (sizes / sizes.sum()).numpy()
    total = weight = 0.0
    for a in range(3):
        for b in range(a):
            both = weights[a] * weights[b]
            total += both * float((means[a] - means[b]).square().sum())
            weight += both
    noise = solve_multiclass(means, variances.numpy(), weights, 1.0, None)
    assert noise.spread == pytest.approx(total / weight)


def test_noise_of_many_classes_lies_in_the_span_of_their_means() -> None:
    rows, labels = gradient(rows=3000, d=8, classes=4)
    defense, batch = Marvell(s=3.0), batch_of(labels)
    noise = (changed(defense, rows, batch) - rows).double()
    _, means, _ = class_statistics(rows, labels, 4)
    basis = torch.linalg.svd(means - means.mean(dim=0))[2][:3]
    torch.testing.assert_close(noise @ basis.T @ basis, noise, atol=1e-4, rtol=0)
    distances = torch.pdist(means).square().mean()
    power = float(noise.square().sum(dim=1).mean() / distances)
    assert power == pytest.approx(3.0, rel=0.1)
    assert 0.5 < batch.metrics[AUC_BOUND] <= 1.0


def test_two_of_several_classes_use_the_formula_for_two() -> None:
    rows, labels = gradient()
    defense = Marvell()
    other, several = gradient(classes=5)
    changed(defense, other, batch_of(several))
    expected = changed(Marvell(), rows, batch_of(labels, step=2))
    result = changed(defense, rows, batch_of(4 * labels, step=2))
    assert torch.equal(result, expected)


def test_add_noise_of_nothing_is_the_rows() -> None:
    rows, labels = gradient()
    zero = torch.zeros(2, dtype=torch.float64)
    noise = Noise(zero, torch.zeros(1, 6), zero.unsqueeze(1), zero)
    assert add_noise(rows, labels, noise, torch.Generator()) is rows
