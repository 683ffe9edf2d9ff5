"""A progress bar for a run."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from cli.bench.client import Send
from cli.bench.row import Row
from cli.bench.workload import Request
from cli.progress import bar


@contextmanager
def progress(console: Console, send: Send, num: int) -> Iterator[Send]:
    """Wraps ``send`` so that each end advances the bar."""
    num_failed = 0
    with bar(console, num, "{task.fields[failed]} failed", failed=0) as update:

        async def shown(request: Request, due_s: float) -> Row:
            nonlocal num_failed
            row = await send(request, due_s)
            num_failed += bool(row.error)
            update(advance=1, failed=num_failed)
            return row

        yield shown
