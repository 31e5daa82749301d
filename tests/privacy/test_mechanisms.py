"""Randomised labels: exact probabilities and bounds, and draws of a secret key."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import chi2, kstest, laplace, norm
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flower_vfl import ConfigError, LabelPrivacy
from flower_vfl.privacy.accountant import (
    Release,
    compose,
    gaussian_delta,
    gaussian_epsilon,
)
from flower_vfl.privacy.label_privacy import (
    Gaussian,
    Laplace,
    Mechanism,
    RandomizedResponse,
    gaussian_mu,
    laplace_epsilon,
)

ROWS = 20_000
GRID = 2.0**-16


def draws(mechanism: Mechanism, label: float, rows: int = ROWS, key: int = 5) -> Tensor:
    """Return what a label becomes in many rows."""
    return mechanism.randomise(torch.full((rows,), label), range(rows), key)


def assert_shares(answers: Tensor, expected: Tensor) -> None:
    """Compare counts with probabilities, within five standard deviations."""
    counts = torch.bincount(answers.long(), minlength=len(expected)).double()
    width = 5.0 * (len(answers) * expected * (1.0 - expected)).sqrt()
    assert ((counts - len(answers) * expected).abs() <= width).all(), counts


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_a_class_is_kept_as_often_as_the_formula_says(
    epsilon: float, classes: int
) -> None:
    mechanism = RandomizedResponse(epsilon, classes)
    kept = math.exp(epsilon) / (math.exp(epsilon) + classes - 1)
    for label in (0, classes - 1):
        expected = torch.full((classes,), (1.0 - kept) / (classes - 1)).double()
        expected[label] = kept
        assert_shares(draws(mechanism, label), expected)
        torch.testing.assert_close(mechanism.channel[label], expected)


def test_with_a_prior_unlikely_classes_are_never_answered() -> None:
    """Weights .6, .3, .1, 0 and ε = 1: the best k by hand is 2 of the 4 classes."""
    mechanism = RandomizedResponse(1.0, 4, (0.1, 0.6, 0.0, 0.3))
    right = [
        math.e / (math.e + k - 1) * mass
        for k, mass in enumerate([0.6, 0.9, 1.0, 1.0], start=1)
    ]
    assert int(np.argmax(right)) == 1
    kept = math.e / (math.e + 1.0)
    rows = {
        1: [0.0, kept, 0.0, 1.0 - kept],
        3: [0.0, 1.0 - kept, 0.0, kept],
        0: [0.0, 0.5, 0.0, 0.5],
        2: [0.0, 0.5, 0.0, 0.5],
    }
    for label, shares in rows.items():
        expected, answers = torch.tensor(shares).double(), draws(mechanism, label)
        assert set(answers.tolist()) == {1, 3}
        assert_shares(answers, expected)
        torch.testing.assert_close(mechanism.channel[label].float(), expected.float())
    assert not mechanism.invertible


def test_a_prior_that_is_sure_leaves_one_answer() -> None:
    mechanism = RandomizedResponse(0.1, 3, (0.05, 0.9, 0.05))
    for label in range(3):
        assert set(draws(mechanism, label, 100).tolist()) == {1}


@pytest.mark.parametrize(
    "mechanism",
    [
        RandomizedResponse(0.7),
        RandomizedResponse(1.5, 5),
        RandomizedResponse(1.0, 4, (0.1, 0.6, 0.0, 0.3)),
        RandomizedResponse(2.0, 4, (0.4, 0.3, 0.2, 0.1)),
    ],
)
def test_no_answer_is_e_to_the_epsilon_times_likelier_for_another_class(
    mechanism: RandomizedResponse,
) -> None:
    table = mechanism.channel[:, mechanism.answers]
    torch.testing.assert_close(table.sum(dim=1), torch.ones(mechanism.classes).double())
    largest = (table.unsqueeze(0) / table.unsqueeze(1)).max()
    assert float(largest) <= math.exp(mechanism.epsilon) * (1.0 + 1e-12)


def test_laplace_noise_has_its_scale_on_a_clipped_value() -> None:
    mechanism = Laplace(2.0, -10.0, 30.0)
    for label, clipped in ((5.0, 5.0), (99.0, 30.0), (-99.0, -10.0)):
        noisy = draws(mechanism, label)
        found = kstest(noisy.numpy() - clipped, laplace(scale=40.0 / 2.0).cdf)
        assert found.pvalue > 1e-6
    # A value outside of the range is told from its end by nothing but the draw.
    assert float(noisy.median()) == pytest.approx(-10.0, abs=1.5)


@pytest.mark.parametrize("classes", [2, 4])
def test_gaussian_noise_has_its_deviation(classes: int) -> None:
    """Binary labels are 1 apart, one-hot rows √2: both have the same μ."""
    mechanism = Gaussian(0.8, 1e-5, classes)
    noisy = draws(mechanism, 1.0)
    assert mechanism.sigma == pytest.approx(
        (math.sqrt(2.0) if classes > 2 else 1) / 0.8
    )
    clean = torch.tensor(1.0)
    if classes > 2:
        clean = torch.eye(classes)[1]
        correlation = torch.corrcoef(noisy.T) - torch.eye(classes)
        assert float(correlation.abs().max()) < 5.0 / math.sqrt(ROWS)
    noise = (noisy - clean).reshape(-1).numpy()
    assert kstest(noise, norm(scale=mechanism.sigma).cdf).pvalue > 1e-6


def test_gaussian_noise_for_a_value_fits_its_range() -> None:
    noisy = draws(Gaussian(0.5, 1e-5, 0, -10.0, 30.0), 50.0)
    assert kstest(noisy.numpy() - 30.0, norm(scale=40.0 / 0.5).cdf).pvalue > 1e-6


@pytest.mark.parametrize(("mu", "epsilon"), [(0.3, 0.6), (1.0, 1.0), (2.0, 9.0)])
def test_delta_of_gaussian_noise_is_the_mass_that_epsilon_does_not_cover(
    mu: float, epsilon: float
) -> None:
    """δ(ε) is the integral of the positive part of p − e^ε·q."""

    def excess(x: float) -> float:
        return max(norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x), 0.0)

    start = mu / 2.0 + epsilon / mu
    expected = quad(excess, start, start + 12.0)[0]
    found = gaussian_delta(epsilon, mu)
    assert found == pytest.approx(expected, rel=1e-6)
    assert gaussian_epsilon(mu, found) == pytest.approx(epsilon, rel=1e-6)
    assert gaussian_mu(None, epsilon, found) == pytest.approx(mu, rel=1e-6)


def test_a_delta_that_suffices_alone_has_epsilon_zero() -> None:
    assert gaussian_epsilon(0.1, 0.05) == 0.0
    with pytest.raises(ConfigError, match="delta"):
        Gaussian(1.0, 0.0)


@pytest.mark.parametrize("auc", [0.51, 0.75, 0.99])
def test_the_auc_becomes_the_parameter_of_each_mechanism(auc: float) -> None:
    assert Laplace(laplace_epsilon(auc), 0.0, 1.0).auc_bound == pytest.approx(auc)
    assert Gaussian(gaussian_mu(auc, None, 1e-5), 1e-5).auc_bound == pytest.approx(auc)
    known = LabelPrivacy(auc=auc).mechanism_for("binary", 2)
    assert known is not None and known.auc_bound == pytest.approx(auc)


def _response(noisy: Tensor, mechanism: Mechanism) -> Tensor:
    return noisy.double()


def _one_hot(noisy: Tensor, mechanism: Mechanism) -> Tensor:
    return noisy[:, 1] - noisy[:, 0]


LikelihoodRatio = Callable[[Tensor, Mechanism], Tensor]


@pytest.mark.parametrize(
    ("text", "classes", "ends", "ratio"),
    [
        ("auc=0.65", 2, (0.0, 1.0), _response),
        ("auc=0.8,mechanism=gaussian", 2, (0.0, 1.0), _response),
        ("auc=0.7,mechanism=gaussian", 5, (0.0, 1.0), _one_hot),
        ("auc=0.7,low=-3,high=5", 0, (-3.0, 5.0), _response),
        ("auc=0.75,mechanism=gaussian,low=0,high=9", 0, (0.0, 9.0), _response),
    ],
)
def test_the_best_attack_reaches_the_bound_and_does_not_exceed_it(
    text: str, classes: int, ends: tuple[float, float], ratio: LikelihoodRatio
) -> None:
    """Every ratio is monotone in the likelihood ratio of two labels of a row."""
    task = "regression" if not classes else "binary" if classes == 2 else "multiclass"
    privacy = LabelPrivacy.from_text(text)
    mechanism = privacy.mechanism_for(task, classes)  # type: ignore[arg-type]
    assert mechanism is not None and mechanism.auc_bound == pytest.approx(privacy.auc)
    rows = 40_000
    sides = torch.arange(rows) % 2
    noisy = mechanism.randomise(torch.tensor(ends)[sides], range(rows), 11)
    found = roc_auc_score(sides, ratio(noisy, mechanism))
    error = math.sqrt(1.0 / (6.0 * rows))  # of an AUC, at most that of 1/2
    assert abs(found - mechanism.auc_bound) < 4.0 * error


def test_more_classes_tell_no_more_than_two() -> None:
    """Two labels of k classes: the answers of both, and the same rest."""
    mechanism = RandomizedResponse(1.0, 5)
    p, q = mechanism.channel[0], mechanism.channel[1]
    pairs = itertools.product(range(5), repeat=2)
    order = (p / q).tolist()
    auc = sum(
        float(q[i] * p[j]) * (0.5 if order[i] == order[j] else order[j] > order[i])
        for i, j in pairs
    )
    assert 0.5 < auc < mechanism.auc_bound


def test_a_draw_depends_on_key_id_label_and_mechanism() -> None:
    mechanism, ids = Gaussian(1.0, 1e-5), [f"row-{i}" for i in range(50)]
    labels = torch.arange(50) % 2
    found = mechanism.randomise(labels, ids, 7)
    assert torch.equal(mechanism.randomise(labels, ids, 7), found)
    noise = found - labels
    others = {
        "key": mechanism.randomise(labels, ids, 8) - labels,
        "id": mechanism.randomise(labels, [f"{i}!" for i in ids], 7) - labels,
        "label": mechanism.randomise(1 - labels, ids, 7) - (1 - labels),
        "mechanism": Gaussian(1.0 + 1e-9, 1e-5).randomise(labels, ids, 7) - labels,
    }
    for what, other in others.items():
        assert ((other - noise).abs() > GRID).all(), what


def test_delta_is_no_other_draw() -> None:
    """It only says how ε is stated; a second training with another adds nothing."""
    labels = torch.ones(20)
    first, second = (Gaussian(1.0, delta) for delta in (1e-5, 1e-6))
    noisy = first.randomise(labels, range(20), 3)
    assert torch.equal(second.randomise(labels, range(20), 3), noisy)


@pytest.mark.parametrize(
    "mechanism",
    [RandomizedResponse(1.0), RandomizedResponse(1.0, 7), Gaussian(1.0, 1e-5, 9)],
)
def test_a_draw_depends_on_no_other_row(mechanism: Mechanism) -> None:
    labels, ids = torch.arange(40) % 2, [f"row-{i}" for i in range(40)]
    whole = mechanism.randomise(labels, ids, 7)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    mixed = mechanism.randomise(labels[order], [ids[i] for i in order.tolist()], 7)
    assert torch.equal(mixed, whole[order])
    assert torch.equal(mechanism.randomise(labels[3:5], ids[3:5], 7), whole[3:5])
    assert torch.equal(mechanism.randomise(labels.double(), ids, 7), whole)


def test_every_process_and_version_draws_the_same() -> None:
    """A resumed run, or one with the key of the ledger, must not draw anew."""
    noisy = Gaussian(1.0, 1e-5).randomise(torch.ones(3), ["a", "b", 3], 7)
    assert (noisy / GRID).tolist() == [86094.0, 115034.0, 66698.0]
    answers = RandomizedResponse(1.0, 5).randomise(torch.full((12,), 3), range(12), 7)
    assert answers.tolist() == [0, 1, 3, 3, 3, 4, 3, 4, 3, 3, 2, 0]


def test_two_mechanisms_of_one_key_have_independent_draws() -> None:
    """Of shared uniforms, ε = 1 wrong and ε = 2 right would tell more than both may."""
    weak, strong = RandomizedResponse(1.0), RandomizedResponse(2.0)
    table = np.zeros((2, 2, 2))
    for label in (0, 1):
        first, second = draws(weak, label), draws(strong, label)
        for i, j in itertools.product((0, 1), repeat=2):
            table[label, i, j] = int(((first == i) & (second == j)).sum())
        expected = ROWS * np.outer(weak.channel[label], strong.channel[label])
        statistic = float(((table[label] - expected) ** 2 / expected).sum())
        assert statistic < chi2.ppf(1.0 - 1e-6, 3)
    # The likelihood ratio of a pair of answers is that of both together.
    assert (table > 0).all()
    ratio = np.log(table[1] / table[0])
    assert np.abs(ratio).max() < 3.0 + 5.0 / math.sqrt(table.min())
    sides = np.repeat([0, 1], ROWS)
    scores = np.concatenate(
        [np.repeat(ratio, table[s].ravel().astype(int)) for s in (0, 1)]
    )
    bound = compose([Release("randomised-response", epsilon=e) for e in (1.0, 2.0)])[2]
    assert roc_auc_score(sides, scores) < bound + 4.0 / math.sqrt(12.0 * ROWS)


@pytest.mark.parametrize("other", [Gaussian(1.0, 1e-5), Laplace(1.0, 0.0, 1.0)])
def test_noise_of_two_mechanisms_is_not_correlated(other: Mechanism) -> None:
    ours = draws(Gaussian(2.0, 1e-5), 0.0)
    rho = float(torch.corrcoef(torch.stack([ours, draws(other, 0.0)]))[0, 1])
    assert abs(rho) < 5.0 / math.sqrt(ROWS)


def test_neighbouring_ids_and_columns_have_nothing_in_common() -> None:
    noisy = draws(Gaussian(1.0, 1e-5, 20), 0.0)[:, 1:]
    rho = torch.corrcoef(torch.cat([noisy[:-1], noisy[1:]], dim=1).T)
    rho.fill_diagonal_(0.0)
    assert float(rho.abs().max()) < 6.0 / math.sqrt(ROWS)


@pytest.mark.parametrize("mechanism", [Gaussian(0.7, 1e-5), Laplace(0.9, 0.0, 1.0)])
def test_last_digits_tell_nothing(mechanism: Mechanism) -> None:
    """Floating-point sums of a label and noise would show which label it was."""
    seen = [set((draws(mechanism, label) / GRID).tolist()) for label in (0.0, 1.0)]
    for values in seen:
        assert all(value == round(value) for value in values)
    # Not finer for one label: each has odd multiples of the grid, half of them.
    for values in seen:
        odd = np.mean([value % 2 for value in values])
        assert abs(odd - 0.5) < 0.02


def test_a_value_between_two_points_of_the_grid_stays_on_it() -> None:
    noisy = draws(Laplace(0.9, 0.0, 1.0), 1.0 / 3.0, 500) / GRID
    assert torch.equal(noisy, noisy.round())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RandomizedResponse(0.0), "epsilon"),
        (lambda: RandomizedResponse(math.inf), "epsilon"),
        (lambda: RandomizedResponse(1.0, 3, (0.5, 0.5)), "prior"),
        (lambda: RandomizedResponse(1.0, 2, (-0.5, 1.5)), "prior"),
        (lambda: Laplace(-1.0, 0.0, 1.0), "epsilon"),
        (lambda: Gaussian(0.0, 1e-5), "mu"),
    ],
)
def test_what_promises_nothing_is_refused(
    make: Callable[[], object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        make()
