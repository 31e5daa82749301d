"""The sections of a report: what is said, the charts and the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import altair as alt
import numpy as np
import pandas as pd

from flower_vfl.simulations import capture as kept
from flower_vfl.simulations.results import RUN
from flower_vfl.simulations.studies.tradeoff import (
    SEED,
    area,
    privacy,
    usefulness,
)

from . import captured
from .charts import (
    Axis,
    Look,
    bar_chart,
    line_chart,
    scatter_chart,
    tradeoff_chart,
)
from .data import PLAIN, Report, metric_name
from .tables import (
    Table,
    calibration_table,
    number,
    paper_table,
    settings_tables,
    summary_table,
)

NO_CAPTURE = "The runs kept no rows: --capture 500 keeps as many for these pictures."
_POINTS = 40  # of one line
_PARTIES = 4  # parties whose leakage over the steps is shown
_CAPTURED = 2  # parties whose gradients are shown
_LOG = 8.0  # a logarithmic axis from this ratio of the ends on


@dataclass(frozen=True)
class Figure:
    """A chart, with what the page's filters know it by."""

    name: str
    chart: alt.TopLevelMixin
    caption: str
    setting: str = ""
    attack: str = ""
    party: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report."""

    key: str
    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    missing: str = ""
    small: bool = False


def tradeoff_section(report: Report) -> Section | None:
    """Return how much utility each defense leaves at how much privacy."""
    if report.kind == "scale":
        return None
    key, title = "tradeoff", "Privacy against utility"
    points = tradeoff_points(report)
    if points.empty:
        missing = "This needs runs with score attacks (--attack) and an evaluation."
        return Section(key, title, missing=missing)
    curves, rows = [], []
    for family, own in points.groupby("curve", sort=False):
        places = list(own[["x", "y"]].itertuples(index=False, name=None))
        rows.append((str(family), area(places), list(own["setting"])))
        if len(own) > 1:
            curves.append(stairs(own).assign(first=own.iloc[0]["setting"]))
    joined = pd.concat(curves) if curves else points.iloc[:0]
    chart = tradeoff_chart(points, joined, report.look, title)
    text = (
        "Privacy is 2·(1 − a), where a is the leak AUC of the attack that finds most "
        "(of values, 1 − |ρ|): 1 if no attack does better than a coin, 0 if one tells "
        "all labels. Utility is 2·(AUC − 0.5), the accuracy, or ρ. Both are means over "
        "seeds. A line is the utility that one can have at that privacy or more; its "
        "area, from 0 to 1, ranks defenses for which equally many settings were tried."
    )
    rows.sort(key=lambda row: -row[1])
    table = Table(
        "Area under the curve",
        ["defense", "area", "settings"],
        [[(name, None), number(size), number(len(own), 0)] for name, size, own in rows],
        [own for *_, own in rows],
        sortable=True,
    )
    figure = Figure("tradeoff", chart, "Right and up is better")
    return Section(key, title, text, [figure], [table])


def stairs(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points that no other one beats, by growing privacy from 0 on."""
    falling = points.sort_values(["x", "y"], ascending=False)
    best = falling[falling["y"] > falling["y"].cummax().shift(fill_value=-1.0)][::-1]
    return pd.concat([best.iloc[:1].assign(x=0.0), best])


def tradeoff_points(report: Report) -> pd.DataFrame:
    """Return privacy (x) and utility (y) of each setting, means over seeds."""
    rows = []
    for setting, own in report.runs.groupby("setting", sort=False):
        measured = report.utility.reindex(own.index)
        value = float(measured["value"].mean(skipna=False))
        leaks = report.largest_leaks.loc[own.index].mean().dropna()
        if leaks.empty or math.isnan(value):
            continue
        metric, (family, data) = (
            measured["name"].iloc[0],
            own[["family", "data"]].iloc[0],
        )
        row = {
            "setting": setting,
            "curve": f"{family} ({data})" if data else family,
            "x": privacy(leaks.to_dict(), report.regression),
            "y": usefulness(metric, value),
            "quality": f"{metric_name(metric)} {value:.3f}",
            "leaks": ", ".join(f"{name} {leak:.3f}" for name, leak in leaks.items()),
        }
        rows.append(row)
    return pd.DataFrame(rows)


