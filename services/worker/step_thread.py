"""The worker's compute thread, apart from the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import get_ident
from typing import Any


class StepThread:
    """Runs one call after another. An error ends the service."""

    def __init__(self) -> None:
        self._ident = 0
        self.executor = ThreadPoolExecutor(1, "step", self._note_ident)

    def is_current(self) -> bool:
        """True if called on this thread."""
        return get_ident() == self._ident

    def submit(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call it on the event loop."""
        self.executor.submit(_run, asyncio.get_running_loop(), call, *arguments)

    def _note_ident(self) -> None:
        self._ident = get_ident()


def call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: Any
) -> None:
    """Calls back on the event loop, from any thread. Does nothing once the service has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)


def raise_soon(loop: asyncio.AbstractEventLoop, error: Exception) -> None:
    """Ends the service, from any thread."""
    call_soon(loop, _raise, error)


def _run(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    try:
        call(*arguments)
    except Exception as error:
        raise_soon(loop, error)


def _raise(error: Exception) -> None:
    raise error
