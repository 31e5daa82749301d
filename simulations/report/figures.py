"""Figures of what runs have measured, and of rows that they have kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from flower_vfl.privacy.accountant import RUN_AUC_BOUND
from flower_vfl.simulations import capture as kept
from flower_vfl.simulations.capture import Arrays
from flower_vfl.simulations.results import RUN
from flower_vfl.simulations.studies.tradeoff import tradeoff_points

from . import charts
from .charts import Axis, Figure, Look, line_chart
from .data import SEED, Report, short_party
from .tables import Table, calibration_table

_POINTS, _ROWS, _BINS = 40, 500, 10  # of a line, a picture and a calibration
_TICKS = 10  # as many whole numbers have a tick each
_LOG = 8.0  # a logarithmic axis from this ratio of the ends on
Floats = NDArray[Any]
Picture = tuple[str, pd.DataFrame, Axis, Axis]


def tradeoff_figures(report: Report) -> list[Figure]:
    """Return how much utility each defense leaves at how much leakage."""
    points = setting_points(report)
    if points.empty:
        return []
    several = points[points.duplicated("curve", keep=False)]
    curves = [stairs(own) for _, own in several.groupby("curve", sort=False)]
    joined = pd.concat(curves) if curves else several
    x = Axis(f"largest {report.leak_name}", (report.chance - 0.02, 1.02))
    y = Axis(report.metric_name, padded(points["y"]))
    guess = () if report.metric.endswith("accuracy") else x.domain or ()
    ends = [(end, report.chance) for end in guess]
    chart = charts.tradeoff_chart(points, joined, report.look, x, y, ends)
    return [Figure("tradeoff", chart, "Upper left is better")]


def padded(values: pd.Series[float] | pd.DataFrame) -> tuple[float, float]:
    """Return the range of values, a little wider."""
    low, high = np.nanmin(values), np.nanmax(values)
    return low - (margin := 0.005 + 0.07 * (high - low)), high + margin


def setting_points(report: Report) -> pd.DataFrame:
    """Return leak and utility of each setting, and the curve that it belongs to."""
    points = tradeoff_points(report.records, report.runs["setting"])
    if points.empty:
        return points
    own = report.settings.loc[points.index]
    marks = (" (" + own["data"] + ")").where(own["data"] != "", "")
    listed = [[f"{n} {v:.3f}" for n, v in leaks.items()] for leaks in points["leaks"]]
    means = [", ".join(texts) for texts in listed]
    largest = [max(leaks.values()) for leaks in points["leaks"]]
    points = points.rename(columns={"x": "privacy", "y": "usefulness", "utility": "y"})
    points = points.assign(curve=own["family"] + marks, x=largest, leaks=means)
    return points.rename_axis("setting").reset_index()


def stairs(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points that no other one beats, by growing leak up to 1."""
    rising = points.sort_values(["x", "y"], ascending=[True, False])
    best = rising[rising["y"] > rising["y"].cummax().shift(fill_value=-np.inf)]
    corners = pd.concat([best, best.iloc[-1:].assign(x=1.0)])
    return corners.assign(first=points["setting"].iloc[0])


def leak_figures(report: Report) -> list[Figure]:
    """Return the leak of every attack over the steps, for the parties that see most."""
    figures = []
    for attack in report.attacks:
        for party in report.leakiest:
            rows = report.leak_steps.query("attack == @attack and party == @party")
            if rows.empty:
                continue
            frame = binned(rows, "step")
            x, y = _counted("step", frame), _leak_axis(report, frame)
            ends = [(end, report.chance) for end in x.domain or ()]
            caption = f"{attack} attack on {short_party(party)}"
            chart = line_chart(frame, report.look, caption, x, y, reference=ends)
            mirrored = ", ".join(rows["setting"][rows["mirrored"]].unique())
            caption += f"; mirrored: {mirrored}" if mirrored else ""
            name = f"leak-{attack}-{short_party(party)}"
            figures.append(Figure(name, chart, caption, attack=attack, party=party))
    return figures