def leak_section(report: Report) -> Section:
    """Return the leak of every attack over the steps, for the parties that see most."""
    key, title = "leak", "Leakage over the steps"
    if report.leaks.empty:
        missing = "No score attack was measured: see --attack."
        return Section(key, title, missing=missing)
    most = report.leaks.groupby("party", sort=False)["leak"].max()
    parties = most[most.index.isin(most.nlargest(_PARTIES).index)].index
    name = "|ρ|" if report.regression else "leak AUC"
    level = 0.0 if report.regression else 0.5
    figures = []
    for attack in report.attacks:
        for party in parties:
            rows = report.leak_steps.query("attack == @attack and party == @party")
            if rows.empty:
                continue
            frame = binned(rows, "step")
            y = Axis(
                name, (-0.01, 1.01) if report.regression else leak_domain(frame["y"])
            )
            x = _counted("step", frame)
            caption = f"{attack} attack on {short_party(party)}"
            ends = [(end, level) for end in x.domain or ()]
            chart = line_chart(frame, report.look, caption, x, y, reference=ends)
            file = f"leak-{attack}-{short_party(party)}"
            figures.append(Figure(file, chart, caption, "", attack, party))
    what = "correlation with the labels" if report.regression else "AUC of its scores"
    text = (
        f"How well an attack tells the labels of a batch: the {what}, mean over the "
        "steps of a point and over seeds. The dotted line is chance."
    )
    if len(most) > len(parties):
        text += f" Shown are the {len(parties)} parties or coalitions that see most."
    return Section(key, title, text, figures)


def _counted(title: str, frame: pd.DataFrame) -> Axis:
    """Return the axis of epochs or steps."""
    low, high = float(frame["x"].min()), float(frame["x"].max())
    domain = (low, high) if low < high else (low - 0.5, high + 0.5)
    return Axis(title, domain, whole=True)


def leak_domain(values: pd.Series[float]) -> tuple[float, float]:
    """Return the ends of an axis of leak AUCs, the same wherever that is possible."""
    return min(0.4, float(values.min())) - 0.01, 1.01


def short_party(party: str) -> str:
    """Return the name of a party or of a coalition, not too long."""
    members = party.count("+") + 1
    return party if members < 3 else f"coalition of {members}"


def binned(rows: pd.DataFrame, column: str, most: int = _POINTS) -> pd.DataFrame:
    """Return means of values that lie close along a column, for each setting."""
    place = rows.groupby("setting")[column]
    low = place.transform("min")
    length = place.transform("max") - low + 1
    # Single steps are noise: five or more make a point in a long run.
    width = (length / 10).clip(upper=5.0).clip(lower=length / most).clip(lower=1.0)
    bins = ((rows[column] - low) / width).astype(int).rename("bin")
    means = rows.groupby(["setting", bins], sort=False)[[column, "value"]].mean()
    means = means.reset_index().sort_values("bin", kind="stable")
    return (
        means.rename(columns={column: "x", "value": "y"}).drop(columns="bin").round(4)
    )


def utility_section(report: Report) -> Section:
    """Return the main metric over the epochs."""
    key, title = "utility", "Utility over the epochs"
    if report.evaluations.empty:
        return Section(key, title, missing="Nothing was evaluated.")
    name = metric_name(report.metric)
    frame = binned(report.evaluations, "epoch")
    x, y = _counted("epoch", frame), Axis(name)
    figure = Figure(
        key,
        line_chart(frame, report.look, title, x, y),
        f"{name}, mean over seeds",
    )
    return Section(key, title, figures=[figure])


def setting_section(report: Report) -> Section | None:
    """Return leak, utility and cost along a setting, if there is one of numbers."""
    if report.study is None:
        return None
    labels = report.study.labels().drop(columns=SEED, errors="ignore")
    values = labels.apply(pd.to_numeric, errors="coerce").dropna(axis=1)
    values = values.loc[:, np.isfinite(values).all() & (values.nunique() > 2)]
    if len(values.columns) != 1:
        return None
    label = str(values.columns[0])
    others = labels.drop(columns=label).fillna("").astype(str)
    names = others.agg(lambda row: ", ".join(filter(None, row)), axis=1)
    base = report.runs[["setting"]].assign(
        series=names if len(others.columns) else report.runs["family"],
        x=values[label],
    )
    series = list(dict.fromkeys(base["series"]))
    look = Look("series", series, range(len(series)), range(len(series)))
    figures = []
    for name, measured in _along(report).items():
        frame = base.assign(y=measured).dropna()
        if frame.empty:
            continue
        groups = ["series", "x", "setting"]
        frame = frame.groupby(groups, sort=False)["y"].mean().reset_index()
        chart = _along_chart(frame, look, name, label)
        figures.append(Figure(f"by-{label}-{name}", chart, name))
    text = f"Means over seeds; every point is one value of {label}."
    return Section("setting", f"Along {label}", text, figures)


