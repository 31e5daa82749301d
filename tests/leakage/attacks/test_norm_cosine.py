"""The norm attack against numpy, the cosine attack against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meter_cases import SHAPES, scores_case
from sklearn.metrics.pairwise import cosine_similarity

from flower_vfl.leakage.attacks import cosine_attack, norm_attack


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


@pytest.mark.parametrize("shape", SHAPES)
def test_cosine(shape: tuple[int, int]) -> None:
    gradient, labels = scores_case(*shape)
    known = gradient[labels == 1][0]
    expected = cosine_similarity(gradient.numpy(), known.numpy()[None])[:, 0]
    np.testing.assert_allclose(cosine_attack(gradient, known), expected, atol=1e-9)
    several = cosine_attack(gradient, gradient[:3])
    expected = cosine_similarity(gradient.numpy(), gradient[:3].numpy())
    np.testing.assert_allclose(several, expected, atol=1e-9)


def test_cosine_of_nothing_is_zero() -> None:
    gradient = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    known = torch.tensor([1.0, 0.0])
    assert cosine_attack(gradient, known).tolist() == pytest.approx([0.0, 0.6])
    assert cosine_attack(gradient, torch.zeros(2)).tolist() == [0.0, 0.0]
