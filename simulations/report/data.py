"""The runs of a folder as DataFrames."""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flower_vfl.errors import ConfigError
from flower_vfl.leakage.meter import FLIPPED, LEAK
from flower_vfl.privacy import Guarantee
from flower_vfl.simulations.capture import CAPTURE_FILE, Arrays, whole
from flower_vfl.simulations.printing import metric_name
from flower_vfl.simulations.results import ALONE, PRIVACY, RUN, load_result, tables
from flower_vfl.simulations.studies import run_metrics
from flower_vfl.simulations.studies.audit import AUDIT, findings
from flower_vfl.simulations.studies.matrix import MATRIX, cells
from flower_vfl.simulations.studies.study import STUDY_FILE, Study
from flower_vfl.simulations.studies.tradeoff import comparison, untrained, verdict

from .charts import Look

SEED, DEFENSE, PLAIN = "seed", "defense", "no defense"
# Settings of the data; runs that differ in them are not compared.
_DATA = ("dataset", "target", "limit", "label_party", "parties", "split", "label_share")
_PARTIES = 4  # parties whose leakage over the steps is shown


@dataclass(frozen=True)
class Report:
    """What a folder holds."""

    title: str
    kind: str
    runs: pd.DataFrame  # those that differ in their seed only share a ``setting``
    records: pd.DataFrame
    documents: Mapping[str, Mapping[str, Any]]
    captures: Mapping[str, Arrays]
    unfinished: Mapping[str, str] = field(default_factory=dict)
    study: Study | None = None
    cells: pd.DataFrame | None = None  # of a matrix, whose settings are its methods

    @cached_property
    def settings(self) -> pd.DataFrame:
        """The first run of each setting."""
        return self.runs.drop_duplicates("setting").set_index("setting")

    def by_setting(self) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yield each setting with its runs."""
        for setting, own in self.runs.groupby("setting", sort=False):
            yield str(setting), own

    @cached_property
    def look(self) -> Look:
        """The looks of the settings; those of one defense share a colour."""
        families = pd.factorize(self.settings["family"])[0]
        place = self.settings.groupby("family").cumcount().to_numpy()
        colours = families if families.max() > 0 else place
        shapes = (families + place).tolist()
        return Look("setting", list(self.settings.index), colours.tolist(), shapes)

    @cached_property
    def utility(self) -> pd.DataFrame:
        """Name and value of each run's main metric at its end."""
        return run_metrics.utilities(self.records)

    @property
    def metric(self) -> str:
        """The main metric of the first run, or an empty text."""
        return run_metrics.main_metric(self.records)

    @property
    def metric_name(self) -> str:
        """The main metric for a reader."""
        return metric_name(self.metric) or "utility"

    @property
    def alone(self) -> float | None:
        """What the label party reaches without the others, if it was measured."""
        known = self.records["metric"].isin(self.utility["metric"])
        own = self.records["value"][known & (self.records["split"] == ALONE)]
        return float(own.mean()) if len(own) else None

    @property
    def evaluations(self) -> pd.DataFrame:
        """The main metric of the runs after each epoch that was evaluated."""
        rows = self.records.query("step > 0 and party == ''")
        return rows[rows["split"] + "_" + rows["metric"] == self.metric]

    @property
    def regression(self) -> bool:
        """Whether the labels are values, not classes."""
        return bool(self.utility["regression"].any())

    @cached_property
    def leaks(self) -> pd.DataFrame:
        """Leak of every run, attack, party and coalition at the cut layer."""
        return run_metrics.leaks(self.records).query("layer == '' and not random")

    @cached_property
    def leak_steps(self) -> pd.DataFrame:
        """Leak of every attack at the cut layer at each step, as in the tables."""
        rows = self.records[self.records["layer"] == ""]
        rows = rows[rows["metric"] == (FLIPPED if self.regression else LEAK)]
        means = rows.groupby([RUN, "attack", "party"])["value"].transform("mean")
        mirrored = means < self.chance  # an attack that is wrong is right when reversed
        value = rows["value"].mask(mirrored, 1.0 - rows["value"])
        return rows.assign(value=value, mirrored=mirrored)

    @cached_property
    def verdict(self) -> list[str]:
        """What the study amounts to, in sentences."""
        labels = () if self.study is None else self.study.varied
        if self.study is None or DEFENSE not in labels or self.cells is not None:
            return []
        if self.kind == AUDIT:
            return list(findings(self.study))
        target = self.study.extra.get("target_leak")
        return list(verdict(comparison(self.study), target))

    @property
    def chance(self) -> float:
        """The leak of an attack that guesses."""
        return 0.0 if self.regression else 0.5

    @property
    def leak_name(self) -> str:
        """What a leak is measured as."""
        return "|ρ|" if self.regression else "leak AUC"

    @property
    def leakiest(self) -> list[str]:
        """The parties and coalitions that learn most, in their own order."""
        most = self.leaks.groupby("party", sort=False)["leak"].max()
        return list(most.index[most.index.isin(most.nlargest(_PARTIES).index)])

    @property
    def varied(self) -> pd.Series[float] | None:
        """The one label of the runs that takes three numbers or more."""
        if self.study is None:
            return None
        labels = self.study.labels().drop(columns=SEED, errors="ignore")
        values = labels.apply(pd.to_numeric, errors="coerce").dropna(axis=1)
        values = values.loc[:, np.isfinite(values).all() & (values.nunique() > 2)]
        return values.iloc[:, 0] if len(values.columns) == 1 else None

    @cached_property
    def largest_leaks(self) -> pd.DataFrame:
        """Leak to the party that learns most, by run and attack."""
        found = run_metrics.largest_leaks(self.records)
        wide = found.pivot(index=RUN, columns="attack", values="leak")
        return wide.reindex(index=self.runs.index, columns=self.attacks)

    @property
    def attacks(self) -> list[str]:
        """Names of the score attacks."""
        return list(dict.fromkeys(self.leaks["attack"]))


