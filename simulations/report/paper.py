"""Figures for papers: the trade-off, leaks over the steps and heat maps, with data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import vl_convert

from flower_vfl.simulations.results import RUN

from . import charts
from .charts import COLOURS, Axis, Look, css, with_colours
from .data import SEED, Report
from .figures import binned, padded
from .matrix import leak_means, short_attacks

# Pixels of 1/96 inch: 3.4 inches are a column of most journals.
_COLUMN, _PPI = 326, 300
_HEIGHT, _STEP = 200, 30
_BAND = 0.18
_LEGEND: dict[str, Any] = {"orient": "bottom", "columns": 3, "labelLimit": 96}
_LEGEND |= {"symbolSize": 60, "symbolOpacity": 1, "symbolStrokeWidth": 0}
_FONTS = {"labelFontSize": 9, "titleFontSize": 10}
_STROKES = _LEGEND | {"symbolType": "stroke", "symbolSize": 200}
_STROKES |= {"symbolStrokeWidth": 1.5}
_FEW = 7  # as many defenses are told apart by their colours


@dataclass(frozen=True)
class Plot:
    """A figure for a paper, and its data."""

    name: str
    chart: alt.Chart | alt.LayerChart
    data: pd.DataFrame


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write every figure as PNG, SVG and CSV, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = with_colours(charts.theme(), COLOURS)
    config |= {"background": COLOURS["paper"], "font": "Liberation Sans, Arial"}
    config["axis"] |= {**_FONTS, "labelColor": COLOURS["ink"]}
    config["legend"] |= _FONTS
    written = []
    for plot in plots(report):
        spec = with_colours(charts.specification(plot.chart), COLOURS)
        spec.pop("description", None)
        svg = charts.svg(spec, config)
        paths = [folder / f"{plot.name}.{kind}" for kind in ("svg", "png", "csv")]
        paths[0].write_text(svg, encoding="utf-8")
        paths[1].write_bytes(vl_convert.svg_to_png(svg, scale=72 / 96, ppi=_PPI))
        plot.data.to_csv(paths[2], index=False, float_format="%.6g")
        written += paths
    return written


def plots(report: Report) -> Iterator[Plot]:
    """Yield the figures that a folder has data for."""
    cells = _cells(report) if report.cells is None else report.cells
    if report.cells is not None:
        cells = cells.assign(defense=cells["method"])
    datasets = cells["dataset"].unique()
    for dataset, own in cells.groupby("dataset", sort=False):
        ending = f"-{slug(str(dataset))}" if len(datasets) > 1 else ""
        if own["utility"].notna().any():
            yield _tradeoff(report, own.dropna(subset="utility"), ending)
        yield _heat_map(report, own, ending)
    if report.cells is None:
        yield from _leaks(report)


def slug(name: str) -> str:
    """Return a name for a file."""
    return re.sub(r"[^\w.@+-]+", "-", name).strip("-.")[:100]


def _cells(report: Report) -> pd.DataFrame:
    """Return the leak of every attack on every run, with the run's utility."""
    known = report.runs[["data", "setting", "family"]]
    names = {"data": "dataset", "family": "defense"}
    known = known.rename(columns=names).assign(
        method=known["setting"],
        seed=[report.documents[str(key)]["config"][SEED] for key in known.index],
        utility=report.utility["value"],
    )
    found = report.largest_leaks.reset_index().melt(RUN, var_name="attack")
    found = found.rename(columns={"value": "leak"}).dropna(subset="leak")
    return found.join(known, on=RUN).drop(columns=RUN)


# --- privacy and utility --------------------------------------------------------------


