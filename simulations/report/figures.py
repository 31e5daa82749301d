"""Figures of what runs have measured: leakage, utility and cost."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from flower_vfl.simulations.printing import metric_name
from flower_vfl.simulations.results import RUN
from flower_vfl.simulations.studies.tradeoff import tradeoff_points

from .charts import Axis, Figure, Look, bar_chart, line_chart, tradeoff_chart
from .data import SEED, Report, short_party

_POINTS = 40  # of one line
_TICKS = 10  # as many whole numbers have a tick each
_LOG = 8.0  # a logarithmic axis from this ratio of the ends on


def tradeoff_figures(report: Report) -> list[Figure]:
    """Return how much utility each defense leaves at how much privacy."""
    points = setting_points(report)
    if points.empty:
        return []
    several = points[points.duplicated("curve", keep=False)]
    curves = [stairs(own) for _, own in several.groupby("curve", sort=False)]
    joined = pd.concat(curves) if curves else several
    chart = tradeoff_chart(points, joined, report.look, "Privacy against utility")
    return [Figure("tradeoff", chart, "Right and up is better")]


def setting_points(report: Report) -> pd.DataFrame:
    """Return privacy and utility of each setting, and the curve that it belongs to."""
    points = tradeoff_points(report.records, report.runs["setting"])
    if points.empty:
        return points
    own = report.settings.loc[points.index]
    marks = (" (" + own["data"] + ")").where(own["data"] != "", "")
    means = points["leaks"].map(
        lambda leaks: ", ".join(f"{name} {leak:.3f}" for name, leak in leaks.items())
    )
    names = points["name"].map(metric_name)
    quality = names + points["utility"].map(" {:.3f}".format)
    points = points.assign(curve=own["family"] + marks, quality=quality, leaks=means)
    return points.rename_axis("setting").reset_index()


def stairs(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points that no other one beats, by growing privacy from 0 on."""
    falling = points.sort_values(["x", "y"], ascending=False)
    best = falling[falling["y"] > falling["y"].cummax().shift(fill_value=-1.0)][::-1]
    corners = pd.concat([best.iloc[:1].assign(x=0.0), best])
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
    frame, name = binned(report.evaluations, "epoch"), metric_name(report.metric)
    x, y = _counted("epoch", frame), Axis(name)
    chart = line_chart(frame, report.look, "Utility over the epochs", x, y)
    return [Figure("utility", chart, f"{name}, mean over seeds")]


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
    found = {metric_name(report.metric): report.utility["value"]}
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
    captions = {"milliseconds": "Time of a step"}
    captions["kilobytes"] = "Embeddings and gradients of a step"
    figures = []
    for column, caption in captions.items():
        frame = report.runs[["setting", column]].replace(0.0, np.nan).dropna()
        frame = frame.rename(columns={column: "x"})
        if len(frame):
            chart = bar_chart(frame, report.look, f"{column} per training step")
            figures.append(Figure(f"cost-{column}", chart, caption))
    return figures
