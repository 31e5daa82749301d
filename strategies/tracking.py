"""Training metrics in TensorBoard and MLflow during a run."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flwr.supercore import log

from flower_vfl.errors import ConfigError
from flower_vfl.specs import build_from_spec

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from torch.utils.tensorboard import SummaryWriter

    from .training import Training
    from .vertical import VerticalStrategy

# What MLflow takes: characters of names and of a value, metrics and parameters at once.
_NOT_IN_MLFLOW, _LONGEST_VALUE = re.compile(r"[^\w\-. /:]"), 6000
_METRICS, _PARAMETERS = 1000, 100


class Tracker(Protocol):
    """Interface of a tracker: it receives the metrics of a run.

    Examples
    --------
    >>> from flower_vfl.strategies import Tracker, VerticalStrategy
    >>> class Printer:
    ...     def begin(self, settings, step): ...
    ...     def step(self, step, metrics): ...
    ...     def epoch(self, epoch, step, metrics):
    ...         print(f"epoch {epoch}: loss {metrics['loss']:.2f}")
    ...     def end(self, reason): ...
    >>> tracker: Tracker = Printer()
    >>> strategy = VerticalStrategy(trackers=[tracker])
    """

    def begin(self, settings: Mapping[str, Any], step: int) -> None:
        """Start with the settings of a run and the step at which it starts."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive ``"loss"``, ``"leak_norm/passive-1"`` and so on of a step, from 1."""

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Receive means over an epoch, from 1, or ``"test_auc"`` and so on after it."""

    def end(self, reason: str) -> None:
        """Finish; the reason is empty unless the run stopped early."""


class TensorBoard:
    """Write event files for TensorBoard; needs the package ``tensorboard``.

    Parameters
    ----------
    folder : str
        Folder of the event files; show them with ``tensorboard --logdir FOLDER``.

    Examples
    --------
    >>> from flower_vfl.strategies import TensorBoard, VerticalStrategy
    >>> strategy = VerticalStrategy(trackers=[TensorBoard("runs/board")])
    """

    def __init__(self, folder: str = "") -> None:
        if not folder:
            remedy = "set tensorboard:folder=PATH, or give the run an --out folder"
            raise ConfigError(f"a folder is needed for TensorBoard's files: {remedy}")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            remedy = "pip install 'flower-vfl[track]'"
            raise ConfigError(f"TensorBoard is not installed: {remedy}") from error
        self.folder, self._make = Path(folder), SummaryWriter
        self._writer: SummaryWriter | None = None

    def begin(self, settings: Mapping[str, Any], step: int) -> None:
        """Open an event file and hide later steps of an earlier run."""
        purge = step + 1 if step else None
        self._writer = self._make(str(self.folder), purge_step=purge)
        cells = {"setting": "value", "---": "---", **settings}.items()
        rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in cells]
        self._writer.add_text("settings", "\n".join(rows), step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step under ``step/``."""
        self._write("step", step, metrics)

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an epoch under ``epoch/``."""
        self._write("epoch", epoch, metrics)
        if self._writer is not None:
            self._writer.flush()

    def _write(self, kind: str, number: int, metrics: Mapping[str, float]) -> None:
        assert self._writer is not None  # after begin
        for name, value in metrics.items():
            self._writer.add_scalar(f"{kind}/{name}", value, number)

    def end(self, reason: str) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class Mlflow:
    """Log to MLflow; needs the package ``mlflow`` or ``mlflow-skinny``.

    Metrics are sent after every epoch. Characters that MLflow does not allow in names,
    such as ``+`` and ``@``, become ``-``.

    Parameters
    ----------
    uri : str (default: "")
        Tracking server, database or folder; empty uses MLflow's own setting.
    experiment : str (default: "flower-vfl")
        Name of the experiment, created if needed.
    name : str (default: "")
        Name of the run; empty: dataset, method and seed.

    Examples
    --------
    >>> from flower_vfl.strategies import Mlflow
    >>> Mlflow("http://localhost:5000", experiment="leakage").experiment
    'leakage'
    """

    def __init__(
        self, uri: str = "", experiment: str = "flower-vfl", name: str = ""
    ) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            remedy = "pip install mlflow-skinny, or mlflow"
            raise ConfigError(f"MLflow is not installed: {remedy}") from error
        self._client = MlflowClient(uri or None)
        self.experiment, self.name, self.run_id = experiment, name, ""
        self._waiting: list[Metric] = []

    def begin(self, settings: Mapping[str, Any], step: int) -> None:
        """Create a run and log the settings."""
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(self.experiment)
        number = found.experiment_id if found else None
        number = number or self._client.create_experiment(self.experiment)
        name = self.name or _run_name(settings)
        self.run_id = self._client.create_run(number, run_name=name).info.run_id
        params = [Param(k, str(v)[:_LONGEST_VALUE]) for k, v in settings.items()]
        for start in range(0, len(params), _PARAMETERS):
            part = params[start : start + _PARAMETERS]
            self._client.log_batch(self.run_id, params=part)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Collect the metrics of a step until the end of the epoch."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [
            Metric(_NOT_IN_MLFLOW.sub("-", name), value, now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Send all collected metrics, those of the epoch under ``epoch/``."""
        self.step(step, {f"epoch/{name}": value for name, value in metrics.items()})
        self._send()

    def _send(self) -> None:
        while self._waiting:
            part, self._waiting = self._waiting[:_METRICS], self._waiting[_METRICS:]
            self._client.log_batch(self.run_id, metrics=part)

    def end(self, reason: str) -> None:
        """Send the rest and finish the run."""
        self._send()
        if reason:
            self._client.set_tag(self.run_id, "stopped", reason)
        self._client.set_terminated(self.run_id)


