"""What a report is about: the runs of a folder, grouped by what differs."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flower_vfl.errors import ConfigError
from flower_vfl.simulations.capture import CAPTURE_FILE, Arrays, whole
from flower_vfl.simulations.results import load_result
from flower_vfl.simulations.studies.run_metrics import leaks_of, utility_of
from flower_vfl.simulations.studies.study import STUDY_FILE, Study

from .paper import our_figures
from .scene import Style

SEED = "seed"
PLAIN = "no defense"
_NUMBER = (int, float)
# Settings that say what is learned from; runs that differ in them are not compared.
_DATA = ("dataset", "target", "limit", "label_party", "parties", "split", "label_share")


@dataclass(frozen=True)
class ReportRun:
    """One finished run."""

    key: str
    labels: Mapping[str, str]
    document: Mapping[str, Any]
    capture: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only: one line in every chart.

    Parameters
    ----------
    number : int
        Its place among all groups.
    name : str
        What is different about it.
    family : str
        Its defense, without parameters.
    data : str
        What its data is called, if not all groups have the same.
    style : Style
        How it is drawn.
    runs : Sequence[ReportRun]
        Its runs.
    """

    number: int
    name: str
    family: str
    data: str
    style: Style
    runs: Sequence[ReportRun]

    @property
    def capture(self) -> Arrays:
        """What the first run that kept rows has kept."""
        return next((run.capture for run in self.runs if run.capture), {})


@dataclass(frozen=True)
class Report:
    """Everything that is shown."""

    title: str
    kind: str
    groups: Sequence[Group]
    unfinished: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> list[ReportRun]:
        """All runs."""
        return [run for group in self.groups for run in group.runs]

    @property
    def metric(self) -> str:
        """The metric that all runs are judged by."""
        return next(
            (n for n, _ in (utility_of(r.document) for r in self.runs) if n), ""
        )

    @property
    def attacks(self) -> list[str]:
        """Score attacks on what leaves for the parties, without inner layers."""
        names = (name for run in self.runs for name in leaks_of(run.document))
        return [name for name in dict.fromkeys(names) if "@" not in name]

    def leakiest(self, count: int) -> list[str]:
        """Return the parties and coalitions to which most leaks, in their own order."""
        most: dict[str, float] = {}
        for run in self.runs:
            for parties in leaks_of(run.document).values():
                for party, leak in parties.items():
                    if "/" not in party:
                        most[party] = max(most.get(party, 0.0), leak)
        chosen = sorted(most, key=lambda party: -most[party])[:count]
        return [party for party in most if party in chosen]


def load_report(folder: Path) -> Report:
    """Read a folder."""
    try:
        if (folder / STUDY_FILE).is_file():
            return _of_study(folder)
        document = load_result(folder)
        _check(document, folder)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"'{folder}' is not what flower-vfl writes: {error!r}"
        ) from error
    config = document["config"]
    source = Path(config["label_party"]).name or config["dataset"]
    title = f"{source}: {method_of(config)}"
    run = ReportRun(folder.name, {}, document, _capture(folder))
    return Report(title, "run", _grouped([run]))


def _of_study(folder: Path) -> Report:
    study = Study.load(folder)
    runs, unfinished = [], {}
    for trial in study.trials:
        key, labels = trial["key"], trial["labels"]
        if Path(key).name != key:  # a study may come from somebody else
            raise ConfigError(f"'{folder}': '{key}' is not the name of a run")
        where = study.run_folder(key)
        if key in study.documents:
            _check(study.documents[key], where)
            runs.append(ReportRun(key, labels, study.documents[key], _capture(where)))
        else:
            why = study.errors.get(key, {}).get("error", "not run yet")
            unfinished[", ".join(map(str, labels.values()))] = str(why)
    if not runs:
        raise ConfigError(f"no run of '{folder}' is finished yet: nothing to report")
    extra = {"ours": our_figures(study), **study.extra}
    return Report(study.title, study.kind, _grouped(runs), unfinished, extra)


def _check(document: Mapping[str, Any], where: Path) -> None:
    """Refuse a result that has not the parts that are shown."""
    numbers = [document["final"], document["seconds"], *document["epochs"]]
    numbers += [a for party in document["leakage"].values() for a in party.values()]
    lists = [
        values for series in document["series"].values() for values in series.values()
    ]
    fine = isinstance(document["config"], dict) and isinstance(
        document["versions"], dict
    )
    fine &= all(isinstance(v, _NUMBER) for found in numbers for v in found.values())
    fine &= all(isinstance(v, _NUMBER) for values in lists for v in values)
    if not fine:
        raise ConfigError(f"the result in '{where}' holds something else than numbers")


def _capture(folder: Path) -> Arrays:
    path = folder / CAPTURE_FILE
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"'{path}' cannot be read: {error}") from error
    if not whole(arrays):
        raise ConfigError(f"'{path}' is not what flower-vfl writes")
    return arrays


def _grouped(runs: Sequence[ReportRun]) -> list[Group]:
    members: dict[str, list[ReportRun]] = {}
    for run in runs:
        members.setdefault(_name(run), []).append(run)
    families: dict[str, list[str]] = {}
    for name, found in members.items():
        families.setdefault(_family(found[0]), []).append(name)
    groups = []
    for number, (name, found) in enumerate(members.items()):
        family = _family(found[0])
        first, place = list(families).index(family), families[family].index(name)
        # Settings of one defense share its colour where there are several defenses.
        colour = first if len(families) > 1 else place
        style = Style.number(colour, first + place)
        data = _data(found[0], runs)
        groups.append(Group(number, name, family, data, style, found))
    return groups


def _data(run: ReportRun, runs: Sequence[ReportRun]) -> str:
    """Return the settings of a run's data that not all runs share."""
    own, words = run.document["config"], []
    for name in _DATA:
        if len({str(other.document["config"].get(name)) for other in runs}) > 1:
            words.append(
                str(own.get(name)) if name == "dataset" else f"{name}={own.get(name)}"
            )
    return ", ".join(words)


def method_of(config: Mapping[str, Any]) -> str:
    """Return what a run does about leakage, for a reader."""
    objective = "" if config["objective"] == "auto" else config["objective"]
    defense = "" if config["defense"] == "none" else config["defense"]
    return " + ".join(part for part in (objective, defense) if part) or PLAIN


def _name(run: ReportRun) -> str:
    """Return what the runs of a group have in common."""
    words = []
    for label, value in run.labels.items():
        if label == "defense":
            words.append(PLAIN if value in ("", "none") else str(value))
        elif label != SEED:
            method, _, parameter = label.partition(".")
            own = parameter and method == run.labels.get("defense")
            words.append(f"{parameter if own else label}={value}")
    return ", ".join(words) or method_of(run.document["config"])


def _family(run: ReportRun) -> str:
    text = run.labels.get("defense", method_of(run.document["config"]))
    return re.sub(r":[^\s|;+]*", "", str(text)) if text not in ("", "none") else PLAIN
