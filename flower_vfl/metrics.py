"""How good a model is, as functions of predictions and labels.

Predictions are what :meth:`flower_vfl.Objective.predict` returns: the probability of
the positive class (binary), one probability per class (multi-class), or a value
(regression).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

Floats = NDArray[np.float64]


def binary_metrics(predictions: Floats, labels: Floats) -> dict[str, float]:
    """Return AUC, accuracy and cross entropy.

    Parameters
    ----------
    predictions : Floats
        Probability of the positive class, one per row.
    labels : Floats
        0 or 1, one per row.
    """
    result = {
        "accuracy": float(np.mean((predictions > 0.5) == (labels > 0.5))),
        "loss": float(log_loss(labels, predictions, labels=[0, 1])),
    }
    if len(np.unique(labels)) == 2:  # the AUC of a single class does not exist
        result["auc"] = float(roc_auc_score(labels, predictions))
    return result


def multiclass_metrics(predictions: Floats, labels: Floats) -> dict[str, float]:
    """Return accuracy and cross entropy.

    Parameters
    ----------
    predictions : Floats
        One probability per class and row.
    labels : Floats
        Class numbers.
    """
    classes = np.arange(predictions.shape[1])
    sums = predictions.sum(axis=1, keepdims=True)  # float32 rows sum to 1 only nearly
    return {
        "accuracy": float(np.mean(predictions.argmax(axis=1) == labels)),
        "loss": float(log_loss(labels, predictions / sums, labels=classes)),
    }


def regression_metrics(predictions: Floats, labels: Floats) -> dict[str, float]:
    """Return Pearson's rho, the root of the mean squared error, and R².

    Parameters
    ----------
    predictions : Floats
        Predicted values.
    labels : Floats
        True values.
    """
    error = float(np.mean((predictions - labels) ** 2))
    spread = float(np.var(labels))
    constant = np.ptp(predictions) == 0.0 or np.ptp(labels) == 0.0
    rho = 0.0 if constant else float(np.corrcoef(predictions, labels)[0, 1])
    return {
        "pearson": rho,
        "rmse": error**0.5,
        "r2": 1.0 - error / spread if spread > 0.0 else 0.0,
        "loss": error,
    }


METRICS: dict[str, Callable[[Floats, Floats], dict[str, float]]] = {
    "binary": binary_metrics,
    "multiclass": multiclass_metrics,
    "regression": regression_metrics,
}
MAIN_METRIC = {"binary": "auc", "multiclass": "accuracy", "regression": "pearson"}
