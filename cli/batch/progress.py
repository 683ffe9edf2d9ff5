"""A progress bar for a batch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.batch.run import Counts

REFRESHES_PER_S = 4
SPEED_WINDOW_S = 120.0


class Shown:
    """The bar, and lines above it."""

    def __init__(self, progress: Progress, counts: Counts) -> None:
        self._progress = progress
        self._counts = counts
        self._started_s = time.monotonic()
        completed = counts.completed + counts.failed
        self._task = progress.add_task(
            "", total=counts.total, completed=completed, failed=counts.failed, speed=0.0
        )

    def print(self, line: str) -> None:
        self._progress.console.print(line, markup=False)

    def update(self) -> None:
        counts = self._counts
        seconds = max(time.monotonic() - self._started_s, 1e-3)
        self._progress.update(
            self._task,
            completed=counts.completed + counts.failed,
            failed=counts.failed,
            speed=counts.num_output_tokens / seconds,
        )


@contextmanager
def shown(console: Console, counts: Counts) -> Iterator[Shown]:
    """Without a bar if ``console`` is no terminal."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed, {task.fields[speed]:.0f} tokens/s, left:"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=REFRESHES_PER_S,
        speed_estimate_period=SPEED_WINDOW_S,
        transient=True,
    ) as progress:
        yield Shown(progress, counts)
