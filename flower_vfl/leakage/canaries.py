"""The canary audit: a lower bound of epsilon from everything that left in a training.

Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run (2023).
https://arxiv.org/abs/2305.08846
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from flower_vfl.records import Measurement

from .attacks.stale import StaleGradients

_BLOCKS, _CONFIDENCE = 8, 0.999


@dataclass(frozen=True)
class Canaries:
    """Rows whose labels a fair coin has chosen, so that features say nothing of them.

    They are cut into 8 blocks. A ridge classifier that knows the coins of the blocks
    before a block guesses its coins. Under ε-DP the odds of a coin, given all that left
    and all coins before, are at most e^ε. So the number of right guesses is dominated
    by a binomial one with p = e^ε/(1+e^ε), and ε follows at 99.9 % confidence (Clopper-
    Pearson). Cross-fitting would guess the first block too but is not valid: two folds
    that guess each other are right or wrong together by chance.
    """

    rows: Tensor  # in an order that does not depend on the sides
    sides: Tensor  # 0 or 1: which of two labels, before any randomisation

    def measure(
        self, parties: Mapping[str, StaleGradients], step: int
    ) -> list[Measurement]:
        """Return how well the coins are guessed from all that left to all parties."""
        means = [part.means(self.rows.cpu())[1].double() for part in parties.values()]
        norms = [part.norm(dim=1, keepdim=True) for part in means]
        units = [F.normalize(part, dim=1) for part in means]  # signs, whatever the size
        seen = torch.cat([*means, *norms, *units], dim=1).numpy()
        sides = self.sides.cpu().long().numpy()
        scores, guessed = _scores(seen, sides), np.arange(len(sides)) % _BLOCKS > 0
        scores, sides = scores[guessed], sides[guessed]
        if len(np.unique(sides)) < 2:
            return []
        epsilon = epsilon_low(int(((scores > 0) == sides).sum()), len(sides))
        found = {
            "canary_auc": float(roc_auc_score(sides, scores)),
            "canary_epsilon": epsilon,
            "canary_auc_low": 1.0 / (1.0 + math.exp(-epsilon)),
        }
        who = "+".join(parties)
        return [Measurement(name, value, step, who) for name, value in found.items()]


def _scores(seen: NDArray[np.float64], sides: NDArray[np.int64]) -> NDArray[np.float64]:
    """Score each canary from the sides of the blocks before; above 0 is side 1."""
    scaled = StandardScaler().fit_transform(seen)  # knows no side
    blocks, scores = np.arange(len(sides)) % _BLOCKS, np.zeros(len(sides))
    for block in range(1, _BLOCKS):
        before, own = blocks < block, blocks == block
        if own.any() and len(np.unique(sides[before])) == 2:
            model = RidgeClassifier().fit(scaled[before], sides[before])
            scores[own] = model.decision_function(scaled[own])
    return scores


def epsilon_low(right: int, guesses: int) -> float:
    """Return what ε is at least if so many guesses were right."""
    test = binomtest(right, guesses, alternative="greater")
    low = float(test.proportion_ci(_CONFIDENCE).low)
    return max(0.0, math.log(low / (1.0 - low))) if low > 0.0 else 0.0
