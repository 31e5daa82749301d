"""How much an attack's scores say about the labels, as functions of tensors.

Everything is computed on the device of the scores. The AUC counts, for every pair of a
positive and a negative row, whether the positive one has the higher score; a tie counts
one half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.metrics import class_numbers


def roc_auc(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the area under the ROC curve of several scores at once.

    Parameters
    ----------
    scores : Tensor
        One or more rows of scores, (..., B); no missing numbers.
    positive : Tensor
        Which examples are positive: (B,) for all rows of scores, or (..., B).

    Returns
    -------
    Tensor
        (...) in double precision; not a number where there is one class only.
    """
    scores, positive = scores.detach(), positive.to(scores.device, torch.bool)
    if positive.ndim == 1:
        if scores.dtype == torch.float32 and scores.device.type == "cpu":
            return _sorted_auc(scores, positive)
        ones, zeros = positive.nonzero()[:, 0], (~positive).nonzero()[:, 0]
        return _pairwise_auc(scores, ones, zeros)
    table = sort_last(scores).contiguous()
    below = torch.searchsorted(table, scores.contiguous())
    upto = torch.searchsorted(table, scores.contiguous(), right=True)
    ranks = (below + upto + 1).double() / 2.0  # ties share the mean of their ranks
    ones = positive.sum(dim=-1).double()
    pairs = ones * (scores.shape[-1] - ones)
    wins = (ranks * positive).sum(dim=-1) - ones * (ones + 1.0) / 2.0
    return wins / pairs


def _sorted_auc(scores: Tensor, positive: Tensor) -> Tensor:
    """Return AUCs of single-precision scores from a sort, or two where there are ties.

    A label fits into the bits that a single-precision number leaves free in a double,
    so that a sort brings scores and labels into order. It puts the tied rows of one
    class before those of the other; where that happens, a second sort with opposite
    labels puts them the other way round, and the mean of both is what a tie counts.
    Searching the scores of one class in those of the other takes twice as long.
    """
    rows = scores.shape[-1]
    label = positive.numpy().astype(np.int64)
    doubles = scores.numpy().astype(np.float64).reshape(-1, rows)
    doubles += 0.0  # makes -0 a 0
    order = _sort_marked(doubles, label)
    ranks = np.arange(rows, dtype=np.float64)
    own = (order & 1).astype(np.float64) @ ranks
    tied = ((order[:, 1:] ^ order[:, :-1]) == 1).any(axis=-1)
    if tied.any():
        other = (_sort_marked(doubles[tied], 1 - label) & 1).astype(np.float64)
        own[tied] = (own[tied] + rows * (rows - 1) / 2.0 - other @ ranks) / 2.0
    ones = int(label.sum())
    wins = torch.from_numpy(own).reshape(scores.shape[:-1])
    # Not a number if there are no pairs.
    return wins.sub_(ones * (ones - 1) / 2.0).div_(ones * (rows - ones))


def _sort_marked(doubles: NDArray[np.float64], mark: NDArray[Any]) -> NDArray[Any]:
    """Return numbers in order, as bits of which the last one is the mark."""
    marked: NDArray[Any] = doubles.view(np.int64) | mark
    marked.view(np.float64).sort(axis=-1)
    return marked


def _pairwise_auc(scores: Tensor, ones: Tensor, zeros: Tensor) -> Tensor:
    """Return AUCs from the row numbers of both classes."""
    if not len(ones) or not len(zeros):
        return scores.new_full(scores.shape[:-1], torch.nan, dtype=torch.float64)
    if len(ones) > len(zeros):  # look up the smaller class in the larger
        return 1.0 - _pairwise_auc(scores, zeros, ones)
    table = sort_last(scores.index_select(-1, zeros)).contiguous()
    sought = scores.index_select(-1, ones).contiguous()
    wins = torch.searchsorted(table, sought).sum(dim=-1)
    wins += torch.searchsorted(table, sought, right=True).sum(dim=-1)
    return wins.double() / (2.0 * len(ones) * len(zeros))


def sort_last(values: Tensor) -> Tensor:
    """Return the values in ascending order along the last dimension."""
    if values.device.type == "cpu":  # numpy's sort is three times as fast as torch's
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def flip(auc: Tensor) -> Tensor:
    """Return max(a, 1 − a): the AUC of an attacker who knows which way to guess."""
    return torch.maximum(auc, 1.0 - auc)


def leak_auc(scores: Tensor, labels: Tensor, flipped: bool = False) -> float:
    """Return the leak AUC of a batch.

    With more than two classes it is the mean of the AUCs of each class against the
    rest, over the classes of the batch; each is flipped before the mean is taken.

    Parameters
    ----------
    scores : Tensor
        One score per row, or one column per class. One score per row stands for every
        class if there are more than two.
    labels : Tensor
        0 and 1, or class numbers.
    flipped : bool (default: False)
        Take max(a, 1 − a) instead of a.

    Returns
    -------
    float
        Not a number if the batch has one class only.
    """
    numbers = class_numbers(labels, len(scores)).to(scores.device)
    if not torch.isfinite(scores.detach().double()).all():
        raise ConfigError("some scores are missing or infinite")
    single = scores.dtype in (torch.float32, torch.float64)
    scores = scores.detach() if single else scores.detach().double()
    present = torch.unique(numbers)
    if len(present) < 2:
        return float("nan")
    last = int(present[-1])
    if scores.ndim == 1 and last == 1:
        aucs = roc_auc(scores, numbers == 1)
    else:
        columns = (
            scores.unsqueeze(1).expand(-1, last + 1) if scores.ndim == 1 else scores
        )
        if columns.shape[1] <= last:
            raise ConfigError(
                f"the scores have {columns.shape[1]} columns, the labels go up to "
                f"{last}; give one column per class"
            )
        chosen = columns.index_select(1, present).T.contiguous()
        aucs = roc_auc(chosen, numbers == present.unsqueeze(1))
    return float((flip(aucs) if flipped else aucs).mean())


