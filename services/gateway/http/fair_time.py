"""Bounds one API key's share of the gateway's time while other keys are active.

Every request costs time, even a refused one, and all requests share one event loop and one
interpreter. Each key is charged with the time of its requests, on the loop and on threads. While
other keys are active and the loop is late, a key above its share starts its next request later.
A key without neighbours never waits.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from types import coroutine
from typing import Any, TypeVar

from shared.process.fair_slots import FairSlots

SHARE = 0.25
"""Of a core, for each key."""
LATE_S = 0.002
"""Limit of a turn of the loop: a first token waits for several turns."""
BURST_S = 0.02
"""Time of a key at once, without delay."""
MAX_DEBT_S = 0.25
ACTIVE_S = 10.0
"""A key is active for this time after its last request."""

Charge = Callable[[float], None]
Result = TypeVar("Result")


@dataclass(slots=True)
class _Use:
    """``debt_s`` is left at ``at_s``; a request began or waited at ``asked_s``."""

    at_s: float
    asked_s: float
    debt_s: float = 0.0

    def settle(self, now_s: float) -> None:
        self.debt_s = max(0.0, self.debt_s - SHARE * (now_s - self.at_s))
        self.at_s = now_s


class FairTime:
    """The accounts of all keys. Times are monotonic."""

    def __init__(self) -> None:
        self._uses: OrderedDict[str, _Use] = OrderedDict()  # the key that asked last is the last

    def wait_s(self, key: str, now_s: float) -> float:
        """The delay of the next request of ``key``."""
        use = self._uses.setdefault(key, _Use(now_s, now_s))
        use.asked_s = now_s
        self._uses.move_to_end(key)
        if not self._has_others(now_s):
            return 0.0
        use.settle(now_s)
        return max(0.0, (use.debt_s - BURST_S) / SHARE)

    def charge(self, key: str, spent_s: float, now_s: float) -> None:
        use = self._uses[key]
        use.settle(now_s)
        use.debt_s = min(use.debt_s + spent_s, MAX_DEBT_S)

    def _has_others(self, now_s: float) -> bool:
        """Whether a key but the last one was active lately."""
        uses = reversed(self._uses.values())
        next(uses)
        other = next(uses, None)
        return other is not None and now_s - other.asked_s < ACTIVE_S


class FairTurns:
    """Starts requests of a key above its share one after the other."""

    def __init__(self) -> None:
        self._time = FairTime()
        self._lines: dict[str, asyncio.Lock] = {}

    async def run(self, key: str, handling: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of ``handling``, which starts at the turn of ``key``."""
        try:
            await self._wait(key)
        except BaseException:
            handling.close()
            raise
        token = _charge.set(lambda spent_s: self._time.charge(key, spent_s, time.monotonic()))
        try:
            return await _timed(handling, _charge.get())
        finally:
            _charge.reset(token)

    async def _wait(self, key: str) -> None:
        line = self._lines.setdefault(key, asyncio.Lock())
        if not line.locked() and not self._time.wait_s(key, time.monotonic()):
            return
        async with line:
            while (  # noqa: ASYNC110, no event ends it
                wait_s := self._time.wait_s(key, time.monotonic())
            ) and await _is_late():
                await asyncio.sleep(wait_s)


async def _is_late() -> bool:
    """True if a turn of the loop takes over ``LATE_S``."""
    started_s = time.monotonic()
    await asyncio.sleep(0)
    return time.monotonic() - started_s > LATE_S


async def on_thread(
    threads: ThreadPoolExecutor, call: Callable[..., Result], *arguments: object
) -> Result:
    """Returns the result of ``call`` and charges its time to the key of the request."""
    spent_s = 0.0

    def timed() -> Result:
        nonlocal spent_s
        started_s = time.thread_time()
        try:
            return call(*arguments)
        finally:
            spent_s = time.thread_time() - started_s

    try:
        return await asyncio.get_running_loop().run_in_executor(threads, timed)
    finally:
        _charge.get()(spent_s)


def _let_pass(spent_s: float) -> None:
    pass


_charge: ContextVar[Charge] = ContextVar("charge", default=_let_pass)


@coroutine
def _timed(work: Coroutine[Any, Any, Result], charge: Charge) -> Generator[Any, Any, Result]:
    """Awaits ``work`` and charges the time of each of its steps."""
    step: Callable[[Any], Any] = work.send
    argument: Any = None
    while True:
        started_s = time.thread_time()
        try:
            future = step(argument)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            charge(time.thread_time() - started_s)
        try:
            step, argument = work.send, (yield future)
        except BaseException as error:
            step, argument = work.throw, error


class FairThreads:
    """Threads for calls that block, which owners share in turn."""

    def __init__(self, num: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num, name)
        self._slots = FairSlots(num)

    async def run(self, owner: str, call: Callable[..., Result], *arguments: object) -> Result:
        async with self._slots.hold(owner):
            return await on_thread(self._threads, call, *arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