def _tradeoff(report: Report, cells: pd.DataFrame, ending: str) -> Plot:
    """Return utility by leak: a point for each setting, a curve for each defense."""
    runs = strongest(cells)
    points, curves = setting_means(runs), seed_curves(runs)
    names = list(points["defense"].unique())
    look = Look("defense", names, range(len(names)), range(len(names)))
    x = Axis(f"largest {report.leak_name}", (report.chance - 0.02, 1.02))
    low, high = padded(pd.concat([part[["low", "high"]] for part in (points, curves)]))
    y = Axis(report.metric_name, (low, min(high, 1.01)))
    colour = look.colour(legend=_LEGEND)
    between = {"y": alt.Y("low:Q", title=y.title), "y2": "high:Q"}
    layers = []
    if len(curves):
        base = alt.Chart(curves).encode(x=x.x(), color=colour)
        step: dict[str, Any] = {"interpolate": "step-after", "clip": True}
        layers.append(base.mark_area(opacity=_BAND, **step).encode(**between))
        layers.append(base.mark_line(strokeWidth=1.5, **step).encode(y=y.y()))
    base = alt.Chart(points).encode(x=x.x(), y=y.y(), color=colour)
    single = alt.Chart(points[~points.duplicated("defense", keep=False)])
    bars = single.mark_rule(strokeDash=[1, 0], opacity=0.5, clip=True)
    bars = bars.encode(color=colour)
    across = {"x": alt.X("x_low:Q", title=x.title), "x2": "x_high:Q"}
    layers += [bars.encode(x=x.x(), **between), bars.encode(y=y.y(), **across)]
    marks = base.mark_point(filled=True, size=45, opacity=1)
    layers += [marks.encode(shape=look.shape()), *_labels(points, x, y)]
    data = pd.concat([points.assign(layer="setting"), curves.assign(layer="curve")])
    names_of = {"x": "leak", "y": "utility", "low": "utility_low"}
    names_of |= {"high": "utility_high", "x_low": "leak_low", "x_high": "leak_high"}
    return _plot(f"privacy-utility{ending}", layers, data.rename(columns=names_of))


def strongest(cells: pd.DataFrame) -> pd.DataFrame:
    """Return each run with the attack that finds most in its setting."""
    means = cells.groupby(["setting", "attack"], sort=False)["leak"].mean()
    chosen = means.groupby("setting", sort=False).idxmax()
    index = pd.MultiIndex.from_frame(cells[["setting", "attack"]])
    return cells[index.isin(list(chosen))]


def setting_means(runs: pd.DataFrame) -> pd.DataFrame:
    """Return mean leak (x) and utility (y) of each setting, and a deviation around."""
    grouped = runs.groupby(["defense", "setting", "attack"], sort=False)
    values = grouped[["leak", "utility"]]
    x, y = (column for _, column in values.mean().items())
    sd = values.std().fillna(0.0)
    ends = {"x_low": x - sd["leak"], "x_high": x + sd["leak"]}
    ends |= {"low": y - sd["utility"], "high": y + sd["utility"]}
    return pd.DataFrame({"x": x, "y": y, **ends, "seeds": grouped.size()}).reset_index()


