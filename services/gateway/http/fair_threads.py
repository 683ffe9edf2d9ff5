"""Threads that owners share in turn."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.gateway.http.fair_time import on_thread
from shared.process.fair_slots import FairSlots

Result = TypeVar("Result")


class FairThreads:
    """Threads for calls that block."""

    def __init__(self, num: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num, name)
        self._slots = FairSlots(num)

    async def run(self, owner: str, call: Callable[..., Result], *arguments: object) -> Result:
        async with self._slots.hold(owner):
            return await on_thread(self._threads, call, *arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
