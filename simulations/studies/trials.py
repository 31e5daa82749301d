"""The runs of a study, here or on Ray; a guess and the label party alone."""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flower_vfl.errors import ConfigError, VerticalError
from flower_vfl.leakage.attacks import registry
from flower_vfl.objectives import Task
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.randomness import RandomState, derive_seed
from flower_vfl.simulations.attacks import check_attacks
from flower_vfl.simulations.config import ABOUT, DATA, FILES, RunConfig, parse_rates
from flower_vfl.simulations.models.registry import build_bottom, build_optimizer
from flower_vfl.simulations.objectives import objective_for
from flower_vfl.simulations.parties import PartyRows, load_rows, make_label
from flower_vfl.simulations.plugins import ADDED, load_plugins, plugin_names
from flower_vfl.simulations.results import FORMAT, GUESS, PARTIES_FOLDER, RESULT_FILE
from flower_vfl.simulations.runtime.engines import run_and_attack
from flower_vfl.specs import parse_spec, split_specs
from flower_vfl.strategies import build_defense
from flower_vfl.strategies.state import interruptible

Files = dict[str, bytes]  # what a run left in its folder beside its result
Outcome = tuple[dict[str, Any], Files] | Exception
_LEFT = (PARTIES_FOLDER, RESULT_FILE)  # not kept with the others
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
# A run without a share of a GPU sees the same devices as one that is not on Ray.
_QUIET |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_OF_DATA = [name for name in ABOUT if ABOUT[name].get("panel") in (DATA, FILES)]
# One model of one party, whatever the run has beside it.
_PLAIN: dict[str, Any] = {"objective": "auto", "aggregation": "mean"}
_PLAIN |= {"label_dp": "", "label_budget": "", "canaries": 0, "label_ledger": ""}
# Settings that say where and how a run is kept and reached, not what it finds.
ELSEWHERE = {"out", "state_dir", "resume", "timeout", "silence", "transport"}
ELSEWHERE |= {"address", "advertise", "insecure"}
ELSEWHERE |= {"certificate", "private_key", "root_certificate"}


