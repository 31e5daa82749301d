"""Gradients of any shape and precision, and those that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meter_cases import scores_case

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.attacks import (
    cosine_attack,
    direct_attack,
    mean_attack,
    median_attack,
    norm_attack,
    spectral_attack,
)


def test_gradients_of_any_shape_are_rows() -> None:
    gradient, labels = scores_case(40, 12)
    folded = gradient.reshape(40, 3, 2, 2)
    assert torch.equal(norm_attack(folded), norm_attack(gradient))
    assert torch.equal(mean_attack(folded, labels), mean_attack(gradient, labels))
    known = cosine_attack(folded, folded[0])
    assert torch.equal(known, cosine_attack(gradient, gradient[0]))


def test_half_precision() -> None:
    gradient, labels = scores_case(300, 64, dtype=torch.bfloat16)
    for attack in (norm_attack, spectral_attack):
        expected = attack(gradient.double())
        np.testing.assert_allclose(attack(gradient), expected, rtol=1e-3, atol=1e-5)
    expected = median_attack(gradient.double(), labels)
    scale = float(expected.abs().max())
    found = median_attack(gradient, labels)
    np.testing.assert_allclose(found, expected, atol=1e-4 * scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    gradient, labels = scores_case(300, 64, dtype=torch.float32)
    gradient[7, 3] = bad
    for attack in (norm_attack, spectral_attack, direct_attack):
        with pytest.raises(ConfigError, match="1 numbers of the gradient"):
            attack(gradient)
    for attack in (mean_attack, median_attack):
        with pytest.raises(ConfigError, match="missing or infinite"):
            attack(gradient, labels)