def _leak_axis(report: Report, frame: pd.DataFrame) -> Axis:
    """Return the axis of leaks, the same wherever that is possible."""
    low = min(report.chance - 0.1, float(frame["y"].min())) if report.chance else 0.0
    return Axis(report.leak_name, (low - 0.01, 1.01))


def _counted(title: str, frame: pd.DataFrame) -> Axis:
    """Return the axis of epochs or steps."""
    low, high = float(frame["x"].min()), float(frame["x"].max())
    domain = (low, high) if low < high else (low - 0.5, high + 0.5)
    few = range(math.ceil(low), math.floor(high) + 1)
    return Axis(title, domain, whole=True, ticks=few if len(few) <= _TICKS else ())


def binned(rows: pd.DataFrame, column: str, most: int = _POINTS) -> pd.DataFrame:
    """Return means of values that lie close along a column, for each setting."""
    place = rows.groupby("setting")[column]
    low = place.transform("min")
    length = place.transform("max") - low + 1
    # Single steps are noise: five or more make a point in a long run.
    width = (length / 10).clip(upper=5.0).clip(lower=length / most).clip(lower=1.0)
    bins = ((rows[column] - low) / width).astype(int).rename("bin")
    means = rows.groupby(["setting", bins], sort=False)[[column, "value"]].mean()
    means = means.reset_index().sort_values("bin", kind="stable").drop(columns="bin")
    return means.rename(columns={column: "x", "value": "y"}).round(4)


def utility_figures(report: Report) -> list[Figure]:
    """Return the main metric over the epochs."""
    if report.evaluations.empty:
        return []
    frame, name = binned(report.evaluations, "epoch"), report.metric_name
    x, y = _counted("epoch", frame), Axis(name)
    ends = [(end, report.alone) for end in x.domain or () if report.alone is not None]
    chart = line_chart(frame, report.look, name, x, y, reference=ends)
    return [Figure("utility", chart, f"{name}, mean over seeds")]


def privacy_figures(report: Report) -> list[Figure]:
    """Return the bound for the training so far, over the epochs."""
    rows = report.records[report.records["metric"] == RUN_AUC_BOUND]
    if rows.empty:
        return []
    frame = binned(rows, "epoch")
    x, y = _counted("epoch", frame), Axis("AUC bound", (0.49, 1.01))
    chart = line_chart(frame, report.look, "Bound over the epochs", x, y, points=True)
    return [Figure("privacy", chart, "AUC bound from the first epoch on")]


def varied_figures(report: Report) -> list[Figure]:
    """Return leak, utility and cost along the setting that takes several numbers."""
    values = report.varied
    if values is None or report.study is None:
        return []
    others = report.study.labels().drop(columns=[values.name, SEED], errors="ignore")
    joined = [", ".join(map(str, row.dropna())) for _, row in others.iterrows()]
    series = pd.Series(joined, others.index).replace("", "all")
    names = list(dict.fromkeys(series[report.runs.index]))
    look = Look("series", names, range(len(names)), range(len(names)))
    base = report.runs[["setting"]].assign(series=series, x=values)
    figures = []
    for name, found in _along(report).items():
        frame = base.assign(y=found).dropna()
        if frame.empty:
            continue
        means = frame.groupby(["series", "x", "setting"], sort=False)["y"].mean()
        frame = means.reset_index()
        low, high = frame["x"].min(), frame["x"].max()
        log, leak = low > 0 and high / low > _LOG, report.leak_name in name
        ticks = sorted(set(frame["x"])) if log else ()
        domain = (low / 1.1, high * 1.1) if log else None
        x = Axis(str(values.name), domain, log, ticks=ticks)
        y = _leak_axis(report, frame) if leak else Axis(name)
        ends = [(low, report.chance), (high, report.chance)] if leak else []
        title = f"{name} by {values.name}"
        chart = line_chart(frame, look, title, x, y, points=True, reference=ends)
        figures.append(Figure(f"by-{values.name}-{name}", chart, name))
    return figures