TRACKERS: dict[str, Callable[..., Tracker]]
TRACKERS = {"tensorboard": TensorBoard, "mlflow": Mlflow}


def build_tracker(spec: str) -> Tracker:
    """Build the tracker that a config string names.

    Parameters
    ----------
    spec : str
        ``"tensorboard:folder=runs/board"`` or ``"mlflow:uri=sqlite:///runs.db"``.

    Examples
    --------
    >>> from flower_vfl.strategies import build_tracker
    >>> build_tracker("tensorboard:folder=runs/board").folder.as_posix()
    'runs/board'
    """
    return build_from_spec("tracker", spec, TRACKERS)


class Trackers:
    """Several trackers; one that fails is removed, so that it does not end a run."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    @contextmanager
    def telling(self, training: Training) -> Iterator[None]:
        """Start all trackers before a run and end them after it."""
        self.tell("begin", _settings_of(training.strategy), training.state.step)
        reason = "an error or an interruption"
        try:
            yield
            reason = training.state.reason
        finally:
            self.tell("end", reason)

    def tell(self, method: str, *given: object) -> None:
        """Call a method of all trackers."""
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*given)
            except Exception as error:
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                log(WARNING, "%s failed and receives no more metrics: %s", name, error)


def _settings_of(strategy: VerticalStrategy) -> dict[str, str]:
    """Return the settings of a strategy as text."""
    left_out = ("_training", "defense", "trackers", "notes")
    known = {k: v for k, v in vars(strategy).items() if k not in left_out}
    known |= {"defense": strategy.defense.name, **strategy.notes}
    return {name: str(value) for name, value in known.items()}


def _run_name(settings: Mapping[str, Any]) -> str:
    """Return dataset, method and seed of a run, as far as they are known."""
    data = Path(settings.get("label-party", "")).stem or settings.get("dataset")
    methods = [settings.get(name, "") for name in ("objective", "defense")]
    method = " + ".join(m for m in methods if m not in ("", "auto", "none"))
    seed = f"seed {settings['seed']}" if "seed" in settings else ""
    return ", ".join(part for part in (data, method or "no defense", seed) if part)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
