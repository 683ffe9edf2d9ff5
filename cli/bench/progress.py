"""Shows at a terminal how far a run is."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cli.bench.client import Send
from cli.bench.row import Row
from cli.bench.workload import Request

REFRESHES_PER_S = 2  # few, since they are the client's own work


@contextmanager
def progress(console: Console, send: Send, num: int) -> Iterator[Send]:
    """``send``, of which each end moves a bar where ``console`` is a terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"))
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=num, failed=0)

        async def shown(request: Request, due_s: float) -> Row:
            row = await send(request, due_s)
            failed = bar.tasks[task].fields["failed"] + bool(row.error)
            bar.update(task, advance=1, failed=failed)
            return row

        yield shown
