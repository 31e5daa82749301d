"""A study: a folder of runs that differ in a few settings, and a table of them all.

The folder holds ``study.json`` (what was to be run), ``runs/<key>/result.json`` (what
each run found) and ``results.csv`` (one row for each finished run). A run that has a
result is not repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from flower_vfl.errors import ConfigError, PartyError, check_name
from flower_vfl.simulations import results
from flower_vfl.simulations.results import RESULT_FILE, RUN, read_json, write_whole
from flower_vfl.simulations.runtime.engines import ENGINES
from flower_vfl.strategies.progress import StudyProgress
from flower_vfl.strategies.state import interruptible

from .run_metrics import run_columns
from .tradeoff import untrained
from .trials import ELSEWHERE, Outcome, Trial, outcomes

STUDY_FILE, RUNS_FOLDER = "study.json", "runs"
TABLES = {"csv": "results.csv", "parquet": "results.parquet"}


@dataclass
class Study:
    """The runs of a folder."""

    folder: Path
    kind: str
    title: str
    extra: dict[str, Any] = field(default_factory=dict)
    trials: list[dict[str, Any]] = field(default_factory=list)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Study:
        """Read a study, with what is finished of it."""
        known = read_json(folder / STUDY_FILE)
        if known is None:
            wrong = f"'{folder}' has no {STUDY_FILE}"
            raise ConfigError(f"{wrong}; give the --out folder of a study")
        results.check_format(known, folder / STUDY_FILE)
        study = cls(folder, known["kind"], known["title"], known["extra"])
        study.trials, study.errors = known["trials"], known.get("errors", {})
        for trial in study.trials:
            path = study.run_folder(trial["key"]) / RESULT_FILE
            if (document := read_json(path)) is not None:
                results.check_format(document, path)
                study.documents[trial["key"]] = document
        return study

    @property
    def varied(self) -> list[str]:
        """Names of the labels."""
        return list(dict.fromkeys(name for t in self.trials for name in t["labels"]))

    def run_folder(self, key: str) -> Path:
        """Return the folder of one run."""
        return self.folder / RUNS_FOLDER / key

    def save(self) -> None:
        """Write ``study.json``, whole or not at all."""
        names = ("kind", "title", "varied", "trials", "errors", "extra")
        known = {"format": results.FORMAT} | {n: getattr(self, n) for n in names}
        write_whole(self.folder / STUDY_FILE, json.dumps(known, indent=2).encode())

    def records(self) -> pd.DataFrame:
        """Return what all finished runs measured, as one table of records."""
        return results.tables({key: self.documents[key] for key in self.finished})

    @property
    def finished(self) -> list[str]:
        """Keys of the trials that have a result, in the order of the trials."""
        return [t["key"] for t in self.trials if t["key"] in self.documents]

    def labels(self) -> pd.DataFrame:
        """Return the labels of all trials as texts, one row for each key."""
        keys = pd.Index([trial["key"] for trial in self.trials], name=RUN)
        return pd.DataFrame([t["labels"] for t in self.trials], keys, dtype=str)

    def frame(self) -> pd.DataFrame:
        """Return a row for each finished trial: labels, other settings, results."""
        if not (keys := self.finished):
            return pd.DataFrame()
        documents, records = [self.documents[key] for key in keys], self.records()
        labels = self.labels().loc[keys].apply(_numbers)
        settings = pd.DataFrame([d["config"] for d in documents], keys, dtype=object)
        settings = settings.drop(columns={*ELSEWHERE, *self.varied}, errors="ignore")
        differing = settings.columns[settings.astype(str).nunique() > 1]
        versions = pd.DataFrame([d["versions"] for d in documents], keys)
        parts = [
            labels,
            settings[differing].infer_objects(),
            pd.DataFrame({"engine": [d["engine"] for d in documents]}, keys),
            run_columns(records).loc[keys],
            untrained(records).rename("did_not_train"),
            pd.DataFrame({"workers": [d.get("workers", 1) for d in documents]}, keys),
            versions.add_prefix("version_"),
        ]
        return pd.concat(parts, axis=1).rename_axis("key").reset_index()

    def write_table(self, format: str = "csv") -> Path:
        """Write the frame beside ``study.json`` and return its path."""
        check_name("format", format, TABLES)
        path = self.folder / TABLES[format]
        part = path.with_name(f".{path.name}.{os.getpid()}")
        frame = self.frame()
        write = frame.to_csv if format == "csv" else frame.to_parquet
        write(part, index=False)
        part.replace(path)
        return path


def run_study(
    folder: Path,
    kind: str,
    title: str,
    trials: Sequence[Trial],
    *,
    workers: int = 1,
    ray_address: str = "",
    gpus: float = 0.0,
    bar: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> Study:
    """Run what is not finished yet of a study, and return all of it.

    The error of one trial does not end the others; it is kept in `Study.errors`, and
    the trial is tried again the next time.
    """
    _check(trials, workers, workers > 1 or bool(ray_address), gpus)
    unique = {trial.key: trial for trial in trials}
    study = Study(folder, kind, title, dict(extra or {}))
    _begin(study, unique)
    waiting = {k: t for k, t in unique.items() if k not in study.documents}
    progress = StudyProgress(title, len(unique), len(study.documents), bar)
    try:
        with progress, interruptible(at_once=True) as interrupted:
            for key, outcome in outcomes(waiting, workers, ray_address, gpus):
                _keep(study, key, outcome, workers)
                progress.ended()
                if interrupted():
                    break
    except KeyboardInterrupt:
        kept = f"{len(study.documents)} of {len(unique)} runs are finished in {folder}"
        raise KeyboardInterrupt(kept, "run the same command to continue") from None
    finally:
        study.save()
        study.write_table()
    return study


def _check(trials: Sequence[Trial], workers: int, on_ray: bool, gpus: float) -> None:
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}")
    if gpus < 0 or (gpus and not on_ray):
        remedy = "give --workers or --ray-address too"
        raise ConfigError(f"gpus is a share of a run on Ray, got {gpus:g}; {remedy}")
    if not trials:
        raise ConfigError("a study needs at least one run")
    for trial in trials:
        check_name("engine", trial.engine, ENGINES)
        if trial.engine not in ("in-process", "stacked") and on_ray:
            engine = f"the engine '{trial.engine}'"
            raise ConfigError(f"{engine} starts Ray itself; use --workers 1")


def _begin(study: Study, trials: Mapping[str, Trial]) -> None:
    """Write down what is to be run, and find what is finished already."""
    check_folder(study.folder, study.kind)
    study.folder.mkdir(parents=True, exist_ok=True)
    study.trials = [
        {"key": key, "digest": trial.digest, "labels": dict(trial.labels)}
        for key, trial in trials.items()
    ]
    for key, trial in trials.items():
        document = read_json(study.run_folder(key) / RESULT_FILE)
        if document is not None and trial.made(document):
            study.documents[key] = document
    study.save()


def check_folder(folder: Path, kind: str) -> None:
    """Refuse a folder that holds a study of another kind, or a run."""
    before = read_json(folder / STUDY_FILE)
    found = before.get("kind") if before is not None else kind
    if found != kind or (folder / RESULT_FILE).exists():
        what = "a run" if found == kind else f"a study of another kind, {found}"
        raise ConfigError(f"'{folder}' holds {what}; choose another --out")


def _keep(study: Study, key: str, outcome: Outcome, workers: int) -> None:
    """Write what a run left behind; its result last, which makes it a finished one."""
    if isinstance(outcome, Exception):
        study.errors[key] = _described(outcome)
        return
    document, files = outcome
    document["workers"] = workers
    document["config"] |= {"out": "", "state_dir": ""}  # the folder may be moved
    for name, content in files.items():
        write_whole(study.run_folder(key) / name, content)
    results.save_result(document, study.run_folder(key))
    study.documents[key] = document


def _described(error: Exception) -> dict[str, Any]:
    if isinstance(error, PartyError):
        where = {"party": error.party, "step": error.step, "remedy": error.remedy}
        return {"error": str(error), **where}
    name = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return {"error": f"{name}{error}"}


def _numbers(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return a column of numbers as such, any other as it is."""
    try:
        return pd.to_numeric(column)
    except (ValueError, TypeError):
        return column
