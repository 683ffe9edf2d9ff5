"""Slots and threads that owners share in turn."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

Result = TypeVar("Result")


class FairSlots:
    """A free slot goes to the owner with the fewest, among equals to the one that got its last slot
    first."""

    def __init__(self, num: int) -> None:
        self._num_free = num
        self._held: Counter[str] = Counter()
        self._num_given = 0
        self._last: dict[str, int] = {}  # the number of an owner's last slot
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[None]:
        await self._take(owner)
        try:
            yield
        finally:
            self._give_back(owner)

    async def _take(self, owner: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._give_back(owner)
            raise

    def _give_back(self, owner: str) -> None:
        self._num_free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._num_free and self._waiting:
            owner = min(self._waiting, key=lambda each: (self._held[each], self._last.get(each, 0)))
            turn = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not turn.cancelled():
                self._num_free -= 1
                self._num_given += 1
                self._held[owner] += 1
                self._last[owner] = self._num_given
                turn.set_result(None)


class FairThreads:
    """Threads for calls that block."""

    def __init__(self, num: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num, name)
        self._slots = FairSlots(num)

    async def run(self, owner: str, call: Callable[..., Result], *arguments: object) -> Result:
        async with self._slots.hold(owner):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, call, *arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
