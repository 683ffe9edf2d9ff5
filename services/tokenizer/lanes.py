"""Threads for work that takes too long for the event loop, with separate threads for long texts."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shared.process.fair_slots import FairSlots

Result = TypeVar("Result")

LONG_BYTES = 128 << 10
"""A text of this length takes about 0.1 s to encode, and a short one may wait that long for it."""


class Lanes:
    """An owner has ``num_threads`` for short texts and one for texts from ``LONG_BYTES`` on; other
    owners have one more thread of each kind."""

    def __init__(self, num_threads: int) -> None:
        self._short = _Lane(num_threads, "encode")
        self._long = _Lane(1, "encode-long")

    async def run(self, owner: str, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Returns or raises like ``work``. It never begins if its caller is cancelled first."""
        lane = self._short if num_bytes < LONG_BYTES else self._long
        return await lane.run(owner, work)

    def close(self) -> None:
        self._short.threads.shutdown(wait=False)
        self._long.threads.shutdown(wait=False)


class _Lane:
    """Calls wait here and not in the executor, because its queue would keep cancelled calls, with
    their data, until their turn."""

    def __init__(self, num_threads: int, name: str) -> None:
        self.threads = ThreadPoolExecutor(num_threads + 1, name)
        self._slots = FairSlots(num_threads + 1, most=num_threads)

    async def run(self, owner: str, work: Callable[[], Result]) -> Result:
        await self._slots.take(owner)
        job = asyncio.get_running_loop().run_in_executor(self.threads, _without_panics, work)
        job.add_done_callback(lambda job: self._end(owner, job))
        await asyncio.wait([job])  # if cancelled, we leave the thread to finish its work
        return job.result()

    def _end(self, owner: str, job: asyncio.Future[Any]) -> None:
        self._slots.give_back(owner)
        if not job.cancelled():
            job.exception()  # marks it as seen: a caller that was cancelled does not read it


def _without_panics(work: Callable[[], Result]) -> Result:
    """A panic of a library in Rust is no Exception, and would end the process: tokenizers panics if
    its regular expressions need too many steps, for example for ten million blanks."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as panic:
        raise RuntimeError(f"a library failed: {panic}") from panic
