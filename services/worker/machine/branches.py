"""Work beside what a device computes next."""

from collections.abc import Callable
from functools import cache

import torch

Join = Callable[[], object]


def branch(device: torch.device, run: Callable[[], object]) -> Join:
    """Launches ``run`` on a stream of its own, behind all that was launched so far. What is
    launched after a call of what is returned comes behind it. Within a capture of a graph it is a
    branch of it, and must be joined before the capture ends. Without streams it runs at once.
    """
    if device.type != "cuda":
        run()
        return _nothing
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        event = stream.record_event()
    return lambda: torch.cuda.current_stream().wait_event(event)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all branches: they follow each other."""
    return torch.cuda.Stream(device)


def _nothing() -> None:
    pass
