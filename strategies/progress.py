"""Progress bars for training and for the alignment before it."""

from collections.abc import Iterable

from rich import progress
from rich.console import Console


class TrainingProgress(progress.Progress):
    """A bar with epoch, loss, metric and steps per second."""

    def __init__(self, epochs: int, steps: int, start: int, shown: bool | None) -> None:
        console = Console(stderr=True)
        self.shown = visible = console.is_terminal if shown is None else shown
        super().__init__(
            progress.TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[speed]}"),
            progress.TextColumn("loss {task.fields[loss]}"),
            progress.TextColumn("{task.fields[metric]}"),
            console=console,
            disable=not visible,
            transient=True,
        )
        self._task = self.add_task(
            "training",
            total=epochs * steps,
            completed=start,
            epoch=start // steps + 1,
            epochs=epochs,
            speed="",
            loss="-",
            metric="",
        )

    def stepped(self, step: int, epoch: int, loss: float) -> None:
        """Show a finished step."""
        speed = self.tasks[0].speed
        self.update(
            self._task,
            completed=step,
            epoch=epoch,
            loss=f"{loss:.4f}",
            speed=f"{speed:.0f} steps/s" if speed else "",
        )

    def evaluated(self, name: str, value: float) -> None:
        """Show the newest metric."""
        self.update(self._task, metric=f"{name} {value:.4f}")


class AlignmentProgress(progress.Progress):
    """A bar over the exponentiations that all parties compute."""

    def __init__(self, counts: Iterable[int], method: str, shown: bool | None) -> None:
        self._counts = list(counts)
        self._most = min(self._counts) if method == "psi" else sum(self._counts)
        self._done: dict[str, int] = {}
        console = Console(stderr=True)
        super().__init__(
            progress.TextColumn("aligning ids"),
            progress.BarColumn(bar_width=24),
            progress.TextColumn(
                "{task.completed:.0f}/{task.total:.0f} exponentiations"
            ),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not (console.is_terminal if shown is None else shown),
            transient=True,
        )
        self._task = self.add_task("aligning", total=self.total(None))

    def total(self, merged: int | None) -> int:
        """Return the number of exponentiations of all parties, or an upper bound."""
        parties, ids = len(self._counts), sum(self._counts)
        last = self._most if merged is None else merged
        return (2 * parties + 1) * ids + parties * last

    def done(self, party: str, exponentiations: int, merged: int | None) -> None:
        """Show a party's progress."""
        self._done[party] = exponentiations
        total = self.total(merged)
        self.update(self._task, completed=sum(self._done.values()), total=total)
