"""Where a run is, and a Ctrl-C that waits for the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from flower_vfl.leakage.auc import summarise
from flower_vfl.leakage.monitor import FLIPPED, LEAK, LIMIT, MEMBER

Series = dict[str, list[Any]]  # "steps" and "values", of equal length


@dataclass
class RunState:
    """Where a run is and what it has measured; kept with every checkpoint."""

    step: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    defense_seconds: float = 0.0
    traffic: int = 0
    batch_rows: float = 0.0
    series: dict[str, Series] = field(default_factory=dict)
    train: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluate: dict[int, dict[str, float]] = field(default_factory=dict)
    best: float | None = None
    stale: int = 0
    stopped: bool = False
    reason: str = ""

    def add(self, metrics: Mapping[str, float], rows: float) -> None:
        """Take in what a step reports; the step itself is already counted."""
        self._sum(metrics, rows, self.step)
        self.batch_rows = rows

    def add_late(self, metrics: Mapping[str, float]) -> None:
        """Take in what the step before the last one measured."""
        self._sum(metrics, self.batch_rows, self.step - 1)

    def _sum(self, metrics: Mapping[str, float], rows: float, step: int) -> None:
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * rows
            self.rows[name] = self.rows.get(name, 0.0) + rows
            if "/" in name:
                self.trace(name, step, value)

    def trace(self, name: str, step: int, value: float) -> None:
        """Take in one value of a series."""
        series = self.series.setdefault(name, {"steps": [], "values": []})
        series["steps"].append(step)
        series["values"].append(value)

    def close_epoch(self, epoch: int, steps: int) -> None:
        """Average over the steps of an epoch and begin the next."""
        averages = {name: total / self.rows[name] for name, total in self.sums.items()}
        cost = {"seconds": self.seconds, "steps": steps, "bytes": self.traffic}
        if self.defense_seconds:
            cost["defense_seconds"] = self.defense_seconds
        self.train[epoch] = {**averages, **cost}
        self.sums, self.rows, self.seconds, self.traffic = {}, {}, 0.0, 0
        self.defense_seconds = 0.0


@dataclass
class VerticalResult(Result):
    """Flower's result, and what was measured step by step.

    Parameters
    ----------
    series : dict[str, Series] (default: {})
        By ``metric/party``: ``{"steps": [1, 2, ...], "values": [0.6, 0.7, ...]}``.
    stopped : str (default: "")
        Why the run ended before its last epoch; empty if it did not.
    """

    series: dict[str, Series] = field(default_factory=dict)
    stopped: str = ""

    def leakage(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return what score attacks found, by party and attack.

        Keys are ``mean``, ``last``, ``max`` and ``q95`` over the batches, the same with
        ``flipped_`` in front, and ``batches``. An attack on a layer of a bottom model
        is called ``attack@layer``.
        """
        found: dict[str, dict[str, dict[str, float]]] = {}
        for name, series in self.series.items():
            metric, _, party = name.partition("/")
            for kind, mark in ((FLIPPED, "flipped_"), (LEAK, "")):
                if metric == LIMIT or not metric.startswith(f"{kind}_"):
                    continue
                attack = metric.removeprefix(f"{kind}_")
                numbers = summarise(series["values"])
                entry = found.setdefault(party, {}).setdefault(attack, {})
                entry |= {f"{mark}{key}": value for key, value in numbers.items()}
                entry["batches"] = len(series["values"])
                break  # the names of flipped series begin like those of raw ones
        return found

    def membership(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return how well synthetic rows were told from real ones, by party and attack.

        ``spectral`` is what the party could tell from its gradients about the label
        party's rows, ``embedding`` what the label party could tell about the party's;
        the same with ``_sides`` for the attack that looks at sides of the mean. Keys
        are ``mean``, ``last``, ``max`` and ``q95`` over the batches, and ``batches``.
        """
        found: dict[str, dict[str, dict[str, float]]] = {}
        for name, series in self.series.items():
            metric, _, party = name.partition("/")
            if metric.startswith(MEMBER):
                attack = metric.removeprefix(MEMBER)
                values = series["values"]
                numbers = {**summarise(values), "batches": len(values)}
                found.setdefault(party, {})[attack] = numbers
        return found

    @classmethod
    def of(cls, state: RunState) -> VerticalResult:
        """Return the result of a run."""
        result = cls(series=state.series, stopped=state.reason)
        for epoch, metrics in state.train.items():
            result.train_metrics_clientapp[epoch] = MetricRecord(dict(metrics))
        for epoch, metrics in state.evaluate.items():
            result.evaluate_metrics_clientapp[epoch] = MetricRecord(dict(metrics))
        return result


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, so that a run ends between two steps."""
    hit = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield hit.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        if hit.is_set():
            raise KeyboardInterrupt
        hit.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield hit.is_set
    finally:
        signal.signal(signal.SIGINT, before)