def _along(report: Report) -> dict[str, pd.Series[float]]:
    """Return what is shown along a setting: one number for each run."""
    name = "|ρ|" if report.regression else "leak AUC"
    found = {metric_name(report.metric): report.utility["value"]}
    for attack, own in report.leaks.groupby("attack", sort=False):
        single = own[~own["coalition"]].groupby(RUN)["leak"]
        joint = own[own["coalition"]].groupby(RUN)["leak"]
        found[f"largest {name}, {attack}"] = single.max()
        found[f"mean {name}, {attack}"] = single.mean()
        found[f"{name} of a coalition, {attack}"] = joint.max()
    return found | {
        "ms per step": report.runs["milliseconds"],
        "kB per step": report.runs["kilobytes"],
        "MB at the peak": report.runs["megabytes"],
    }


def _along_chart(
    frame: pd.DataFrame, look: Look, name: str, label: str
) -> alt.LayerChart:
    low, high = frame["x"].min(), frame["x"].max()
    log, leak = low > 0 and high / low > _LOG, "leak AUC" in name
    ticks = sorted(set(frame["x"])) if log else ()
    x = Axis(label, (low / 1.1, high * 1.1) if log else None, log, ticks=ticks)
    y = Axis("leak AUC", leak_domain(frame["y"])) if leak else Axis(name)
    ends = [(low, 0.5), (high, 0.5)] if leak else []
    title = f"{name} by {label}"
    return line_chart(frame, look, title, x, y, points=True, reference=ends)


def gradient_section(report: Report) -> Section:
    """Return the gradients that left for a party, by class."""
    figures = []
    for setting, arrays in _captures(report):
        for party in kept.parties(arrays, kept.GRADIENT)[:_CAPTURED]:
            _, frame, x, y = captured.gradient_picture(arrays, party)
            step = int(arrays[f"{kept.GRADIENT_STEP}/{party}"])
            title = f"{setting}, {party}, step {step}, {len(frame)} rows"
            look = captured.class_look(arrays)
            chart = scatter_chart(frame, look, f"Gradients: {title}", x, y)
            name = f"gradients-{report.look.names.index(setting)}-{party}"
            figures.append(Figure(name, chart, title, setting, party=party))
    text = (
        "What left for a passive party in the last full training step, one point per "
        "row. Wide gradients are projected on their first two principal components; of "
        "one column, the value is shown against the trained model's prediction, as in "
        "Figure 2 of GAFM. The better the classes mix, the less a party can read off."
    )
    return _pictures("gradients", "Gradients by class", text, figures)


def embedding_section(report: Report) -> Section:
    """Return the embeddings of a passive party in two dimensions."""
    figures = []
    for setting, arrays in _captures(report):
        for party in kept.parties(arrays, kept.EMBEDDING)[:1]:
            for kind, frame, x, y in captured.embedding_pictures(arrays, party):
                title = f"{setting}, {party}, {kind}, {len(frame)} rows"
                look = captured.class_look(arrays)
                chart = scatter_chart(frame, look, f"Embeddings: {title}", x, y)
                number = report.look.names.index(setting)
                name = f"embeddings-{kind.lower()}-{number}-{party}"
                figures.append(Figure(name, chart, title, setting, party=party))
    text = (
        "Embeddings of test rows by the bottom model of a passive party, as PCA and as "
        "t-SNE (Figure 6 of LADSG); of one column, the value against the prediction. "
        "Classes that lie apart can be told by that party alone, whatever happens to "
        "the gradients."
    )
    return _pictures("embeddings", "Embeddings of a passive party", text, figures)


def _pictures(key: str, title: str, text: str, figures: list[Figure]) -> Section:
    if not figures:
        return Section(key, title, missing=NO_CAPTURE)
    return Section(key, title, text, figures, small=True)