def short_party(party: str) -> str:
    """Return the name of a party or of a coalition, not too long."""
    members = party.count("+") + 1
    return party if members < 3 else f"coalition of {members}"


def load_report(folder: Path) -> Report:
    """Read the folder of a study or of a run."""
    try:
        if (folder / STUDY_FILE).is_file():
            return _of_study(folder)
        document = load_result(folder)
        config = document["config"]
        source = Path(config["label_party"]).name or config["dataset"] or "own files"
        title, key = f"{source}: {_method(config)}", folder.name
        found, captures = {key: document}, {key: _capture(folder)}
        return Report(title, "run", *_tables(found, {key: {}}), found, captures)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        wrong = f"'{folder}' is not what flower-vfl writes"
        raise ConfigError(f"{wrong}: {error!r}") from error


def _of_study(folder: Path) -> Report:
    study = Study.load(folder)
    labels = {trial["key"]: trial["labels"] for trial in study.trials}
    unfinished = {}
    for key in labels:
        if Path(key).name != key:  # a study may come from somebody else
            raise ConfigError(f"'{folder}': '{key}' is not the name of a run")
        if key not in study.documents:
            why = study.errors.get(key, {}).get("error", "not run yet")
            unfinished[", ".join(map(str, labels[key].values()))] = str(why)
    documents = {key: study.documents[key] for key in labels if key in study.documents}
    found = cells(study) if study.kind == MATRIX else None
    if not documents or (found is not None and found.empty):
        raise ConfigError(f"no run of '{folder}' is finished yet: nothing to report")
    if found is not None:  # its runs are too many to be shown one by one
        runs = found.drop_duplicates(["dataset", "method", SEED])
        runs = runs.assign(setting=runs["method"], family=runs["method"])
        own = runs, tables({}), documents
        return Report(study.title, study.kind, *own, {}, unfinished, study, found)
    captures = {key: _capture(study.run_folder(key)) for key in documents}
    made = *_tables(documents, labels), documents, captures
    return Report(study.title, study.kind, *made, unfinished, study)


def _tables(
    documents: Mapping[str, Mapping[str, Any]], labels: Mapping[str, Mapping[str, str]]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a row for each run, and everything that the runs have measured."""
    configs = {key: document["config"] for key, document in documents.items()}
    methods = {k: str(labels[k].get(DEFENSE, _method(configs[k]))) for k in configs}
    short = short_names(methods.values())
    rows = {
        key: {
            "setting": _setting(labels[key], short[methods[key]]),
            "family": _family(short[methods[key]]),
            "data": _data(config, list(configs.values())),
            "workers": int(documents[key].get("workers", 1)),
            "promised": Guarantee.from_dict(documents[key].get(PRIVACY)),
        }
        for key, config in configs.items()
    }
    runs = pd.DataFrame.from_dict(rows, orient="index").rename_axis(RUN)
    records = tables(documents)
    runs = runs.assign(
        milliseconds=run_metrics.whole_run(records, "seconds_step") * 1e3,
        kilobytes=run_metrics.whole_run(records, "bytes_step") / 1e3,
        megabytes=run_metrics.whole_run(records, "memory_peak") / 1e6,
        untrained=untrained(records),
    )
    failed = runs["untrained"].ne("").groupby(runs["setting"]).agg(["sum", "size"])
    for setting, (lost, size) in failed[failed["sum"] > 0].iterrows():
        mark = "did not train" if lost == size else f"{lost} of {size} did not train"
        runs = runs.replace({"setting": {setting: f"{setting} ({mark})"}})
    return runs, records.assign(setting=records[RUN].map(runs["setting"]))


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


def _method(config: Mapping[str, Any]) -> str:
    """Return objective and defense of a run."""
    parts = [config["objective"], config["defense"]]
    return " + ".join(p for p in parts if p not in ("", "auto", "none")) or PLAIN


def short_names(methods: Iterable[str]) -> dict[str, str]:
    """Return methods without settings beside them, where their names still differ."""
    plain = {text: re.sub(r"\b(?:objective|preset)=", "", text) for text in methods}
    bare = {t: re.sub(r" \+ [\w-]+=[^\s+]*", "", own) for t, own in plain.items()}
    known = Counter(bare.values())
    return {t: name if known[name] == 1 else plain[t] for t, name in bare.items()}


def _setting(labels: Mapping[str, str], method: str) -> str:
    """Return what runs have in common that differ in their seed only."""
    words = []
    for label, value in labels.items():
        if label == DEFENSE:
            words.append(PLAIN if method in ("", "none") else method)
        elif label != SEED:
            words.append(f"{label.removeprefix(f'{labels.get(DEFENSE)}.')}={value}")
    return ", ".join(words) or method


def _family(defense: str) -> str:
    """Return a defense without its parameters."""
    return PLAIN if defense in ("", "none") else re.sub(r":[^\s|;+]*", "", defense)


def _data(config: Mapping[str, Any], configs: list[Mapping[str, Any]]) -> str:
    """Return the settings of a run's data that not all runs share."""
    differing = [n for n in _DATA if len({str(c.get(n)) for c in configs}) > 1]
    texts = [f"{name}={config.get(name)}" for name in differing]
    return ", ".join(text.removeprefix("dataset=") for text in texts)
