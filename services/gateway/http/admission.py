"""Limits the number of open requests and the bytes held by them."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.gateway.metrics import BUFFERED_BYTES
from shared.errors import Overloaded
from shared.process.open_requests import OPEN_REQUESTS
from shared.process.rate import Rate


class Reservation:
    """The room held by one open request. ``is_served`` becomes true when it is accepted: the rate
    at which accepted requests end is the estimate of the wait for room."""

    def __init__(self, admission: "Admission") -> None:
        self._admission = admission
        self.num_bytes = 0
        self.is_served = False

    @property
    def max_bytes(self) -> int:
        """Of all open requests."""
        return self._admission.max_bytes

    def hold(self, num_bytes: int) -> None:
        """Adds bytes until the request ends. Raises Overloaded at the limit."""
        self._admission.hold(num_bytes)
        self.num_bytes += num_bytes

    def replace(self, before: int, after: int) -> None:
        """Holds ``after`` bytes instead of ``before``."""
        self.grow(after - before)

    def grow(self, num_bytes: int) -> None:
        """Adds bytes of a request in progress without a check; later ones are refused sooner."""
        self._admission.grow(num_bytes)
        self.num_bytes += num_bytes


class Admission:
    """A request is open from the time before its body is read until its handler ends."""

    def __init__(self, max_open: int, max_bytes: int) -> None:
        self.num_open = 0
        self.max_bytes = max_bytes
        self._max_open = max_open
        self._num_bytes = 0
        self._ends = Rate()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def admit(self) -> Iterator[Reservation]:
        """Raises Overloaded at the limit."""
        if self.num_open >= self._max_open:
            raise self._overloaded(
                f"{self.num_open} requests are open; the limit is max-open-requests ="
                f" {self._max_open}"
            )
        if self.num_open == 0:
            self._ends.start(time.monotonic())
        self._count(1)
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self._count(-1)
            self._set_bytes(self._num_bytes - reservation.num_bytes)
            self._ends.note(reservation.is_served, time.monotonic())

    def hold(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self.max_bytes:
            raise self._overloaded(
                f"open requests hold {self._num_bytes} bytes and this one needs {num_bytes} more;"
                f" the limit is max-buffered-bytes = {self.max_bytes}"
            )
        self.grow(num_bytes)

    def grow(self, num_bytes: int) -> None:
        self._set_bytes(self._num_bytes + num_bytes)

    async def idle(self) -> None:
        """Returns when no request is open."""
        await self._is_idle.wait()

    def _overloaded(self, message: str) -> Overloaded:
        wait_s = self._ends.retry_after_s(time.monotonic())
        return Overloaded(message, retry_after_s=wait_s)

    def _set_bytes(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        BUFFERED_BYTES.set(num_bytes)

    def _count(self, change: int) -> None:
        self.num_open += change
        OPEN_REQUESTS.set(self.num_open)
        if self.num_open:
            self._is_idle.clear()
        else:
            self._is_idle.set()
