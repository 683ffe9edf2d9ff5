"""Output of commands for people, and for programs that read lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LONGEST_LINE = 100_000


@contextmanager
def console_for_people() -> Iterator[Console]:
    """Yields a console as wide as the terminal. Without a terminal, lines are not wrapped and do
    not end with spaces."""
    console = Console(highlight=False, emoji=False, markup=False)
    if console.is_terminal:
        yield console
        return
    console.width = LONGEST_LINE
    with console.capture() as captured:
        yield console
    for line in captured.get().splitlines():
        print(line.rstrip())


LAYOUT = {"\n", "\t"}


def printable(text: str) -> str:
    """Replaces control characters by ``�``."""
    return "".join(each if each.isprintable() or each in LAYOUT else "�" for each in text)


REFRESHES_PER_S = 2  # few, since they cost the client CPU time


@contextmanager
def bar(console: Console, num: int, text: str, **fields: Any) -> Iterator[Callable[..., None]]:
    """Yields a function that advances a bar of ``num`` and changes the ``fields`` named in
    ``text``. Shows nothing if ``console`` is no terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(text), TimeElapsedColumn())
    with Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        refresh_per_second=REFRESHES_PER_S,
        transient=True,
    ) as shown:
        task = shown.add_task("", total=num, **fields)

        def update(advance: int = 0, **changes: Any) -> None:
            shown.update(task, advance=advance, **changes)

        yield update
