"""Training metrics in TensorBoard and MLflow, while a run goes on.

A tracker is told about every step and every epoch. One that fails is left out from then
on, with a line in the log: a full disk of a tracking server is no reason to lose a run.
"""

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

_NOT_IN_MLFLOW = re.compile(r"[^\w\-. /:]")
_LONGEST_VALUE = 6000  # characters of a parameter that MLflow keeps
_BATCH = 1000  # metrics that MLflow takes at once


class Tracker(Protocol):
    """Something that is told what a run measures."""

    def begin(self, settings: Mapping[str, Any], step: int) -> None:
        """Get ready."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in what one step measured.

        Parameters
        ----------
        step : int
            The step, from 1.
        metrics : Mapping[str, float]
            ``"loss"``, ``"leak_norm/passive-1"`` and so on.
        """

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Take in what an epoch came to.

        Parameters
        ----------
        epoch : int
            The epoch, from 1.
        step : int
            Its last step.
        metrics : Mapping[str, float]
            Means over its steps and, after an evaluation, ``"test_auc"`` and so on.
        """

    def end(self, reason: str) -> None:
        """Write what is left."""


class TensorBoard:
    """Write event files for TensorBoard; needs the package ``tensorboard``.

    Parameters
    ----------
    folder : str (default: "")
        Where, which has to be given; show it with ``tensorboard --logdir FOLDER``.
    """

    def __init__(self, folder: str = "") -> None:
        if not folder:
            raise ConfigError(
                "a folder is needed for TensorBoard's files: tensorboard:folder=PATH, "
                "or give the run an --out folder"
            )
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "TensorBoard is not installed: pip install 'flower-vfl[track]'"
            ) from error
        self.folder = Path(folder)
        self._make: type[SummaryWriter] = SummaryWriter
        self._writer: SummaryWriter | None = None

    def begin(self, settings: Mapping[str, Any], step: int) -> None:
        """Open an event file; what an earlier run wrote after `step` is hidden."""
        purge = step + 1 if step else None
        self._writer = self._make(str(self.folder), purge_step=purge)
        rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in settings.items()]
        table = "\n".join(["| setting | value |", "|---|---|", *rows])
        self._writer.add_text("settings", table, step)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write what one step measured, under ``step/``."""
        self._write("step", step, metrics)

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Write what an epoch came to, under ``epoch/``, by epoch."""
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

    What steps measure is sent at the end of every epoch. MLflow takes fewer characters
    than a metric's name may have: ``+`` and ``@`` become ``-``.

    Parameters
    ----------
    uri : str (default: "")
        Tracking server, database or folder; empty takes MLflow's own setting.
    experiment : str (default: "flower-vfl")
        Name of the experiment; made if there is none.
    name : str (default: "")
        Name of the run; empty lets MLflow choose one.
    """

    def __init__(
        self, uri: str = "", experiment: str = "flower-vfl", name: str = ""
    ) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise ConfigError(
                "MLflow is not installed: pip install mlflow-skinny, or mlflow"
            ) from error
        self._client = MlflowClient(uri or None)
        self.experiment = experiment
        self.name = name
        self.run_id = ""
        self._waiting: list[Metric] = []

    def begin(self, settings: Mapping[str, Any], step: int) -> None:
        """Start a run of MLflow and log the settings."""
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(self.experiment)
        experiment = (
            found.experiment_id
            if found is not None
            else self._client.create_experiment(self.experiment)
        )
        run = self._client.create_run(experiment, run_name=self.name or None)
        self.run_id = run.info.run_id
        params = [Param(k, str(v)[:_LONGEST_VALUE]) for k, v in settings.items()]
        for start in range(0, len(params), 100):
            self._client.log_batch(self.run_id, params=params[start : start + 100])

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep what one step measured for the end of the epoch."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [
            Metric(_NOT_IN_MLFLOW.sub("-", name), value, now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Send what has come together, the epoch under ``epoch/``."""
        self.step(step, {f"epoch/{name}": value for name, value in metrics.items()})
        self._send()

    def _send(self) -> None:
        while self._waiting:
            part, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
            self._client.log_batch(self.run_id, metrics=part)

    def end(self, reason: str) -> None:
        """Send the rest and finish the run."""
        self._send()
        if reason:
            self._client.set_tag(self.run_id, "stopped", reason)
        self._client.set_terminated(self.run_id)


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
}


def build_tracker(spec: str) -> Tracker:
    """Return a tracker by name.

    Parameters
    ----------
    spec : str
        ``"tensorboard:folder=runs/board"`` or ``"mlflow:uri=sqlite:///runs.db"``.
    """
    return build_from_spec("tracker", spec, TRACKERS)


class Trackers:
    """Several trackers; one that fails is left out from then on."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    @contextmanager
    def telling(self, training: Training) -> Iterator[None]:
        """Tell all that the run begins and, at the end, that it is over."""
        step, settings = training.state.step, settings_of(training.strategy)
        self._tell(lambda tracker: tracker.begin(settings, step))
        reason = "an error or an interruption"
        try:
            yield
            reason = training.state.reason
        finally:
            self._tell(lambda tracker: tracker.end(reason))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell all about a step."""
        self._tell(lambda tracker: tracker.step(step, metrics))

    def epoch(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Tell all about an epoch."""
        self._tell(lambda tracker: tracker.epoch(epoch, step, metrics))

    def _tell(self, tell: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                tell(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                log(WARNING, "%s is left out from here on: %s", name, error)


def settings_of(strategy: VerticalStrategy) -> dict[str, str]:
    """Return the settings of a strategy as text."""
    known = {
        name: value
        for name, value in vars(strategy).items()
        if not name.startswith("_") and name not in ("defense", "trackers", "notes")
    }
    try:
        known["defense"] = strategy.defense.spec
    except ConfigError:  # a transform that was not built from a config string
        names = (type(each).__name__ for each in strategy.defense.transforms)
        known["defense"] = " | ".join(names)
    known |= strategy.notes
    return {name: str(value) for name, value in known.items()}


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
