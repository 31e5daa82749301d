"""The norm attack against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meter_cases import SHAPES, scores_case

from flower_vfl.leakage.attacks import norm_attack


@pytest.mark.parametrize("shape", SHAPES)
def test_norm(shape: tuple[int, int]) -> None:
    gradient, _ = scores_case(*shape)
    expected = np.linalg.norm(gradient.numpy(), axis=1)
    np.testing.assert_allclose(norm_attack(gradient), expected, rtol=1e-12)
    single = norm_attack(gradient.float())
    np.testing.assert_allclose(single, expected, rtol=1e-5)


def test_norm_of_very_small_and_very_large_rows() -> None:
    gradient = torch.ones(300, 128) * torch.logspace(-36, 36, 300).unsqueeze(1)
    expected = np.linalg.norm(gradient.double().numpy(), axis=1)
    np.testing.assert_allclose(norm_attack(gradient), expected, rtol=1e-6)
    huge = torch.full((3, 4), 1e300, dtype=torch.float64)
    np.testing.assert_allclose(norm_attack(huge), [2e300] * 3)
