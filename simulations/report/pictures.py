"""Pictures of rows that a run has kept: gradients and embeddings by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits

from flower_vfl.simulations import capture as kept
from flower_vfl.simulations.capture import Arrays

from .content import Figure, Legend, Section
from .plots import class_plot, class_style
from .runs import Group, Report
from .scene import MARKERS, Scene

NO_CAPTURE = "The runs kept no rows: --capture 500 keeps as many for these pictures."
_MOST_ROWS = 500  # of one picture; more only make it slow
_PARTIES = 2  # whose gradients are shown
_SIGNS = dict(zip(MARKERS, "●■▲◆×▼+", strict=True))
Floats = NDArray[np.float64]


def gradient_section(report: Report) -> Section:
    """Return the gradients that left for a party, by class."""
    figures = []
    for group in report.groups:
        for party in _parties(group.capture, kept.GRADIENT)[:_PARTIES]:
            figures.append(_gradients(group, party))
    text = (
        "What left for a passive party in the last full training step, one point per "
        "row. Wide gradients are projected on their first two principal components; of "
        "one column, the value is shown against the trained model's prediction, as in "
        "Figure 2 of GAFM. The better the classes mix, the less a party can read off."
    )
    return _section("gradients", "Gradients by class", text, report, figures)


def _gradients(group: Group, party: str) -> Figure:
    arrays = group.capture
    gradients = _head(arrays[f"{kept.GRADIENT}/{party}"])
    labels = _head(arrays[f"{kept.GRADIENT_LABEL}/{party}"])
    classes = _classes(arrays, labels)
    title = f"Gradients of {party}, {group.name}"
    if gradients.shape[1] > 1:
        names = ("first component", "second component")
        scene = class_plot(title, _principal(gradients), classes, names)
    else:
        predictions = _head(arrays[f"{kept.GRADIENT_PREDICTION}/{party}"])
        scene = _column(title, gradients, predictions, classes, "gradient")
    step = int(arrays[f"{kept.GRADIENT_STEP}/{party}"])
    return Figure(
        f"gradients-{group.number}-{party}",
        scene,
        f"{group.name}, {party}, step {step}, {len(labels)} rows",
        _class_legend(arrays),
        (group.number,),
        party=party,
    )


def embedding_section(report: Report) -> Section:
    """Return the embeddings of a passive party, flattened in two ways."""
    figures = []
    for group in report.groups:
        for party in _parties(group.capture, kept.EMBEDDING)[:1]:
            figures += _embeddings(group, party)
    text = (
        "Embeddings of test rows by the bottom model of a passive party, as PCA and as "
        "t-SNE (Figure 6 of LADSG); of one column, the value against the prediction. "
        "Classes that lie apart can be told by that party alone, whatever happens to "
        "the gradients."
    )
    return _section(
        "embeddings", "Embeddings of a passive party", text, report, figures
    )


def _embeddings(group: Group, party: str) -> list[Figure]:
    arrays = group.capture
    rows = _head(arrays[f"{kept.EMBEDDING}/{party}"])
    classes = _classes(arrays, _head(arrays[kept.LABEL]))
    scenes = {}
    title = f"embeddings of {party}, {group.name}"
    if rows.shape[1] > 1:
        flat = {"PCA": _principal(rows)}
        if len(rows) > 5:  # t-SNE needs neighbours
            flat["t-SNE"] = _neighbours(rows)
        for name, points in flat.items():
            names = (f"{name} 1", f"{name} 2")
            scenes[name] = class_plot(f"{name} of the {title}", points, classes, names)
    else:
        predictions = _head(arrays[kept.PREDICTION])
        scenes["value"] = _column(title, rows, predictions, classes, "embedding")
    return [
        Figure(
            f"embeddings-{name.lower()}-{group.number}-{party}",
            scene,
            f"{group.name}, {party}, {name}, {len(rows)} rows",
            _class_legend(arrays),
            (group.number,),
            party=party,
        )
        for name, scene in scenes.items()
    ]


def _column(
    title: str,
    values: Floats,
    predictions: Floats,
    classes: NDArray[np.int64],
    name: str,
) -> Scene:
    """Return values of one column against predictions (the largest of several)."""
    predicted = predictions if predictions.ndim == 1 else predictions.max(axis=1)
    points = np.column_stack([predicted, values[:, 0]])
    return class_plot(title, points, classes, ("prediction", name), ticks=True)


def _section(
    key: str, title: str, text: str, report: Report, figures: Sequence[Figure]
) -> Section:
    if not figures:
        return Section(key, title, missing=NO_CAPTURE)
    legends = [_class_legend(g.capture) for g in report.groups if g.capture]
    if all(legend == legends[0] for legend in legends):
        return Section(key, title, text, figures, legend=legends[0], small=True)
    figures = [replace(f, caption=f"{f.caption}; {_told(f.legend)}") for f in figures]
    return Section(key, title, text, figures, small=True)


def _told(legend: Legend) -> str:
    return ", ".join(f"{_SIGNS[style.marker]} {name}" for name, style in legend)


def _parties(arrays: Arrays, what: str) -> list[str]:
    return [name.partition("/")[2] for name in arrays if name.startswith(f"{what}/")]


def _head(rows: Floats) -> Floats:
    return rows[:_MOST_ROWS]


def has_classes(arrays: Arrays) -> bool:
    """Return whether the labels of kept rows are classes, not values."""
    return str(arrays[kept.TASK]) != "regression"


def _classes(arrays: Arrays, labels: Floats) -> NDArray[np.int64]:
    """Return class numbers; values become 0 below their median and 1 above."""
    if has_classes(arrays):
        return labels.astype(np.int64)
    return (labels > np.median(labels)).astype(np.int64)


def _class_legend(arrays: Arrays) -> Legend:
    if not has_classes(arrays):
        names = ["below the median", "above the median"]
    else:
        names = [str(name) for name in arrays[kept.CLASSES]]
    return [(name, class_style(number)) for number, name in enumerate(names)]


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
    # PCA as the start is not defined for a single column.
    start = "pca" if min(rows.shape) > 1 else "random"
    tsne = TSNE(2, perplexity=perplexity, init=start, random_state=0)
    with threadpool_limits(1):  # threads that wait for each other take 40 times as long
        flat: Floats = tsne.fit_transform(rows.astype(np.float32))
    return flat
