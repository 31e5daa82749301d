"""Utility metrics of a model as functions of predictions and labels.

Predictions are what :meth:`flower_vfl.Objective.predict` returns: the probability of
the positive class (binary), one probability per class (multi-class), or a value
(regression).
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import ConfigError, PartyError
from .rows import check_finite

Floats = NDArray[np.float64]
_TOP_K = 5


def class_numbers(labels: Tensor, rows: int) -> Tensor:
    """Return labels as integers; refuse other values and a wrong number of labels."""
    flat = labels.detach().reshape(-1)
    if len(flat) != rows:
        raise ConfigError(f"got {len(flat)} labels for {rows} rows")
    numbers = flat.long()
    if (numbers != flat).any() or (numbers < 0).any():
        raise ConfigError(
            "labels must be class numbers from 0; for values use pearson_rho"
        )
    return numbers


def adaptive_calibration_error(
    probabilities: Tensor, labels: Tensor, bins: int = 15
) -> float:
    """Return the adaptive calibration error (ACE) of Nixon et al. (2019).

    The predictions of a class are sorted and cut into bins of equal mass. The error is
    the mean over bins and classes of |mean prediction − frequency of the class|. Rows
    with equal predictions share their mean label, so the row order does not matter.
    https://arxiv.org/abs/1904.01685

    Parameters
    ----------
    probabilities : Tensor
        Probability of class 1, one per row; or one column per class.
    labels : Tensor
        Class numbers.
    bins : int (default: 15)
        Number of bins; sizes differ by at most one row, the larger ones first.

    Examples
    --------
    >>> probabilities = torch.tensor([0.25, 0.25, 0.75, 0.75])
    >>> adaptive_calibration_error(probabilities, torch.tensor([0, 0, 1, 1]), bins=2)
    0.25
    """
    numbers = class_numbers(labels, len(probabilities)).to(probabilities.device)
    if bins < 1 or not len(numbers):
        raise ConfigError(f"cannot cut {len(numbers)} rows into {bins} bins")
    if probabilities.ndim == 1 or probabilities.shape[1] == 1:
        columns, hits = probabilities.reshape(1, -1), (numbers == 1).unsqueeze(0)
    else:
        columns = probabilities.T
        classes = torch.arange(len(columns), device=columns.device)
        hits = numbers == classes.unsqueeze(1)
    ordered, order = columns.detach().double().contiguous().sort(dim=1)
    share = _share_ties(ordered, hits.gather(1, order).double())
    gap = (ordered - share).cumsum(dim=1)
    bins = min(bins, len(numbers))
    size, larger = divmod(len(numbers), bins)
    number = torch.arange(1, bins + 1, device=gap.device)
    ends = number * size + number.clamp_max(larger)
    sums = gap[:, ends - 1].diff(dim=1, prepend=gap.new_zeros(len(gap), 1))
    sizes = ends.diff(prepend=ends.new_zeros(1))
    return float((sums.abs() / sizes).mean())


def _share_ties(ordered: Tensor, hits: Tensor) -> Tensor:
    """Give rows with equal values the mean of their hits; values are sorted."""
    first = torch.searchsorted(ordered, ordered)
    last = torch.searchsorted(ordered, ordered, right=True)
    until = torch.nn.functional.pad(hits.cumsum(dim=1), (1, 0))
    return (until.gather(1, last) - until.gather(1, first)) / (last - first)


def binary_metrics(predictions: Floats, labels: Floats) -> dict[str, float]:
    """Return AUC, accuracy, F1, cross entropy and adaptive calibration error.

    Examples
    --------
    >>> found = binary_metrics(np.array([0.1, 0.4, 0.9]), np.array([0.0, 1.0, 1.0]))
    >>> round(found["auc"], 3), round(found["f1"], 3)
    (1.0, 0.667)
    """
    truth, chosen = labels > 0.5, predictions > 0.5
    named = int(truth.sum()) + int(chosen.sum())
    result = {
        "accuracy": float(np.mean(truth == chosen)),
        # As in scikit-learn, whose checks of its arguments take 5 ms.
        "f1": 2.0 * int((truth & chosen).sum()) / named if named else 0.0,
        "loss": _cross_entropy(np.where(truth, predictions, 1.0 - predictions)),
        "ace": _calibration_error(predictions, labels),
    }
    if 0 < truth.sum() < len(truth):  # the AUC of a single class does not exist
        result["auc"] = _auc(predictions, truth)
    return result


def _auc(scores: Floats, positive: NDArray[np.bool_]) -> float:
    ones = int(positive.sum())
    wins = _ranks(scores)[positive].sum() - ones * (ones + 1) / 2
    return float(wins / (ones * (len(positive) - ones)))


def _ranks(values: Floats) -> Floats:
    """Return the ranks from 1 on, the mean of them for a tie."""
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (counts.cumsum() - (counts - 1) / 2)[numbers]
    return ranks


def _cross_entropy(probabilities: Floats) -> float:
    """Return the mean loss of the true classes' probabilities.

    As in scikit-learn, whose checks of its arguments take longer than the metric.
    """
    return float(-np.log(probabilities.clip(np.finfo(np.float64).eps)).mean())


def multiclass_metrics(predictions: Floats, labels: Floats) -> dict[str, float]:
    """Return accuracy, cross entropy, calibration error and, above 5 classes, top-5."""
    classes = np.arange(predictions.shape[1])
    sums = predictions.sum(axis=1, keepdims=True)  # float32 rows sum to 1 only nearly
    own = np.take_along_axis(predictions / sums, labels.astype(int)[:, None], axis=1)
    result = {
        "accuracy": float(np.mean(labels == predictions.argmax(axis=1))),
        "loss": _cross_entropy(own),
        "ace": _calibration_error(predictions, labels),
    }
    if len(classes) > _TOP_K:
        from sklearn.metrics import top_k_accuracy_score

        found = top_k_accuracy_score(labels, predictions, k=_TOP_K, labels=classes)
        result[f"top{_TOP_K}_accuracy"] = float(found)
    return result


def _calibration_error(predictions: Floats, labels: Floats) -> float:
    both = torch.from_numpy(predictions), torch.from_numpy(labels)
    return adaptive_calibration_error(*both)


def regression_metrics(predictions: Floats, labels: Floats) -> dict[str, float]:
    """Return Pearson's rho, RMSE, R² and the mean squared error as loss."""
    error = float(np.square(labels - predictions).mean())
    varied = np.ptp(labels) > 0.0  # otherwise neither rho nor R² is defined
    correlated = varied and np.ptp(predictions) > 0.0
    rho = float(np.corrcoef(predictions, labels)[0, 1]) if correlated else 0.0
    return {
        "pearson": rho,
        "rmse": error**0.5,
        "r2": 1.0 - error / float(labels.var()) if varied else 0.0,
        "loss": error,
    }


