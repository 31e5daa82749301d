"""How much an attack's scores say about the labels, as functions of tensors.

Everything is computed on the device of the scores. The AUC counts, for every pair of a
positive and a negative row, whether the positive one has the higher score; a tie counts
one half.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_vfl.errors import ConfigError
from flower_vfl.metrics import class_numbers

Pair = tuple[float, float]  # raw and flipped


def roc_auc(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the area under the ROC curve of several scores at once.

    Parameters
    ----------
    scores : Tensor
        One or more rows of scores, (..., B); no missing numbers.
    positive : Tensor
        Which examples are positive, (B,).

    Returns
    -------
    Tensor
        (...) in double precision; not a number where there is one class only.

    Examples
    --------
    >>> scores = torch.tensor([[0.1, 0.4, 0.9], [0.5, 0.5, 0.5]])
    >>> roc_auc(scores, torch.tensor([False, True, True])).tolist()
    [1.0, 0.5]
    """
    scores, positive = scores.detach(), positive.to(scores.device, torch.bool)
    if scores.dtype == torch.float32 and scores.device.type == "cpu":
        return _sorted_auc(scores, positive)
    ones, zeros = positive.nonzero()[:, 0], (~positive).nonzero()[:, 0]
    return _pairwise_auc(scores, ones, zeros)


def _pairwise_auc(scores: Tensor, ones: Tensor, zeros: Tensor) -> Tensor:
    """Return AUCs from the row numbers of both classes."""
    if not len(ones) or not len(zeros):
        return scores.new_full(scores.shape[:-1], torch.nan, dtype=torch.float64)
    if len(ones) > len(zeros):  # look up the smaller class in the larger
        return 1.0 - _pairwise_auc(scores, zeros, ones)
    table = _sort(scores.index_select(-1, zeros)).contiguous()
    sought = scores.index_select(-1, ones).contiguous()
    wins = torch.searchsorted(table, sought).sum(dim=-1)
    wins += torch.searchsorted(table, sought, right=True).sum(dim=-1)
    return wins.double() / (2.0 * len(ones) * len(zeros))


def _sort(values: Tensor) -> Tensor:
    if values.device.type == "cpu":  # numpy's sort is three times as fast as torch's
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def _sorted_auc(scores: Tensor, positive: Tensor) -> Tensor:
    """Return AUCs of single-precision scores from a sort, or two where there are ties.

    A label fits into the bits that a single-precision number leaves free in a double,
    so that a sort brings scores and labels into order. It puts the tied rows of one
    class before those of the other; where that happens, a second sort with opposite
    labels puts them the other way round, and the mean of both is what a tie counts.
    Several rows of scores take a quarter of the time of :func:`_pairwise_auc`.
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

    Examples
    --------
    >>> leak_auc(torch.tensor([0.9, 0.1, 0.5]), torch.tensor([0, 1, 1]))
    0.0
    >>> leak_auc(torch.tensor([0.9, 0.1, 0.5]), torch.tensor([0, 1, 1]), flipped=True)
    1.0
    """
    numbers = class_numbers(labels, len(scores)).to(scores.device)
    if not torch.isfinite(scores.detach().double()).all():
        raise ConfigError("some scores are missing or infinite")
    if not len(numbers) or bool((numbers == numbers[0]).all()):
        return float("nan")
    classes = int(numbers.max()) + 1
    if scores.ndim > 1 and scores.shape[1] < classes:
        raise ConfigError(
            f"the scores have {scores.shape[1]} columns, the labels go up to "
            f"{classes - 1}; give one column per class"
        )
    single = scores.dtype in (torch.float32, torch.float64)
    scores = scores if single else scores.double()
    return leak_pair(scores, numbers, classes)[flipped]


def leak_pair(scores: Tensor, labels: Tensor, classes: int) -> Pair:
    """Return the raw and the flipped leak of scores, without the checks.

    AUCs for two classes or more, and for a regression, which has none, the correlation
    of largest size.
    """
    if not classes:
        rho = pearson_rho(scores.reshape(len(labels), -1).T, labels)
        best = float(rho[rho.abs().argmax()])
        return best, abs(best)
    if scores.ndim == 1 and classes == 2:
        auc = float(roc_auc(scores, labels == 1))
        return auc, max(auc, 1.0 - auc)
    columns = scores.T if scores.ndim == 2 else scores.expand(classes, -1)
    aucs = torch.stack([roc_auc(columns[c], labels == c) for c in range(classes)])
    # A class that is missing has no AUC.
    return float(aucs.nanmean()), float(torch.maximum(aucs, 1.0 - aucs).nanmean())


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

    Examples
    --------
    >>> rho = pearson_rho(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0, 4.0, 2.0]))
    >>> round(float(rho), 6)
    -1.0
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


def summarise(values: Sequence[float]) -> dict[str, float]:
    """Return mean, last, max and 95 % quantile of the values of a run.

    Parameters
    ----------
    values : Sequence[float]
        One value per batch, in order. None at all gives an empty dictionary.

    Examples
    --------
    >>> summarise([0.5, 1.0])
    {'mean': 0.75, 'last': 1.0, 'max': 1.0, 'q95': 0.975}
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
