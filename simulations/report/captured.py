"""Rows that a run has kept: points of gradients and embeddings, and calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from flower_vfl.leakage.attacks import adaptive_calibration_error
from flower_vfl.simulations import capture as kept
from flower_vfl.simulations.capture import Arrays

from .charts import Axis, Look

_MOST_ROWS = 500  # of one picture
_BINS = 10
Floats = NDArray[np.floating]
Picture = tuple[str, pd.DataFrame, Axis, Axis]


def gradient_picture(arrays: Arrays, party: str) -> Picture:
    """Return the newest gradient of a party: its kind, points and axes."""
    classes = _classes(arrays, arrays[f"{kept.GRADIENT_LABEL}/{party}"])
    rows = arrays[f"{kept.GRADIENT}/{party}"]
    if rows.shape[1] == 1:
        predictions = arrays[f"{kept.GRADIENT_PREDICTION}/{party}"]
        return _column(rows, predictions, classes, "gradient")
    axes = Axis("first component", labels=False), Axis("second component", labels=False)
    return "PCA", _frame(_principal(rows[:_MOST_ROWS]), classes), *axes


def embedding_pictures(arrays: Arrays, party: str) -> Iterator[Picture]:
    """Yield the embeddings of a party in two dimensions, as PCA and as t-SNE."""
    classes = _classes(arrays, arrays[kept.LABEL])
    rows = arrays[f"{kept.EMBEDDING}/{party}"][:_MOST_ROWS]
    if rows.shape[1] == 1:
        yield _column(rows, arrays[kept.PREDICTION], classes, "embedding")
        return
    flat = {"PCA": _principal(rows)}
    if len(rows) > 5:  # t-SNE needs neighbours
        flat["t-SNE"] = _neighbours(rows)
    for name, points in flat.items():
        axes = Axis(f"{name} 1", labels=False), Axis(f"{name} 2", labels=False)
        yield name, _frame(points, classes), *axes


def has_classes(arrays: Arrays) -> bool:
    """Return whether labels are classes, not values."""
    return str(arrays[kept.TASK]) != "regression"


def class_look(arrays: Arrays) -> Look:
    """Return the colours and shapes of the classes."""
    names = _class_names(arrays)
    numbers = range(len(names))
    return Look("class", names, [1 + n % 6 for n in numbers], list(numbers))


def _class_names(arrays: Arrays) -> list[str]:
    if not has_classes(arrays):
        return ["below the median", "above the median"]
    return [str(name) for name in arrays[kept.CLASSES]]


def _classes(arrays: Arrays, labels: Floats) -> Sequence[str]:
    """Return names of classes; values are divided at their median."""
    chosen = labels[:_MOST_ROWS]
    if not has_classes(arrays):
        chosen = chosen > np.median(chosen)
    names = _class_names(arrays)
    return [names[number] for number in chosen.astype(int)]


def _column(
    rows: Floats, predictions: Floats, classes: Sequence[str], name: str
) -> Picture:
    """Return values of one column against the largest predictions."""
    predicted = predictions if predictions.ndim == 1 else predictions.max(axis=1)
    points = np.column_stack([predicted[:_MOST_ROWS], rows[:_MOST_ROWS, 0]])
    return "value", _frame(points, classes), Axis("prediction"), Axis(name)


def _frame(points: Floats, classes: Sequence[str]) -> pd.DataFrame:
    rounded = [[float(f"{value:.4g}") for value in point] for point in points]
    return pd.DataFrame(rounded, columns=["x", "y"]).assign(**{"class": classes})


def _principal(rows: Floats) -> Floats:
    """Return the first two principal components; a zero where there is only one."""
    rows = rows.astype(np.float64)
    size = max(float(np.abs(rows).max(initial=0.0)), 1e-300)
    parts = min(2, *rows.shape)
    flat = np.zeros((len(rows), 2))
    if float(np.ptp(rows, axis=0).max(initial=0.0)) > 0.0:  # not all rows are equal
        flat[:, :parts] = PCA(parts, svd_solver="full").fit_transform(rows / size)
    return flat


def _neighbours(rows: Floats) -> Floats:
    perplexity = min(30.0, (len(rows) - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, init="pca", random_state=0)
    with threadpool_limits(1):  # threads that wait for each other take 40 times as long
        flat: Floats = tsne.fit_transform(rows.astype(np.float32))
    return flat


def calibration(captures: Sequence[Arrays]) -> tuple[pd.DataFrame, float, int] | None:
    """Return the reliability curve, the ACE and the number of test rows."""
    found = [a for a in captures if kept.PREDICTION in a and has_classes(a)]
    if not found:
        return None
    predictions = np.concatenate([a[kept.PREDICTION] for a in found]).astype(np.float64)
    labels = np.concatenate([a[kept.LABEL] for a in found]).astype(np.int64)
    error = adaptive_calibration_error(
        torch.from_numpy(predictions), torch.from_numpy(labels)
    )
    hits, predicted = labels == 1, predictions
    if predictions.ndim > 1:
        hits = predictions.argmax(axis=1) == labels
        predicted = predictions.max(axis=1)
    y, x = calibration_curve(
        hits, predicted.clip(0, 1), pos_label=True, n_bins=_BINS, strategy="quantile"
    )
    return pd.DataFrame({"x": x, "y": y}), error, len(labels)
