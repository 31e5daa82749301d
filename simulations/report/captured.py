"""Figures of rows that runs have kept: gradients, embeddings and calibration."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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

from .charts import Axis, Figure, Look, line_chart, scatter_chart
from .data import Report
from .tables import Table, calibration_table

_ROWS = 500  # of one picture
_BINS = 10
Floats = NDArray[Any]
Picture = tuple[str, pd.DataFrame, Axis, Axis]


def gradient_figures(report: Report) -> list[Figure]:
    """Return the gradients that left for two parties, by class."""
    return _figures(report, kept.GRADIENT, 2, _gradients)


def embedding_figures(report: Report) -> list[Figure]:
    """Return the embeddings of one party in two dimensions."""
    return _figures(report, kept.EMBEDDING, 1, _embeddings)


def _figures(
    report: Report,
    what: str,
    most: int,
    pictures: Callable[[Arrays, str], Iterator[Picture]],
) -> list[Figure]:
    """Return the pictures of the first run of each setting that has kept rows."""
    figures = []
    for place, (setting, own) in enumerate(report.by_setting()):
        arrays = next((a for key in own.index if (a := report.captures[key])), {})
        for party in kept.parties(arrays, what)[:most] if arrays else ():
            for kind, frame, x, y in pictures(arrays, party):
                title = f"{setting}, {party}, {kind}, {len(frame)} rows"
                chart = scatter_chart(frame, _look(arrays), f"{what}: {title}", x, y)
                name = f"{what}s-{kind.lower()}-{place}-{party}"
                figures.append(Figure(name, chart, title, setting, party=party))
    return figures


def _gradients(arrays: Arrays, party: str) -> Iterator[Picture]:
    classes = _classes(arrays, arrays[f"{kept.GRADIENT_LABEL}/{party}"])
    rows = arrays[f"{kept.GRADIENT}/{party}"][:_ROWS]
    kind = f"step {int(arrays[f'{kept.GRADIENT_STEP}/{party}'])}"
    if rows.shape[1] == 1:
        predictions = arrays[f"{kept.GRADIENT_PREDICTION}/{party}"]
        yield kind, *_column(rows, predictions, classes, "gradient")
    else:
        names = "first component", "second component"
        yield kind, *_flat(_principal(rows), classes, names)


def _embeddings(arrays: Arrays, party: str) -> Iterator[Picture]:
    classes = _classes(arrays, arrays[kept.LABEL])
    rows = arrays[f"{kept.EMBEDDING}/{party}"][:_ROWS]
    if rows.shape[1] == 1:
        yield "value", *_column(rows, arrays[kept.PREDICTION], classes, "embedding")
        return
    yield "PCA", *_flat(_principal(rows), classes, ("PCA 1", "PCA 2"))
    if len(rows) > 5:  # t-SNE needs neighbours
        yield "t-SNE", *_flat(_neighbours(rows), classes, ("t-SNE 1", "t-SNE 2"))


def _column(
    rows: Floats, predictions: Floats, classes: list[str], name: str
) -> tuple[pd.DataFrame, Axis, Axis]:
    """Return values of one column against the largest predictions."""
    predicted = predictions if predictions.ndim == 1 else predictions.max(axis=1)
    points = np.column_stack([predicted[:_ROWS], rows[:, 0]])
    return _frame(points, classes), Axis("prediction"), Axis(name)


def _flat(
    points: Floats, classes: list[str], names: tuple[str, str]
) -> tuple[pd.DataFrame, Axis, Axis]:
    x, y = (Axis(name, labels=False) for name in names)
    return _frame(points, classes), x, y


def _has_classes(arrays: Arrays) -> bool:
    return str(arrays[kept.TASK]) != "regression"


def _look(arrays: Arrays) -> Look:
    """Return the looks of the classes, of which none is black."""
    numbers = range(len(names := _class_names(arrays)))
    return Look("class", names, [1 + n % 6 for n in numbers], numbers)


def _class_names(arrays: Arrays) -> list[str]:
    if not _has_classes(arrays):
        return ["below the median", "above the median"]
    return [str(name) for name in arrays[kept.CLASSES]]


def _classes(arrays: Arrays, labels: Floats) -> list[str]:
    """Return names of classes; values are divided at their median."""
    chosen = labels[:_ROWS]
    if not _has_classes(arrays):
        chosen = chosen > np.median(chosen)
    names = _class_names(arrays)
    return [names[number] for number in chosen.astype(int)]


def _frame(points: Floats, classes: list[str]) -> pd.DataFrame:
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


def calibrations(report: Report) -> tuple[list[Figure], list[Table]]:
    """Return how often what is predicted comes true."""
    found = {
        setting: curve
        for setting, own in report.by_setting()
        if (curve := calibration([report.captures[run] for run in own.index]))
    }
    if not found:
        return [], []
    curves = [curve.assign(setting=name) for name, (curve, *_) in found.items()]
    chart = line_chart(
        pd.concat(curves).round(4),
        report.look,
        "Calibration",
        Axis("predicted probability", (-0.03, 1.03)),
        Axis("share that came true", (-0.03, 1.03)),
        points=True,
        reference=[(0.0, 0.0), (1.0, 1.0)],
    )
    table = calibration_table(
        {n: (error, rows) for n, (_, error, rows) in found.items()}
    )
    return [Figure("calibration", chart, "Dotted: well calibrated")], [table]


def calibration(captures: Sequence[Arrays]) -> tuple[pd.DataFrame, float, int] | None:
    """Return the reliability curve, the ACE and the number of test rows."""
    found = [a for a in captures if kept.PREDICTION in a and _has_classes(a)]
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
