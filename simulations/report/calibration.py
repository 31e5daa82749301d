"""Calibration: how often what a run predicts comes true."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from flower_vfl.leakage.attacks import adaptive_calibration_error
from flower_vfl.simulations import capture as kept

from .content import Cell, Figure, Section, Table, number
from .curves import legend_of
from .pictures import NO_CAPTURE, has_classes
from .plots import Axes, Curve, line_plot
from .runs import Group, Report

_BINS = 10
Floats = NDArray[np.float64]


def calibration_section(report: Report) -> Section:
    """Return how often what is predicted comes true."""
    key, title = "calibration", "Calibration"
    found = {g.number: kept_rows for g in report.groups if (kept_rows := _predicted(g))}
    if not found:
        captured = any(group.capture for group in report.groups)
        values = "The predictions are values, not probabilities."
        return Section(key, title, missing=values if captured else NO_CAPTURE)
    groups = [group for group in report.groups if group.number in found]
    curves = [_curve(group, *found[group.number]) for group in groups]
    ends = (0.0, 1.0)
    axes = Axes(
        "predicted probability", "share that came true", ends, ends, diagonal=True
    )
    scene = line_plot(title, curves, axes)
    figure = Figure(key, scene, "Dotted: well calibrated", legend_of(groups))
    text = (
        "Predicted probability against what came true, test rows in ten bins of equal "
        "size; of several classes, that of the class with the largest probability. ACE "
        "is the adaptive calibration error (15 bins, all classes); small is good."
    )
    errors = [_error(*found[group.number]) for group in groups]
    counts = [len(found[group.number][1]) for group in groups]
    rows = [
        [Cell(group.name), number(error), Cell(str(count), count)]
        for group, error, count in zip(groups, errors, counts, strict=True)
    ]
    series = [(group.number,) for group in groups]
    heads = ["defense", "ACE", "rows"]
    table = Table("Adaptive calibration error", heads, rows, series, sortable=True)
    return Section(key, title, text, [figure], [table])


def _predicted(group: Group) -> tuple[Floats, NDArray[np.int64]] | None:
    """Return predictions and labels of all runs that kept some."""
    found = [
        (run.capture[kept.PREDICTION], run.capture[kept.LABEL])
        for run in group.runs
        if kept.PREDICTION in run.capture and has_classes(run.capture)
    ]
    if not found:
        return None
    predictions = np.concatenate([p for p, _ in found]).astype(np.float64)
    return predictions, np.concatenate([y for _, y in found]).astype(np.int64)


def _error(predictions: Floats, labels: NDArray[np.int64]) -> float:
    return adaptive_calibration_error(
        torch.from_numpy(predictions), torch.from_numpy(labels)
    )


def _curve(group: Group, predictions: Floats, labels: NDArray[np.int64]) -> Curve:
    if predictions.ndim == 1:
        hits = labels == 1
    else:
        hits = predictions.argmax(axis=1) == labels
        predictions = predictions.max(axis=1)
    x, y = reliability(predictions, hits.astype(np.float64), _BINS)
    tips = [
        f"{group.name}: {a:.2f} predicted, {b:.2f} true"
        for a, b in zip(x, y, strict=True)
    ]
    return Curve(group.name, x, y, group.style, (group.number,), tips)


def reliability(
    predictions: Floats, hits: Floats, bins: int
) -> tuple[list[float], list[float]]:
    """Return mean prediction and mean hit of bins of equal size."""
    order = np.argsort(predictions, kind="stable")
    parts = np.array_split(order, min(bins, len(order)))
    means = [(predictions[p].mean(), hits[p].mean()) for p in parts]
    return [float(p) for p, _ in means], [float(h) for _, h in means]
