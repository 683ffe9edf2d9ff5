"""How many requests are open, and no more than the limit."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.gateway.metrics import OPEN_REQUESTS
from shared.errors import RETRY_AFTER_S, Overloaded


class Admission:
    """A request is open from before its body is read until its handler ends."""

    def __init__(self, max_open: int) -> None:
        self.num_open = 0
        self._max_open = max_open
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Raises Overloaded at the limit."""
        if self.num_open >= self._max_open:
            raise Overloaded(
                f"{self.num_open} requests are open; the limit is {self._max_open}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    async def idle(self) -> None:
        """Returns when no request is open."""
        await self._is_idle.wait()

    def _count(self, change: int) -> None:
        self.num_open += change
        OPEN_REQUESTS.set(self.num_open)
        if self.num_open:
            self._is_idle.clear()
        else:
            self._is_idle.set()
