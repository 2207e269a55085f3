"""Progress of a run on the terminal: samples done, tokens per second, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

console = Console(stderr=True, highlight=False, soft_wrap=True)
"""Everything but the result's table goes to standard error."""


class RunProgress:
    """A bar over all samples; on a terminal it moves while tokens are generated."""

    def __init__(self, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar: TaskID = self._progress.add_task("", total=total, completed=done, rate="")
        self._total = total
        self._done = done

    def sample(self, task: str, index: int) -> None:
        """Say which sample is running."""
        self._progress.update(self._bar, description=f"{task} {index}")

    def finished(self, task: str, index: int, score: float, seconds: float, tokens_per_second: float | None) -> None:
        """Count a finished sample."""
        self._done += 1
        rate = "" if tokens_per_second is None else f"{tokens_per_second:.1f} tok/s"
        self._progress.update(self._bar, advance=1, rate=rate)
        if not console.is_terminal:
            console.print(
                f"[{self._done}/{self._total}] {task} {index}: score {score:g}, {seconds:.1f} s"
                + (f", {rate}" if rate else "")
            )

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
