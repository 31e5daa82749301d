"""The leakage meter against scikit-learn, one party and one attack at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meter_cases import ALL, FOUR, case, leaks_of
from records_cases import by_name
from scipy.stats import pearsonr
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.attacks import (
    LeakageMeter,
    cosine_attack,
    mean_attack,
    median_attack,
    norm_attack,
    spectral_attack,
)


def expected_scores(
    gradient: Tensor, labels: Tensor, clean: Tensor
) -> dict[str, Tensor]:
    """Return the scores of every attack of a binary task, from the functions."""
    first = int((labels == 1).nonzero()[0, 0])
    return {
        "norm": norm_attack(gradient),
        "cosine": cosine_attack(gradient, clean[first]),
        "mean": mean_attack(gradient, labels),
        "median": median_attack(gradient, labels),
        "mean:hard=true": mean_attack(gradient, labels, hard=True),
        "median:hard=true": median_attack(gradient, labels, hard=True),
        "spectral": spectral_attack(gradient),
    }


def test_every_attack_on_several_parties() -> None:
    meter = LeakageMeter(ALL)
    gradients, cleans = {}, {}
    for number, width in enumerate((1, 6, 40)):
        clean, _ = case(width=width, seed=number)
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(9))
        gradients[f"passive-{number}"] = (clean + 1e-3 * noise).double()
        cleans[f"passive-{number}"] = clean.double()
    _, labels = case(seed=1)
    found = by_name(meter.measure(gradients, labels.float(), 1, cleans))
    assert len(found) == 3 * len(ALL) * 2
    known = int((labels == 1).nonzero()[0, 0])
    rest = np.delete(np.arange(200), known)
    for party, gradient in gradients.items():
        scores = expected_scores(gradient, labels, cleans[party])
        for name, score in scores.items():
            rows = rest if name == "cosine" else np.arange(200)
            auc = roc_auc_score(labels[rows], score[rows])
            value = found[f"leak_{name}/{party}"]
            assert value == pytest.approx(auc, abs=1e-12), name
            flipped = found[f"leak_flipped_{name}/{party}"]
            assert flipped == max(value, 1 - value)
        alone = leaks_of(LeakageMeter(ALL), gradient, labels, 1, cleans[party])
        assert list(alone) == list(ALL)
        for name, value in alone.items():
            expected = found[f"leak_{name}/{party}"]
            assert value == pytest.approx(expected, abs=1e-12)


def test_wide_gradients_in_single_precision() -> None:
    gradient, labels = case(rows=600, width=100, leak=0.1)
    found = leaks_of(LeakageMeter(ALL), gradient, labels, 1)
    known = int((labels == 1).nonzero()[0, 0])
    rest = np.delete(np.arange(600), known)
    scores = expected_scores(gradient.double(), labels, gradient.double())
    for name, score in scores.items():
        rows = rest if name == "cosine" else np.arange(600)
        auc = roc_auc_score(labels[rows], score[rows])
        assert found[name] == pytest.approx(auc, abs=2e-4), name


@pytest.mark.parametrize("scale, offset", [(1e-30, 0.0), (1e30, 0.0), (1.0, 3e3)])
def test_scale_and_offset_do_not_matter(scale: float, offset: float) -> None:
    gradient, labels = case(rows=600, width=64)
    moved = (gradient / gradient.std() + offset) * scale
    attacks = ["mean", "median"] + ([] if offset else ["norm", "cosine"])
    found = leaks_of(LeakageMeter(attacks), moved, labels, 1)
    # What rounding did to the rows themselves is not the meter's to answer for.
    plain = moved.double() / scale - offset
    expected = leaks_of(LeakageMeter(attacks), plain, labels, 1)
    for name in attacks:
        assert found[name] == pytest.approx(expected[name], abs=2e-4), name


def test_several_classes() -> None:
    gradient, labels = case(rows=300, width=5, classes=4, seed=2)
    gradient, names = gradient.double(), labels.numpy()
    meter = LeakageMeter(FOUR, task="multiclass")
    found = leaks_of(meter, gradient, labels, 1)
    flipped = leaks_of(meter, gradient, labels, 1, flipped=True)
    known = [int((labels == c).nonzero()[0, 0]) for c in range(4)]
    rest = np.delete(np.arange(300), known)
    scores = {
        "norm": norm_attack(gradient).unsqueeze(1).expand(-1, 4),
        "cosine": cosine_attack(gradient, gradient[known]),
        "mean": mean_attack(gradient, labels),
        "median": median_attack(gradient, labels),
    }
    for name, score in scores.items():
        rows = rest if name == "cosine" else np.arange(300)
        aucs = [roc_auc_score(names[rows] == c, score[rows, c]) for c in range(4)]
        assert found[name] == pytest.approx(np.mean(aucs), abs=1e-12), name
        best = np.mean([max(a, 1 - a) for a in aucs])
        assert flipped[name] == pytest.approx(best, abs=1e-12), name


def test_a_batch_with_two_of_ten_classes() -> None:
    gradient, labels = case(rows=100, width=5, seed=3)
    binary = leaks_of(LeakageMeter(("norm", "mean")), gradient, labels, 1)
    meter = LeakageMeter(("norm", "mean"), task="multiclass")
    found = leaks_of(meter, gradient, labels * 4 + 3, 1)
    assert found["mean"] == pytest.approx(binary["mean"])
    assert found["norm"] == pytest.approx(binary["norm"])


def test_direct() -> None:
    stream = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (50,), generator=stream)
    share = torch.rand(50, 1, generator=stream)
    gradient = share - labels.unsqueeze(1)
    meter = LeakageMeter(("direct", "direct:hard=false"))
    assert set(leaks_of(meter, gradient, labels, 1).values()) == {1.0}
    both = torch.cat([-gradient, gradient], dim=1)
    assert set(leaks_of(meter, both, labels, 2).values()) == {1.0}
    labels = torch.randint(0, 7, (50,), generator=stream)
    shares = torch.softmax(torch.randn(50, 9, generator=stream), dim=1)
    gradient = shares - torch.nn.functional.one_hot(labels, 9)
    meter = LeakageMeter(("direct", "direct:hard=false"), task="multiclass")
    assert leaks_of(meter, gradient, labels, 1)["direct"] == pytest.approx(1.0)
    with pytest.raises(PartyError, match="one per class; this one has 4"):
        leaks_of(meter, gradient[:, :4], labels, 2)
    with pytest.raises(PartyError, match=r"'a', step 3.*columns 1 or 2"):
        leaks_of(LeakageMeter(("direct",)), gradient, labels % 2, 3)


def test_regression() -> None:
    stream = torch.Generator().manual_seed(0)
    labels = torch.randn(120, generator=stream, dtype=torch.float64) * 5 + 20
    gradient = torch.randn(120, 4, generator=stream, dtype=torch.float64)
    gradient[:, 2] -= 0.2 * labels
    meter = LeakageMeter(task="regression")
    found = leaks_of(meter, gradient, labels, 1)
    columns = [pearsonr(gradient[:, c], labels)[0] for c in range(4)]
    assert found["direct"] == pytest.approx(min(columns))
    norm = pearsonr(np.linalg.norm(gradient.numpy(), axis=1), labels)[0]
    assert found["norm"] == pytest.approx(norm)
    component = PCA(n_components=1).fit_transform(gradient.numpy())[:, 0]
    rho = abs(pearsonr(component, labels)[0])
    flipped = leaks_of(meter, gradient, labels, flipped=True)
    assert flipped["spectral"] == pytest.approx(rho)
    assert leaks_of(meter, gradient, torch.ones(120), 2) == {}
    assert leaks_of(meter, torch.zeros(120, 4), labels, 3) == {
        "norm": 0.0,
        "direct": 0.0,
        "spectral": 0.0,
    }
    with pytest.raises(ConfigError, match="'mean' needs classes"):
        LeakageMeter(("mean",), task="regression")


@pytest.mark.parametrize("width", [1, 3, 200])
def test_zeros_tell_nothing(width: int) -> None:
    _, labels = case()
    attacks = (*ALL, "mean:held_out=true")
    found = leaks_of(LeakageMeter(attacks), torch.zeros(200, width), labels, 1)
    assert found == dict.fromkeys(attacks, 0.5)


def test_the_known_gradient_is_not_zero() -> None:
    gradient, labels = case()
    first, second = (int(i) for i in (labels == 1).nonzero()[:2, 0])
    gradient[first] = 0.0
    found = leaks_of(LeakageMeter(("cosine",)), gradient.double(), labels, 1)
    rest = np.delete(np.arange(200), second)
    score = cosine_attack(gradient.double(), gradient[second].double())
    auc = roc_auc_score(labels[rest], score[rest])
    assert found["cosine"] == pytest.approx(auc, abs=1e-12)


def test_halves_do_not_score_themselves() -> None:
    gradient, labels = case(rows=41, width=3)
    gradient = gradient.double()
    score = torch.empty(41, dtype=torch.float64)
    first = torch.zeros(41, dtype=torch.bool)
    for c in (0, 1):
        first[(labels == c).nonzero()[::2, 0]] = True
    for half in (first, ~first):
        centers = [gradient[~half & (labels == c)].mean(dim=0) for c in (0, 1)]
        score[half] = mean_attack(gradient[half], centers=torch.stack(centers))
    found = leaks_of(LeakageMeter(("mean:held_out=true",)), gradient, labels, 1)
    auc = roc_auc_score(labels, score)
    assert found["mean:held_out=true"] == pytest.approx(auc, abs=1e-12)


def test_a_sample_of_the_rows_for_the_medians() -> None:
    gradient, labels = case(rows=400, width=4, leak=2.0)
    gradient = gradient.double()
    centers = []
    for c in (0, 1):
        rows = (labels == c).nonzero()[:, 0]
        centers.append(np.median(gradient[rows[np.arange(30) * len(rows) // 30]], 0))
    score = median_attack(gradient, centers=torch.from_numpy(np.stack(centers)))
    attacks = ("median:sample=30", "median:sample=1000", "median")
    found = leaks_of(LeakageMeter(attacks), gradient, labels, 1)
    auc = roc_auc_score(labels, score)
    assert found["median:sample=30"] == pytest.approx(auc, abs=1e-12)
    assert found["median:sample=1000"] == found["median"]


def test_medians_of_large_gradients_come_from_a_sample() -> None:
    attacks = ("median", "median:sample=none", "median:sample=127")
    gradient, labels = case(rows=400, width=164, leak=0.05)
    few, every, sample = leaks_of(
        LeakageMeter(attacks), gradient[:, :163], labels, 1
    ).values()
    assert few == every != sample
    few, every, sample = leaks_of(LeakageMeter(attacks), gradient, labels, 1).values()
    assert few == sample != every  # a class has fewer than 243 rows


def test_medians_of_many_rows_come_from_threes() -> None:
    attacks = ("median", "median:sample=none", "median:sample=127")
    found = []
    for seed in range(8):
        gradient, labels = case(rows=1024, width=80, leak=0.05, seed=seed)
        given = LeakageMeter(attacks), gradient, labels, 1
        found.append(list(leaks_of(*given).values()))
    few, every, sample = torch.tensor(found).mean(dim=0).tolist()
    assert 0.5 < few < every  # no better than the median of all rows,
    assert few > sample - 0.005  # and no worse than that of a sample


def test_a_regression_needs_numbers() -> None:
    gradient, _ = case()
    values = torch.full((len(gradient),), torch.nan)
    with pytest.raises(PartyError, match="some labels are missing or infinite"):
        LeakageMeter(task="regression").measure({"a": gradient}, values, 1)


def test_more_rows_than_are_scored_at_once() -> None:
    gradient, labels = case(rows=2**14, width=1)
    meter = LeakageMeter(FOUR)
    whole = meter.measure({"a": gradient, "b": -gradient}, labels, 1)
    alone = meter.measure({"b": -gradient}, labels, 1)
    assert [each for each in whole if each.party == "b"] == alone
