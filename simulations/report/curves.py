"""Charts of what was measured: leakage and utility as they grow, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev

from flower_vfl.leakage.monitor import FLIPPED, LEAK
from flower_vfl.simulations.studies.run_metrics import is_regression

from .content import Figure, Legend, Section
from .plots import Axes, BarOf, Curve, bar_plot, line_plot
from .runs import Group, Report, ReportRun

_POINTS = 40  # of one line
_PANELS = 4  # parties whose leakage is drawn


def leak_section(report: Report) -> Section:
    """Return the leak of every attack over the steps, for the parties that see most."""
    key, title = "leak", "Leakage over the steps"
    parties = report.leakiest(_PANELS)
    if not parties:
        return Section(
            key, title, missing="No score attack was measured: see --attack."
        )
    values = is_regression(report.runs[0].document)
    kind, name = (FLIPPED, "|ρ|") if values else (LEAK, "leak AUC")
    figures = []
    for attack in report.attacks:
        for party in parties:
            curves = [
                curve
                for group in report.groups
                if (curve := _over_steps(group, f"{kind}_{attack}/{party}"))
            ]
            if curves:
                figures.append(_panel(attack, party, curves, name, values))
    what = "the correlation with the labels" if values else "the AUC of its scores"
    text = (
        f"How well an attack tells the labels of a batch: {what}, mean over the steps "
        "of a point and over seeds. The dotted line is chance."
    )
    if len(_all_parties(report)) > len(parties):
        text += f" Shown are the {len(parties)} parties or coalitions that see most."
    return Section(key, title, text, figures)


def _panel(
    attack: str, party: str, curves: Sequence[Curve], name: str, values: bool
) -> Figure:
    who = short_party(party)
    everything = [v for curve in curves for v in curve.y]
    ends = (0.0, 1.0) if values else leak_span(everything)
    level = 0.0 if values else 0.5
    axes = Axes("step", name, y_span=ends, whole_x=True, level=level)
    scene = line_plot(f"{attack} attack on {who}", curves, axes)
    legend = [(curve.name, curve.style) for curve in curves]
    file = f"leak-{attack}-{who}"
    return Figure(file, scene, f"{attack} attack on {who}", legend, (), attack, party)


def leak_span(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis of leak AUCs, the same wherever that is possible."""
    return min(0.4, *values), 1.0


def short_party(party: str) -> str:
    """Return the name of a party or of a coalition, not too long."""
    members = party.split("+")
    return party if len(members) < 3 else f"coalition of {len(members)}"


def _all_parties(report: Report) -> set[str]:
    return {p for r in report.runs for p in r.document["leakage"] if "/" not in p}


def _over_steps(group: Group, name: str) -> Curve | None:
    points = []
    for run in group.runs:
        series = run.document["series"].get(name, {"steps": [], "values": []})
        points += list(zip(series["steps"], series["values"], strict=False))
    if not points:
        return None
    x, y = thinned(points)
    return Curve(group.name, x, y, group.style, (group.number,))


def thinned(
    points: Iterable[tuple[float, float]], most: int = _POINTS
) -> tuple[list[float], list[float]]:
    """Return the means of points that lie close along the first axis."""
    found = sorted(points)
    low, high = found[0][0], found[-1][0]
    length = high - low + 1
    width = max(length / most, min(5.0, length / 10), 1.0)  # single steps are noise
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in found:
        bins.setdefault(int((x - low) / width), []).append((x, y))
    means = [
        (fmean([x for x, _ in b]), fmean([y for _, y in b])) for b in bins.values()
    ]
    return [x for x, _ in means], [y for _, y in means]


def utility_section(report: Report) -> Section:
    """Return the main metric over the epochs."""
    metric = report.metric
    curves = []
    for group in report.groups:
        points = [
            (entry["epoch"], entry[metric])
            for run in group.runs
            for entry in run.document["epochs"]
            if metric in entry
        ]
        if points:
            x, y = thinned(points)
            curves.append(Curve(group.name, x, y, group.style, (group.number,)))
    key, title = "utility", "Utility over the epochs"
    if not curves:
        return Section(key, title, missing="Nothing was evaluated.")
    name = metric_name(metric)
    scene = line_plot(title, curves, Axes("epoch", name, whole_x=True))
    figure = Figure(
        "utility", scene, f"{name}, mean over seeds", legend_of(report.groups)
    )
    return Section(key, title, figures=[figure])


def metric_name(metric: str) -> str:
    """Return the name of a metric for a reader."""
    return (
        metric.replace("_", " ").replace("auc", "AUC").replace("pearson", "Pearson's ρ")
    )


def legend_of(groups: Sequence[Group]) -> Legend:
    """Return the legend of groups."""
    return [(group.name, group.style) for group in groups]


def milliseconds(run: ReportRun) -> float:
    """Return how long a step of a run took."""
    return float(run.document["seconds"]["step"]) * 1e3


def kilobytes(run: ReportRun) -> float:
    """Return what travelled in a step of a run; 0 if it was not counted."""
    found = run.document.get("bytes", {}).get("step")
    return float(found or 0.0) / 1e3


def cost_section(report: Report) -> Section:
    """Return what a step costs."""
    figures = []
    seconds = _bars(report, milliseconds)
    name = "milliseconds per training step"
    figures.append(
        Figure("cost-seconds", bar_plot(name, seconds, name), "Time of a step")
    )
    traffic = _bars(report, kilobytes)
    text = "Mean over all training steps, and standard deviation over seeds."
    if any(length for _, length, *_ in traffic):
        name = "kilobytes per training step"
        caption = "Embeddings and gradients of a step"
        figures.append(Figure("cost-bytes", bar_plot(name, traffic, name), caption))
    workers = {run.document.get("workers", 1) for run in report.runs}
    if workers != {1}:
        text += f" Up to {max(workers)} runs shared the machine, which slows each down."
    return Section("cost", "Cost of a step", text, figures)


def _bars(report: Report, read: Callable[[ReportRun], float]) -> list[BarOf]:
    bars = []
    for group in report.groups:
        values = [read(run) for run in group.runs]
        spread = stdev(values) if len(values) > 1 else 0.0
        bars.append((group.name, fmean(values), spread, group.style, group.number))
    return bars
