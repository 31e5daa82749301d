"""A progress bar for training."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class TrainingProgress:
    """Shows epoch, loss, metric and steps per second while training runs.

    Parameters
    ----------
    epochs : int
        Number of epochs.
    steps : int
        Steps of an epoch.
    start : int
        Steps that were done before.
    shown : bool | None
        None shows the bar on a terminal only.
    """

    def __init__(self, epochs: int, steps: int, start: int, shown: bool | None) -> None:
        console = Console(stderr=True)
        visible = console.is_terminal if shown is None else shown
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[metric]}"),
            console=console,
            disable=not visible,
            transient=True,
        )
        self._task = self._bar.add_task(
            "training",
            total=epochs * steps,
            completed=start,
            epoch=start // steps + 1,
            epochs=epochs,
            speed="",
            loss="-",
            metric="",
        )

    def __enter__(self) -> TrainingProgress:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self._bar.stop()

    def stepped(self, step: int, epoch: int, loss: float) -> None:
        """Show that a step is done.

        Parameters
        ----------
        step : int
            Completed steps.
        epoch : int
            The epoch of the step.
        loss : float
            Its loss.
        """
        if self._bar.disable:
            return
        speed = self._bar.tasks[0].speed
        self._bar.update(
            self._task,
            completed=step,
            epoch=epoch,
            loss=f"{loss:.4f}",
            speed=f"{speed:.0f} steps/s" if speed else "",
        )

    def evaluated(self, name: str, value: float) -> None:
        """Show the newest metric.

        Parameters
        ----------
        name : str
            Its name.
        value : float
            Its value.
        """
        self._bar.update(self._task, metric=f"{name} {value:.4f}")