@dataclass(frozen=True)
class Trial:
    """One run of a study; `labels` are what differs between the trials."""

    labels: Mapping[str, str]
    config: RunConfig
    engine: str = "in-process"

    @property
    def digest(self) -> str:
        """A short digest of the engine and of the settings that decide the result."""
        # Only what is not the default, so that a new setting leaves old keys alone.
        decisive = {
            f.name: getattr(self.config, f.name)
            for f in fields(RunConfig)
            if f.name not in ELSEWHERE and getattr(self.config, f.name) != f.default
        }
        text = json.dumps([self.engine, decisive], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @property
    def key(self) -> str:
        """Name of the run's folder: its labels and its digest."""
        words = "-".join(f"{name}-{value}" for name, value in self.labels.items())
        slug = re.sub(r"[^\w.]+", "-", words).strip("-.")[:60].strip("-.")
        return f"{slug}-{self.digest}"

    def made(self, document: Mapping[str, Any]) -> bool:
        """Return whether a result is that of this trial."""
        known = {**asdict(RunConfig()), **document.get("config", {})}
        own = asdict(self.config)
        same = all(known[name] == own[name] for name in own.keys() - ELSEWHERE)
        kind = document.get("format"), document.get("engine")
        return same and kind == (FORMAT, self.engine)


def run_trial(config: RunConfig, engine: str) -> tuple[dict[str, Any], Files]:
    """Run once; return the result document and the files beside it."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="flower-vfl-") as folder:
        states = str(Path(folder) / PARTIES_FOLDER)
        placed = replace(config, out=folder, state_dir=states, resume=False)
        transport = "plain" if engine == "flower" else "resident"
        placed = replace(placed, transport=transport)
        try:
            document = run_and_attack(placed, engine) | {GUESS: guess(config)}
        finally:
            torch.set_num_threads(threads)
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(Path(folder).rglob("*"))
            if path.is_file() and path.relative_to(folder).parts[0] not in _LEFT
        }
    return document, files


def outcomes(
    trials: Mapping[str, Trial], workers: int, ray_address: str, gpus: float
) -> Iterator[tuple[str, Outcome]]:
    """Run trials; yield the key of each and what it found, as soon as it ends."""
    if not trials:
        return
    if workers > 1 or ray_address:
        threads = max(trial.config.threads for trial in trials.values())
        with _ray(ray_address, workers * max(1, threads)) as ray:
            yield from _on_ray(ray, trials, workers, gpus)
        return
    for key, trial in trials.items():
        outcome: Outcome
        try:
            outcome = run_trial(trial.config, trial.engine)
        except Exception as error:  # a user's own method can raise anything
            outcome = error
        yield key, outcome


def _on_ray(
    ray: Any, trials: Mapping[str, Trial], workers: int, gpus: float
) -> Iterator[tuple[str, Outcome]]:
    """Keep `workers` tasks going until every trial has ended."""
    # A new process for each run would take longer to start than a small run takes.
    # Ray starts one all the same where runs have GPUs, whose memory it frees so.
    task = ray.remote(max_retries=0, num_gpus=gpus)(_in_worker)
    waiting = list(trials.items())[::-1]
    running: dict[Any, str] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            key, trial = waiting.pop()
            sized = task.options(num_cpus=max(1, trial.config.threads))
            reference = sized.remote(trial.config, trial.engine, plugin_names())
            running[reference] = key
        (ended, *_), _ = ray.wait(list(running), num_returns=1)
        key = running.pop(ended)
        outcome: Outcome
        try:
            outcome = ray.get(ended)
        except ray.exceptions.RayTaskError as error:
            outcome = error.cause if isinstance(error.cause, Exception) else error
        except ray.exceptions.RayError as error:  # its process died
            outcome = error
        yield key, outcome


def _in_worker(config: RunConfig, engine: str, plugins: list[str]) -> Outcome:
    _be_quiet()
    load_plugins(plugins)
    return run_trial(config, engine)


def _be_quiet() -> None:
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


@contextmanager
def _ray(address: str, cpus: int) -> Iterator[Any]:
    """Give Ray; stop it, or leave the cluster, only if it was not there before."""
    try:
        import ray
    except ImportError as error:
        needed = "several workers need Ray: pip install 'flower-vfl[sim]'"
        raise ConfigError(needed) from error
    if ray.is_initialized():
        yield ray
        return
    _be_quiet()
    own: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        own |= {"include_dashboard": False, "num_cpus": cpus}
    try:
        with interruptible():  # Ray crashes if its start is interrupted
            ray.init(address=address or "local", **own)
        yield ray
    finally:
        ray.shutdown()


def task_of(config: RunConfig) -> Task:
    """Return the task of a run's data."""
    task = _rows(config, 0).task
    assert task is not None  # it is the label party's
    return task


def default_attacks(config: RunConfig) -> str:
    """Return the score attacks that fit a run's data: the usual ones and plugins'."""
    task = task_of(config)
    added = ADDED.get("SCORE_ATTACKS", [])
    fitting = [name for name in added if registry.fits(name, task)]
    return ",".join([*registry.DEFAULT_ATTACKS[task], *fitting])


def check_run(config: RunConfig) -> None:
    """Build what a run is made of, and refuse what cannot be built."""
    build_defense(config.defense or "none")
    build_optimizer(config.optimizer)
    parse_rates(config.learning_rate)
    check_attacks(config)
    for text in split_specs(config.attack):
        if parse_spec(text)[0] in registry.SCORE_ATTACKS:
            registry.build_attack(text, task_of(config))
    objective_for(config, _rows(config, 0))
    spec = _rows(config, 1).data.spec
    assert spec is not None  # a passive party without columns was refused
    build_bottom(config.bottom, spec, config.width)


def check_trials(trials: Iterable[Trial]) -> None:
    """Check every run of a study before the first one starts."""
    checked = set()
    for trial in trials:
        config = replace(trial.config, seed=0)  # no seed is wrong
        if config in checked:
            continue
        checked.add(config)
        try:
            check_run(config)
        except VerticalError as error:
            labels = ", ".join(f"{n} {v}" for n, v in trial.labels.items())
            raise ConfigError(f"{labels}: {error}") from error
    _load.cache_clear()  # the runs load what they need themselves


_load = lru_cache(maxsize=2)(load_rows)  # the same data for most runs of a study


def _rows(config: RunConfig, index: int) -> PartyRows:
    return _load(data_of(config), index)


def data_of(config: RunConfig) -> RunConfig:
    """Return a run's settings of its data, the others as they are by default."""
    return RunConfig(**{name: getattr(config, name) for name in _OF_DATA})


def guess(config: RunConfig) -> float:
    """Return the main metric of a guess: 0.5, 0, or the share of the largest class."""
    return _guess(data_of(config))


@lru_cache(maxsize=8)
def _guess(config: RunConfig) -> float:
    rows = load_rows(config, 0)
    if rows.task != "multiclass" or rows.labels is None:
        return 0.5 if rows.task == "binary" else 0.0
    return max(Counter(rows.labels.tolist()).values()) / len(rows.labels)


def train_alone(config: RunConfig, epochs: int, split: str) -> Mapping[str, float]:
    """Return the metrics of a model of the label party's own columns, {} without any.

    All else is as in the run, but where ids are aligned the party splits its own rows.
    """
    plain = replace(config, **_PLAIN)
    rows = load_rows(plain, 0)
    if not rows.data.inputs:
        return {}
    seed = derive_seed(config.seed, "model", "label")  # as the run's
    with RandomState(seed, torch.device("cpu")):
        party = make_label(plain, rows, trust_server=True)
    party.describe(b"")
    rates = parse_rates(config.learning_rate)
    rate = rates.get("label") if isinstance(rates, dict) else rates
    given = config.seed, config.batch_size, 8192
    fractions = config.test_fraction, config.valid_fraction
    party.configure(TrainingConfig(*given, *fractions, {}, "mean", rate or 0.0))
    step, schedule = 0, party.configured()
    for epoch in range(1, epochs + 1):
        for index in range(schedule.batches("train", training=True)):
            step += 1
            party.train_step(step, epoch, index, {})
    found: dict[str, float] = {}
    for index in range(schedule.batches(split)):
        found = party.evaluate(split, index, {})
    return found
