"""The cosine attack against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from meter_cases import SHAPES, scores_case
from sklearn.metrics.pairwise import cosine_similarity

from flower_vfl.leakage.attacks import cosine_attack


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
