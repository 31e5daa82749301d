"""The README's picture: what defenses cost, and what still leaks, on a real dataset.

    python benchmarks/readme_picture.py --study runs/readme-picture

runs Marvell, iso, gradient compression and max-norm at several strengths, GAFM and
LADSG, on credit-default (three seeds, about ten minutes on one core; what is finished
is not run again) and writes ``docs/assets/privacy-utility.svg`` and, with the values of
its points, ``docs/assets/privacy-utility.csv``.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
import vl_convert

from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.report.charts import BESIDE, Axis, labels_beside
from flower_vfl.simulations.report.data import PLAIN, load_report
from flower_vfl.simulations.report.figures import padded, setting_points
from flower_vfl.simulations.studies.methods import (
    parse_method,
    parse_values,
    sweep_trials,
)
from flower_vfl.simulations.studies.study import run_study

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
DEFENSES = ("none", "max-norm", "iso", "marvell", "gc", "preset=gafm", "preset=ladsg")
STRENGTHS = ("iso.t=1,2,4,8", "marvell.s=0.25,1,4,16", "gc.keep=0.75,0.5,0.25")
CONFIG = RunConfig(
    dataset="credit-default",
    epochs=10,
    attack="norm,cosine,mean,median",
    reproducible_noise=True,
)
# Okabe and Ito's colours that can be read as text on white.
COLOURS = {PLAIN: "#1a1a1a", "max-norm": "#0072b2", "iso": "#c24e00"}
COLOURS |= {
    "marvell": "#00785a",
    "gc": "#a8508a",
    "gafm": "#8a6200",
    "ladsg": "#4b4bc3",
}
WIDTH, HEIGHT, FONT = 680, 440, 17
FACES = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


def measured(folder: Path, seeds: int) -> pd.DataFrame:
    """Run what is missing, and return leak and utility of each setting."""
    values = parse_values([*STRENGTHS, f"seed={','.join(map(str, range(seeds)))}"])
    methods = [parse_method(text) for text in DEFENSES]
    trials = sweep_trials(CONFIG, methods, values, "in-process")
    run_study(folder, "sweep", "credit-default: the README's picture", trials)
    report = load_report(folder)
    points = setting_points(report)
    sd = report.utility["value"].groupby(report.runs["setting"]).std()
    return points.assign(sd=points["setting"].map(sd), number=range(len(points)))


def drawn(points: pd.DataFrame) -> str:
    """Return the picture as SVG, on white, with labels instead of a legend."""
    x = Axis("largest leak AUC (0.5 = nothing leaks)", (0.5, 1.02))
    y = Axis("test AUC", padded(points["y"]))
    several = points[points.duplicated("curve", keep=False)]
    parts = [own[["x", "y"]].to_numpy() for _, own in several.groupby("curve")]
    lines = [pair for own in parts for pair in pairwise(own)]
    steps = np.linspace(0.05, 0.95, 19)
    crossed = [tuple(a + step * (b - a)) for a, b in lines for step in steps]
    marks = points["setting"].str.extract(r"( \(.*did not train\))")[0].fillna("")
    strengths = points["setting"].str.extract(r", (\S+)")[0].fillna("")
    named = ~points.duplicated("curve", keep="last")
    names = (points["curve"] + " ").where(named, "") + strengths
    names = names.str.strip() + marks
    places = pd.DataFrame(crossed, columns=["x", "y"]).assign(setting="")
    places = pd.concat([points.assign(setting=names), places], ignore_index=True)
    labels = labels_beside(places, x, y, (WIDTH,), HEIGHT, 0.54 * FONT)
    colour = alt.Color("curve:N", legend=None).scale(
        domain=list(COLOURS), range=list(COLOURS.values())
    )
    place = {"x": x.x(), "y": y.y(), "color": colour}
    curves = alt.Chart(several).mark_line(strokeWidth=2, opacity=0.55)
    dots = alt.Chart(points).mark_point(filled=True, size=110, opacity=1)
    texts = alt.Chart(points.join(labels)).mark_text(**BESIDE, fontSize=FONT)
    corner = alt.Chart(pd.DataFrame({"text": ["upper left is better"]})).mark_text(
        x=10, y=14, align="left", fontSize=15, fontStyle="italic", color="#666"
    )
    chart = alt.layer(
        corner.encode(text="text:N"),
        curves.encode(**place, order="number:Q"),
        dots.encode(**place),
        texts.encode(**place, text="label:N"),
    )
    chart = chart.properties(width=WIDTH, height=HEIGHT, background="white", padding=14)
    axis = {"labelFontSize": 15, "titleFontSize": FONT, "titleFontWeight": "normal"}
    axis |= {"gridColor": "#e4e4e4", "labelColor": "#444", "titleColor": "#1a1a1a"}
    chart = chart.configure(font=FACES, axis=axis, view={"stroke": None})
    return vl_convert.vegalite_to_svg(chart.to_dict())


def main() -> None:
    """Read the options, run what is missing, write both files and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path, default=Path("runs/readme-picture"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    points = measured(options.study, options.seeds)
    columns = {"setting": "defense", "seeds": "seeds", "y": "test AUC", "sd": "sd"}
    columns |= {"x": "largest leak AUC", "leaks": "leak AUC of each attack"}
    table = points[list(columns)].rename(columns=columns).round(4)
    table.to_csv(ASSETS / "privacy-utility.csv", index=False)
    (ASSETS / "privacy-utility.svg").write_text(drawn(points), encoding="utf-8")
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