def unbiased_metrics(
    predictions: Floats, shares: Floats, task: str
) -> dict[str, float]:
    """Return metrics whose mean over the noise of `shares` is that of true labels.

    Shares are labels of classes corrected for noise: their mean is the label, they may
    be below 0 or above 1. All sums over them are linear; only the AUC is divided by an
    estimate, of the variance of the labels.

    Examples
    --------
    >>> shares = np.array([-0.5, 1.5, 1.5, -0.5])
    >>> found = unbiased_metrics(np.array([0.1, 0.6, 0.8, 0.3]), shares, "binary")
    >>> round(found["accuracy"], 2)
    1.5
    """
    if task == "binary":
        predictions = np.stack([1.0 - predictions, predictions], axis=1)
        shares = np.stack([1.0 - shares, shares], axis=1)
    logs = np.log(predictions.clip(1e-12))
    chosen = predictions.argmax(axis=1)[:, None]
    result = {
        "accuracy": float(np.take_along_axis(shares, chosen, axis=1).mean()),
        "loss": float(-(shares * logs).sum(axis=1).mean()),
    }
    if task == "binary":
        rate = shares[:, 1].mean().clip(1.0 / len(shares), 1.0 - 1.0 / len(shares))
        ranks = _ranks(predictions[:, 1]) / len(predictions)
        covariance = np.mean((ranks - ranks.mean()) * shares[:, 1])
        result["auc"] = float(0.5 + covariance / (rate * (1.0 - rate)))
    return result


METRICS: dict[str, Callable[[Floats, Floats], dict[str, float]]] = {
    "binary": binary_metrics,
    "multiclass": multiclass_metrics,
    "regression": regression_metrics,
}
MAIN_METRIC = {"binary": "auc", "multiclass": "accuracy", "regression": "pearson"}


class Evaluation:
    """Collects the predictions of one split."""

    def __init__(self, scores: list[Tensor] | None = None) -> None:
        self.scores = scores or []

    def add(self, index: int, predictions: Tensor) -> None:
        """Take in one part; the first one begins anew."""
        earlier = self.scores if index else []
        self.scores = [*earlier, predictions.cpu()]

    def finish(
        self,
        parts: int,
        labels: Tensor,
        labelled: Tensor | None,
        task: str,
        name: str,
        rows_of: str = "",
        shares: Tensor | None = None,
    ) -> dict[str, float]:
        """Return the metrics of all parts, over the rows that have a label.

        With `shares` of classes, these stand for labels that are not to be used.
        """
        if len(self.scores) != parts:
            raise PartyError(
                name,
                f"cannot evaluate: {len(self.scores)} of {parts} parts arrived",
                "Evaluate again from the first part, at a party that has labels",
            )
        scores, self.scores = torch.cat(self.scores), []
        check_finite(scores, name, "its prediction", "Lower the learning rate", None)
        if labelled is not None:
            scores = scores[labelled]
        if not len(scores):  # none of the split's rows has a label
            return {}
        if shares is not None:
            noisy = scores.double().numpy(), shares.double().cpu().numpy()
            return unbiased_metrics(*noisy, task)
        both = scores.double().numpy(), labels.double().numpy()
        found = METRICS[task](*both)
        if rows_of == "train":  # beside what attacks find about the same rows
            found |= model_leak(*both, found, task)
        return found


def model_leak(
    predictions: Floats, labels: Floats, metrics: dict[str, float], task: str
) -> dict[str, float]:
    """Return how well predictions tell the labels, as the leak of an attack is told."""
    if task == "regression":
        return {"model_leak": abs(metrics["pearson"])}
    if task == "binary":
        return {"model_leak": metrics["auc"]} if "auc" in metrics else {}
    present = np.unique(labels).astype(int)
    if len(present) < 2:
        return {}
    aucs = [_auc(predictions[:, each], labels == each) for each in present]
    return {"model_leak": float(np.mean(aucs))}
