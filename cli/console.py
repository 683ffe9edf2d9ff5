"""Output of commands for people, and for programs that read lines."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

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
