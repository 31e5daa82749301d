"""The spectral attack against a principal component of scikit-learn."""

from __future__ import annotations

import numpy as np
import torch
from meter_cases import scores_case
from sklearn.decomposition import PCA

from flower_vfl.leakage.attacks import spectral_attack


def test_wide_and_long_rows_have_the_same_principal_direction() -> None:
    for rows, width in ((200, 6), (12, 40)):
        gradient, _ = scores_case(rows, width)
        component = PCA(n_components=1).fit_transform(gradient.numpy())[:, 0]
        score = spectral_attack(gradient)
        np.testing.assert_allclose(score, np.abs(component), rtol=1e-6, atol=1e-12)


def test_spectral_finds_the_smaller_group() -> None:
    stream = torch.Generator().manual_seed(3)
    gradient = torch.randn(200, 16, generator=stream)
    gradient[:20] += 3.0
    assert set(spectral_attack(gradient).topk(20).indices.tolist()) == set(range(20))
