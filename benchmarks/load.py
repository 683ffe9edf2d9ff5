"""Runs the client of ``shoal bench serve`` for benchmarks that start the server themselves."""

from io import StringIO
from typing import Any

from rich.console import Console

from cli.bench.command import measure, what_to_send
from cli.bench.options import parse


async def load(url: str, **flags: Any) -> dict[str, Any]:
    """The figures of one run. ``flags`` are the command's, with underscores. Raises RuntimeError if
    a request fails or an answer is short, as rates of unequal work cannot be compared."""
    words = [
        word
        for name, value in flags.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    settings = parse(["--url", url, *words])
    console = Console(file=StringIO())  # no terminal, so no progress bar
    figures = (await measure(settings, *what_to_send(settings), console)).figures
    if figures["num_failed"] or figures["num_short"]:
        raise RuntimeError(
            f"{figures['num_failed']} requests failed ({figures['errors']}),"
            f" {figures['num_short']} answers are short"
        )
    return figures
