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
    ones = int(positive.count_nonzero())
    pairs = ones * (len(positive) - ones)  # not a number if there are none
    return pairs_won(scores.detach(), positive) / pairs


def pairs_won(scores: Tensor, positive: Tensor) -> Tensor:
    """Return in how many pairs the positive row has the higher score; ties are 0.5."""
    positive = positive.to(scores.device, torch.bool)
    if scores.dtype == torch.float32 and scores.device.type == "cpu":
        rows = scores.numpy().reshape(-1, scores.shape[-1])
        wins = pairs_in_order(_sort_keys(rows), positive.numpy())
        return torch.from_numpy(wins).reshape(scores.shape[:-1])
    ones, zeros = positive.nonzero()[:, 0], (~positive).nonzero()[:, 0]
    return _pairs_found(scores, ones, zeros)


def _pairs_found(scores: Tensor, ones: Tensor, zeros: Tensor) -> Tensor:
    """Return pairs won from the row numbers of both classes."""
    if len(ones) > len(zeros):  # look up the smaller class in the larger
        return len(ones) * len(zeros) - _pairs_found(scores, zeros, ones)
    table = _sort(scores.index_select(-1, zeros)).contiguous()
    sought = scores.index_select(-1, ones).contiguous()
    wins = torch.searchsorted(table, sought).sum(dim=-1)
    wins += torch.searchsorted(table, sought, right=True).sum(dim=-1)
    return wins.double() / 2.0


def _sort(values: Tensor) -> Tensor:
    if values.device.type == "cpu":  # numpy's sort is three times as fast as torch's
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def pairs_in_order(
    keys: NDArray[Any], positive: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return pairs won by scores in the order of even integers.

    The last bit of what is sorted is the label, so that the negative rows of a tie come
    before the positive ones, which win. Where classes are tied, a second sort puts them
    in the opposite order, and the mean of both is what a tie counts. Several rows of
    scores take a fraction of the time of :func:`_pairs_found`.
    """
    marked = keys | positive
    wins = _wins(marked, positive)
    tied = ((marked[..., 1:] ^ marked[..., :-1]) == 1).any(axis=-1)
    if tied.any():
        own = np.broadcast_to(positive, keys.shape)[tied]
        rest = ~own
        lost = _wins(keys[tied] | rest, rest)
        wins[tied] += np.count_nonzero(own, axis=-1) * np.count_nonzero(rest, axis=-1)
        wins[tied] -= lost
        wins[tied] *= 0.5
    return wins


def _wins(marked: NDArray[Any], positive: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Sort integers whose last bit is the label and count the pairs in this order."""
    marked.sort(axis=-1)
    # A product would use threads.
    ranks = np.arange(marked.shape[-1], dtype=np.float64)
    sums = np.einsum("...r,r->...", (marked & 1).astype(np.float64), ranks)
    ones = np.count_nonzero(positive, axis=-1)
    wins: NDArray[np.float64] = sums - ones * (ones - 1) / 2
    return wins


def _sort_keys(scores: NDArray[Any]) -> NDArray[Any]:
    """Return even integers in the order of each row's numbers, of 32 bits if they fit.

    These take less than half the time of 64 bits to sort. Double precision that does
    not fit into 63 bits loses its last one.
    """
    single = scores.dtype == np.float32
    kind, last = (np.int32, 31) if single else (np.int64, 63)
    bits = (scores + scores.dtype.type(0.0)).view(kind)  # the sum makes -0 a 0
    bits ^= (bits >> last) & kind(2**last - 1)  # the order of negatives is reversed
    bits -= bits.min(axis=-1, keepdims=True, initial=2**last - 1)  # modulo
    keys: NDArray[Any] = bits.view(np.uint32 if single else np.uint64)
    if keys.max(initial=0) < 2**last:
        keys = keys << 1
    else:
        keys = keys.astype(np.uint64) << 1 if single else keys & ~np.uint64(1)
    return keys


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