def _along(report: Report) -> dict[str, pd.Series[float]]:
    """Return what is shown along a setting: one number for each run."""
    found = {report.metric_name: report.utility["value"]}
    for attack, own in report.leaks.groupby("attack", sort=False):
        single = own[~own["coalition"]].groupby(RUN)["leak"]
        joint = own[own["coalition"]].groupby(RUN)["leak"]
        found[f"largest {report.leak_name}, {attack}"] = single.max()
        found[f"mean {report.leak_name}, {attack}"] = single.mean()
        found[f"{report.leak_name} of a coalition, {attack}"] = joint.max()
    costs = {"ms per step": "milliseconds", "kB per step": "kilobytes"}
    costs["MB at the peak"] = "megabytes"
    return found | {name: report.runs[column] for name, column in costs.items()}


def cost_figures(report: Report) -> list[Figure]:
    """Return what a step costs."""
    time, size = "Time of a step", "Embeddings and gradients of a step"
    figures = []
    for column, caption in (("milliseconds", time), ("kilobytes", size)):
        frame = report.runs[["setting", column]].replace(0.0, np.nan).dropna()
        frame = frame.rename(columns={column: "x"})
        if len(frame):
            chart = charts.bar_chart(frame, report.look, f"{column} per training step")
            figures.append(Figure(f"cost-{column}", chart, caption))
    return figures


def row_figures(report: Report, what: str) -> list[Figure]:
    """Return gradients for two parties, or embeddings of one, in two dimensions.

    They are of the first run of each setting that has kept rows.
    """
    figures = []
    most, pictures = (2, _gradients) if what == kept.GRADIENT else (1, _embeddings)
    for place, (setting, own) in enumerate(report.by_setting()):
        arrays = next((a for key in own.index if (a := report.captures[key])), {})
        for party in kept.parties(arrays, what)[:most] if arrays else ():
            for kind, frame, x, y in pictures(arrays, party):
                title = f"{setting}, {party}, {kind}, {len(frame)} rows"
                look, about = _look(arrays), f"{what}: {title}"
                chart = charts.scatter_chart(frame, look, about, x, y)
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
    halves = ["below the median", "above the median"]
    return [*map(str, arrays[kept.CLASSES])] if _has_classes(arrays) else halves


def _classes(arrays: Arrays, labels: Floats) -> list[str]:
    """Return names of classes; values are divided at their median."""
    chosen, names = labels[:_ROWS], _class_names(arrays)
    numbers = chosen if _has_classes(arrays) else chosen > np.median(chosen)
    return [names[number] for number in numbers.astype(int)]


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
    known = {"init": "pca", "random_state": 0, "max_iter": 500}  # it changes no more
    model = TSNE(2, perplexity=perplexity, **known)
    with threadpool_limits(1):  # threads that wait for each other take 40 times as long
        flat: Floats = model.fit_transform(rows.astype(np.float32))
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
    frame = pd.concat(curves).round(4)
    reach = padded(pd.concat([frame["x"], frame["y"]]))
    x, y = Axis("predicted probability", reach), Axis("observed frequency", reach)
    ends = [(end, end) for end in reach]
    given = frame, report.look, "Calibration", x, y
    chart = line_chart(*given, points=True, reference=ends)
    table = calibration_table({name: known for name, (_, *known) in found.items()})
    return [Figure("calibration", chart, "Dotted line: perfect calibration")], [table]


def calibration(captures: Sequence[Arrays]) -> tuple[pd.DataFrame, float, int] | None:
    """Return the reliability curve, the ACE and the number of test rows."""
    found = [a for a in captures if kept.PREDICTION in a and _has_classes(a)]
    if not found:
        return None
    predictions = np.concatenate([a[kept.PREDICTION] for a in found]).astype(np.float64)
    labels = np.concatenate([a[kept.LABEL] for a in found]).astype(np.int64)
    truth = torch.from_numpy(labels)
    error = adaptive_calibration_error(torch.from_numpy(predictions), truth)
    hits, predicted = labels == 1, predictions
    if predictions.ndim > 1:
        hits = predictions.argmax(axis=1) == labels
        predicted = predictions.max(axis=1)
    bins = {"n_bins": _BINS, "strategy": "quantile"}
    y, x = calibration_curve(hits, predicted.clip(0, 1), pos_label=True, **bins)
    return pd.DataFrame({"x": x, "y": y}), error, len(labels)