def _captures(report: Report) -> Iterator[tuple[str, kept.Arrays]]:
    """Yield the first run of each setting that has kept rows."""
    for setting, own in report.runs.groupby("setting", sort=False):
        found = (report.captures[key] for key in own.index)
        arrays = next((arrays for arrays in found if arrays), None)
        if arrays:
            yield str(setting), arrays


def calibration_section(report: Report) -> Section:
    """Return how often what is predicted comes true."""
    key, title = "calibration", "Calibration"
    found = {}
    for setting, own in report.runs.groupby("setting", sort=False):
        arrays = [report.captures[run] for run in own.index]
        if (curve := captured.calibration(arrays)) is not None:
            found[str(setting)] = curve
    if not found:
        values = "The predictions are values, not probabilities."
        missing = values if any(report.captures.values()) else NO_CAPTURE
        return Section(key, title, missing=missing)
    frame = pd.concat([c.assign(setting=name) for name, (c, *_) in found.items()])
    x = Axis("predicted probability", (-0.03, 1.03))
    y = Axis("share that came true", (-0.03, 1.03))
    ends = [(0.0, 0.0), (1.0, 1.0)]
    chart = line_chart(
        frame.round(4), report.look, title, x, y, points=True, reference=ends
    )
    text = (
        "Predicted probability against what came true, test rows in ten bins of equal "
        "size; of several classes, that of the class with the largest probability. ACE "
        "is the adaptive calibration error (15 bins, all classes); small is good."
    )
    table = calibration_table({name: rest for name, (_, *rest) in found.items()})
    figure = Figure(key, chart, "Dotted: well calibrated")
    return Section(key, title, text, [figure], [table])


def cost_section(report: Report) -> Section:
    """Return what a step costs."""
    figures = []
    columns = {
        "milliseconds": ("seconds", "Time of a step"),
        "kilobytes": ("bytes", "Embeddings and gradients of a step"),
    }
    for column, (name, caption) in columns.items():
        groups = report.runs.groupby("setting", sort=False)[column]
        frame = groups.agg(mean="mean", sd="std").dropna(subset="mean").reset_index()
        if frame.empty:
            continue
        sd = frame["sd"].fillna(0.0)
        frame = frame.assign(low=(frame["mean"] - sd).clip(lower=0.0))
        frame = frame.assign(high=frame["mean"] + sd)
        chart = bar_chart(frame, report.look, f"{column} per training step")
        figures.append(Figure(f"cost-{name}", chart, caption))
    text = "Mean over all training steps, and standard deviation over seeds."
    workers = int(report.runs["workers"].max())
    if workers > 1:
        text += f" Up to {workers} runs shared the machine, which slows each down."
    return Section("cost", "Cost of a step", text, figures)


def summary_section(report: Report) -> Section:
    """Return one row for each setting: how good, how leaky, how slow."""
    text = ""
    if report.attacks:
        text = (
            "Leak: how well an attack tells the labels of a batch from the gradients, "
            "at the party to which it tells most (AUC, 0.5 is chance; of values |ρ|, 0 "
            "is chance). "
        )
    if len(report.runs) > len(report.settings):
        text += "Mean ± standard deviation over seeds. "
    families = set(report.runs["family"])
    if PLAIN in families and len(families) > 1:
        text += f"The time ratio is that of a step to '{PLAIN}' on the same data."
    return Section("summary", "Summary", text.strip(), tables=[summary_table(report)])


def paper_section(report: Report) -> Section | None:
    """Return the figures of the paper that a study repeats, beside ours."""
    if report.study is None or "paper" not in report.study.extra:
        return None
    note = str(report.study.extra.get("note", ""))
    table = paper_table(report.study)
    return Section("paper", "Beside the paper", note, tables=[table])


def settings_section(report: Report) -> Section:
    """Return the settings of the runs and the versions of what ran them."""
    tables = settings_tables(report)
    return Section("settings", "Settings and versions", tables=tables)


def all_sections(report: Report) -> list[Section]:
    """Return the sections of a report, in the order of the page."""
    sections = [
        summary_section(report),
        paper_section(report),
        tradeoff_section(report),
        setting_section(report),
        leak_section(report),
        utility_section(report),
        gradient_section(report),
        embedding_section(report),
        calibration_section(report),
        cost_section(report),
        settings_section(report),
    ]
    return [section for section in sections if section is not None]
