"""Progress bars for training, for the alignment before it, and for many runs."""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

from rich import progress
from rich.console import Console
from rich.progress import ProgressColumn

# What is told each step of a training in this thread: steps, of how many, epoch.
_watching: ContextVar[Callable[[int, float, int], None] | None]
_watching = ContextVar("watching", default=None)


class _Progress(progress.Progress):
    """A bar on standard error, by default only on a terminal."""

    def __init__(self, shown: bool | None, *columns: str | ProgressColumn) -> None:
        console = Console(stderr=True)
        hidden = not (console.is_terminal if shown is None else shown)
        super().__init__(*columns, console=console, disable=hidden, transient=True)


class TrainingProgress(_Progress):
    """A bar with epoch, loss, metric, steps per second and the time left."""

    def __init__(self, epochs: int, steps: int, start: int, shown: bool | None) -> None:
        super().__init__(
            shown,
            "epoch {task.fields[epoch]}/{task.fields[epochs]}",
            progress.BarColumn(bar_width=12),
            progress.MofNCompleteColumn(),
            "{task.fields[speed]}",
            progress.TimeRemainingColumn(),
            "loss {task.fields[loss]}",
            "{task.fields[metric]}",
        )
        self._tell = _watching.get()
        self.shown = not self.disable or self._tell is not None  # is told of steps
        fields: dict[str, Any] = {"completed": start, "epoch": start // steps + 1}
        fields |= {"epochs": epochs, "loss": "-", "speed": "", "metric": ""}
        self._task = self.add_task("", total=epochs * steps, **fields)

    def stepped(self, step: int, epoch: int, loss: float) -> None:
        """Show a finished step."""
        if self._tell is not None:
            self._tell(step, self.tasks[0].total or 1.0, epoch)
        speed = f"{self.tasks[0].speed:.0f} steps/s" if self.tasks[0].speed else ""
        told: dict[str, Any] = {"epoch": epoch, "loss": f"{loss:.4f}", "speed": speed}
        self.update(self._task, completed=step, **told)

    def evaluated(self, name: str, value: float) -> None:
        """Show the newest metric."""
        self.update(self._task, metric=f"{name} {value:.4f}")


class AlignmentProgress(_Progress):
    """A bar over the exponentiations that all parties compute."""

    def __init__(self, counts: Iterable[int], method: str, shown: bool | None) -> None:
        self._counts = list(counts)
        self._most = min(self._counts) if method == "psi" else sum(self._counts)
        self._done: dict[str, int] = {}
        super().__init__(
            shown,
            "aligning ids",
            progress.BarColumn(bar_width=24),
            "{task.completed:.0f}/{task.total:.0f} exponentiations",
            progress.TimeRemainingColumn(),
        )
        self._task = self.add_task("aligning", total=self.total(None))

    def total(self, merged: int | None) -> int:
        """Return the number of exponentiations of all parties, or an upper bound."""
        parties, ids = len(self._counts), sum(self._counts)
        last = self._most if merged is None else merged
        second = ids if parties > 2 else 0  # lists of their own for the blinded ids
        return 2 * parties * ids + second + parties * last

    def done(self, party: str, exponentiations: int, merged: int | None) -> None:
        """Show a party's progress."""
        self._done[party] = exponentiations
        total = self.total(merged)
        self.update(self._task, completed=sum(self._done.values()), total=total)


class StudyProgress(_Progress):
    """A bar over many runs with the time left, and one over the run under way."""

    def __init__(self, title: str, runs: int, ended: int, shown: bool) -> None:
        super().__init__(
            None if shown else False,
            "{task.description}",
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
        )
        self.speed_estimate_period = 600.0
        self._ended = ended
        self._runs = self.add_task(title, total=runs, completed=ended)
        self._run = self.add_task("", visible=False)

    def start(self) -> None:
        """Show the bars, and be told of the steps of runs in this thread."""
        _watching.set(None if self.disable else self._stepped)
        super().start()

    def stop(self) -> None:
        """Remove the bars."""
        _watching.set(None)
        super().stop()

    def _stepped(self, step: int, steps: float, epoch: int) -> None:
        self.update(self._runs, completed=self._ended + step / steps)
        self.update(self._run, description=f"epoch {epoch}", visible=True)
        self.update(self._run, completed=step, total=steps)

    def ended(self) -> None:
        """Show that a run has ended."""
        self._ended += 1
        self.update(self._runs, completed=self._ended)
        self.reset(self._run, visible=False)