def pearson_rho(scores: Tensor, labels: Tensor) -> Tensor:
    """Return Pearson's correlation of scores and labels; 0 if one of them is constant.

    Parameters
    ----------
    scores : Tensor
        One or more rows of scores, (..., B).
    labels : Tensor
        One value per example, (B,).

    Returns
    -------
    Tensor
        (...) in double precision.
    """
    both = [values.detach().double() for values in (scores, labels.to(scores.device))]
    # Scaled first, so that no square vanishes or overflows.
    centered = [_unit_range(v - v.mean(dim=-1, keepdim=True), v) for v in both]
    product = (centered[0] * centered[1]).sum(dim=-1)
    lengths = centered[0].norm(dim=-1) * centered[1].norm(dim=-1)
    rho = product / torch.where(lengths > 0, lengths, 1.0)
    return rho.clamp(-1.0, 1.0)


def _unit_range(centered: Tensor, values: Tensor) -> Tensor:
    """Scale to a largest entry of 1; what is constant up to rounding becomes 0."""
    if not values.shape[-1]:
        return centered
    largest = centered.abs().amax(dim=-1, keepdim=True)
    rounding = 1e-14 * values.abs().amax(dim=-1, keepdim=True)
    constant = largest <= rounding
    return torch.where(constant, 0.0, centered / torch.where(constant, 1.0, largest))


def assign_positives(scores: Tensor, rate: float) -> Tensor:
    """Call the highest scores positive, as an attacker does who knows the rate.

    Parameters
    ----------
    scores : Tensor
        One score per row; of equal scores the first come first.
    rate : float
        Share of positive rows.
    """
    if not 0.0 <= rate <= 1.0:
        raise ConfigError(f"rate must be a number from 0 to 1, got {rate}")
    chosen = scores.argsort(descending=True, stable=True)[: round(rate * len(scores))]
    return torch.zeros_like(scores, dtype=torch.long).index_fill_(0, chosen, 1)


def attack_accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Return the share of rows whose label was guessed.

    Parameters
    ----------
    predicted : Tensor
        Class numbers that the attacker guessed.
    labels : Tensor
        Class numbers.
    """
    numbers = class_numbers(labels, len(predicted)).to(predicted.device)
    return float((predicted == numbers).double().mean())


def top_k_accuracy(scores: Tensor, labels: Tensor, k: int) -> float:
    """Return the share of rows whose class has one of the k highest scores.

    A class that ties with the k-th highest score counts in proportion to its chance.

    Parameters
    ----------
    scores : Tensor
        One column per class.
    labels : Tensor
        Class numbers.
    k : int
        How many guesses the attacker has.
    """
    numbers = class_numbers(labels, len(scores)).to(scores.device)
    if not 1 <= k <= scores.shape[1]:
        raise ConfigError(f"k must be from 1 to {scores.shape[1]} classes, got {k}")
    own = scores.gather(1, numbers.unsqueeze(1))
    above = (scores > own).sum(dim=1).double()
    equal = (scores == own).sum(dim=1).double()
    return float(((k - above) / equal).clamp(0.0, 1.0).mean())


def f1_score(predicted: Tensor, labels: Tensor) -> float:
    """Return the F1 score: of class 1, or with more classes the mean over the classes.

    Parameters
    ----------
    predicted : Tensor
        Class numbers that the attacker guessed.
    labels : Tensor
        Class numbers.
    """
    numbers = class_numbers(labels, len(predicted)).to(predicted.device)
    classes = int(max(predicted.max(), numbers.max())) + 1 if len(numbers) else 0
    size = max(classes, 2)
    hits = torch.bincount(numbers[predicted == numbers], minlength=size).double()
    both = torch.bincount(numbers, minlength=size) + torch.bincount(
        predicted.long(), minlength=size
    )
    scores = 2.0 * hits / both.clamp_min(1)  # 0 for a class that nobody named
    return float(scores[1] if classes <= 2 else scores[both > 0].mean())


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Return mean, last, max and 95 % quantile of the values of a run.

    Parameters
    ----------
    values : Sequence[float]
        One value per batch, in order. None at all gives an empty dictionary.
    """
    if not len(values):
        return {}
    array = np.asarray(values, dtype=np.float64)
    return {
        "mean": float(array.mean()),
        "last": float(array[-1]),
        "max": float(array.max()),
        "q95": float(np.quantile(array, 0.95)),
    }