def seed_curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the curve of each defense with several settings, and its band over seeds.

    At each leak (x) a seed has the best utility (y) of settings that leak no more.
    """
    found = [pd.DataFrame(columns=["defense", "x", "y", "low", "high", "seeds"])]
    for defense, own in runs.groupby("defense", sort=False):
        if own["setting"].nunique() < 2:
            continue
        wide = own.pivot_table("utility", "leak", "seed", "max")
        wide = wide.reindex(np.union1d(wide.index, [1.0]))
        best = wide.cummax().ffill().dropna()
        y, sd = best.mean(axis=1), best.std(axis=1).fillna(0.0)
        rows = {"defense": defense, "x": best.index, "y": y, "low": y - sd}
        rows |= {"high": y + sd, "seeds": best.shape[1]}
        found.append(pd.DataFrame(rows))
    return pd.concat(found[1:] or found, ignore_index=True)


def _labels(points: pd.DataFrame, x: Axis, y: Axis) -> list[alt.Chart]:
    """Return what the legend does not tell: parameters, or names of many defenses."""
    several = points.duplicated("defense", keep=False)
    parameters = points["setting"].str.partition(":")[2].where(several, "")
    if points["defense"].nunique() > _FEW:
        parameters = parameters.where(several, points["defense"])
    frame = points.assign(setting=parameters)
    size: dict[str, Any] = {"widths": (_COLUMN - 50,), "height": _HEIGHT, "letter": 4.4}
    base = alt.Chart(frame.join(charts.labels_beside(frame, x, y, **size)))
    base = base.encode(x=x.x(), y=y.y(), text="label:N")
    halo = {"stroke": css("paper"), "strokeWidth": 2.5, "color": css("paper")}
    halo |= {"strokeJoin": "round"}
    looks: list[dict[str, Any]] = [halo, {"color": css("ink")}]
    return [base.mark_text(**charts.BESIDE, fontSize=8, **look) for look in looks]


# --- leak over the steps, and by defense and attack -----------------------------------


def _leaks(report: Report) -> Iterator[Plot]:
    """Yield the leak of each attack over the steps, at the party that learns most."""
    for attack, found in report.leaks.groupby("attack", sort=False):
        party = str(found.groupby("party", sort=False)["leak"].mean().idxmax())
        rows = report.leak_steps.query("attack == @attack and party == @party")
        data = banded(rows)
        if data["x"].nunique() < 2:
            continue
        look = report.look.only(data["setting"])
        x = Axis("training step", (data["x"].min(), data["x"].max()), whole=True)
        low, high = padded(data[["low", "high"]])
        y = Axis(report.leak_name, (min(low, report.chance - 0.02), min(high, 1.01)))
        ends = pd.DataFrame({"x": x.domain, "y": report.chance})
        guess = alt.Chart(ends).mark_line(strokeDash=[2, 2], strokeWidth=1)
        base = alt.Chart(data).encode(x=x.x(), color=look.colour(legend=_STROKES))
        band = base.mark_area(opacity=_BAND, clip=True)
        lines = base.mark_line(strokeWidth=1.5, clip=True)
        layers = [
            guess.encode(x=x.x(), y=y.y(), color=alt.value(css("soft"))),
            band.encode(y=alt.Y("low:Q", title=y.title), y2="high:Q"),
            lines.encode(y=y.y(), strokeDash=look.dash()),
        ]
        data = data.rename(columns={"x": "step", "y": "leak"})
        data = data.assign(attack=attack, party=party)
        yield _plot(f"leak-{slug(str(attack))}", layers, data)


def banded(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean over runs (y) along the steps (x), and a deviation around it."""
    runs = rows.drop_duplicates(RUN).set_index(RUN)["setting"]
    own = binned(rows.assign(setting=rows[RUN]), "step")
    own = own.assign(setting=own["setting"].map(runs))
    found = own.groupby(["setting", "x"], sort=False)["y"].agg(["mean", "std", "size"])
    sd, y = found["std"].fillna(0.0), found["mean"]
    parts = {"y": y, "low": y - sd, "high": y + sd, "seeds": found["size"]}
    return pd.DataFrame(parts).reset_index()


def _heat_map(report: Report, cells: pd.DataFrame, ending: str) -> Plot:
    """Return the leak of each attack on each setting."""
    data = leak_means(cells)
    short = short_attacks(data["attack"].unique())
    named = {"setting": data["method"], "attack": data["attack"].map(short)}
    frame = pd.DataFrame(named | {"value": data["leak"]})
    value = Axis(report.leak_name, (report.chance, 1.0))
    chart = charts.heat_map(frame, "attack", value, "")
    return Plot(f"heat-map{ending}", chart.properties(width=alt.Step(_STEP)), data)


def _plot(name: str, layers: list[alt.Chart], data: pd.DataFrame) -> Plot:
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    chart = alt.LayerChart(layer=layers, width=_COLUMN, height=_HEIGHT, autosize=fit)
    return Plot(name, chart, data)
