"""Runs the batches of a folder, each in one gateway at a time."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec

from services.gateway.apis.batches.batch import Batch
from services.gateway.apis.batches.folder import BatchFolder, BatchKey
from services.gateway.apis.batches.leftovers import remove_leftovers
from services.gateway.http.fair_time import FairThreads
from shared.batch.results import WrongResults
from shared.client.sender import BatchStopped
from shared.process.fair_slots import FairSlots
from shared.settings.gateway import GatewayConfig

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""The interval of the search for batches of other gateways."""
PAUSE_S = 10.0
"""The pause after an error, before a batch is tried again."""
NUM_CHECKS = 2
NUM_FILE_THREADS = 4


class BatchRunner:
    """``socket`` is the gateway's address for the batches' own requests. A batch left by another
    gateway is continued: its lock ended with that gateway. ``threads`` are for clients' requests to
    the folder."""

    def __init__(self, folder: Path, config: GatewayConfig, socket: Path) -> None:
        self.folder = BatchFolder(folder)
        self.socket = socket
        self.threads = FairThreads(NUM_FILE_THREADS, "files")
        self.max_open = config.max_batches_per_key
        self._config = config
        self._slots = FairSlots(config.max_open_batch_requests)
        self._checks = FairThreads(NUM_CHECKS, "batch checks")
        self._created: dict[BatchKey, int] = {}
        self._running: set[BatchKey] = set()
        self._not_before_s: dict[BatchKey, float] = {}
        self._is_asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """A batch has come or ended."""
        self._is_asked.set()

    async def run(self) -> None:
        """Until cancelled, or ``stop``."""
        self._task = asyncio.create_task(self._run())
        try:
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()
        finally:
            await self.stop()

    def close(self) -> None:
        """Called after the last request of a client."""
        self.threads.close()
        self._checks.close()

    async def stop(self) -> None:
        """Leaves the batches as they are; another gateway may continue them at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        connector = aiohttp.UnixConnector(str(self.socket), limit=0)
        headers = {"Content-Type": "application/json"}
        await self._remove_leftovers()
        async with (
            aiohttp.ClientSession(
                "http://batches", connector=connector, headers=headers
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            while True:
                self._is_asked.clear()
                try:
                    await self._start_waiting(session, tasks)
                except OSError as error:
                    log.error("batch-dir: %s", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._is_asked.wait()

    async def _remove_leftovers(self) -> None:
        try:
            await asyncio.to_thread(remove_leftovers, self.folder, time.time())
        except (OSError, msgspec.MsgspecError) as error:
            log.error("batch-dir: leftovers stay: %s", error)

    async def _start_waiting(
        self, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> None:
        found, new = await asyncio.to_thread(self._look, self._created.keys())
        self._created = {key: at for key, at in self._created.items() if key in found} | new
        pauses = self._not_before_s.items()
        self._not_before_s = {key: until_s for key, until_s in pauses if key in found}
        now_s = time.monotonic()
        waiting = {
            key: created_at
            for key, created_at in self._created.items()
            if key not in self._running and self._not_before_s.get(key, now_s) <= now_s
        }
        start(waiting, self._running.copy(), lambda key: self._try_start(key, session, tasks))

    def _look(self, known: Set[BatchKey]) -> tuple[set[BatchKey], dict[BatchKey, int]]:
        """All unfinished batches, and the creation times of batches not ``known``."""
        found = self.folder.open_keys()
        return found, self.folder.creation_times(found - known)

    def _try_start(
        self, key: BatchKey, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> bool:
        try:
            lock = self.folder.try_lock(key)
        except OSError as error:
            self._pause(key, error)
            return False
        if lock is not None:
            self._running.add(key)
            tasks.create_task(self._hold(key, lock, session))
        return lock is not None

    async def _hold(self, key: BatchKey, lock: int, session: aiohttp.ClientSession) -> None:
        """Runs the batch while we have its lock; its errors end nothing else."""
        try:
            await self._run_batch(key, session)
        except* (BatchStopped, WrongResults, OSError) as errors:
            self._pause(key, _first_leaf(errors))
        except* Exception as errors:
            log.exception("batch %s broke", key.id)
            self._pause(key, _first_leaf(errors))
        finally:
            self.folder.unlock(key, lock)
            self._running.discard(key)
            self.wake()

    def _pause(self, key: BatchKey, error: BaseException) -> None:
        log.error("batch %s has to wait: %s", key.id, error)
        self._not_before_s[key] = time.monotonic() + PAUSE_S

    async def _run_batch(self, key: BatchKey, session: aiohttp.ClientSession) -> None:
        stored = await asyncio.to_thread(self.folder.open_batch, key)
        if stored is None:
            return
        if stored.batch.has_ended:  # its gateway died before it could move it
            await asyncio.to_thread(self.folder.save_batch, stored)
            return
        log.info("batch %s: %s", key.id, stored.batch.status)
        parts = self.folder, self._config, session, self._slots, self._checks
        await Batch(stored, *parts).run()
        log.info("batch %s: %s, %s", key.id, stored.batch.status, stored.batch.request_counts)


def _first_leaf(errors: BaseException) -> BaseException:
    return _first_leaf(errors.exceptions[0]) if isinstance(errors, BaseExceptionGroup) else errors


MAX_RUNNING = 4
"""The limit for all keys together; a key always has one."""


def start(
    waiting: Mapping[BatchKey, int],
    running: Iterable[BatchKey],
    try_start: Callable[[BatchKey], bool],
) -> None:
    """Starts batches of ``waiting``, which maps each to its creation time: a key's oldest first,
    and keys with the fewest running batches first."""
    num_running = Counter(each.owner for each in running)
    queues: dict[str, list[BatchKey]] = {}
    for key in sorted(waiting, key=lambda key: (waiting[key], key), reverse=True):
        queues.setdefault(key.owner, []).append(key)
    while queues:
        owner = min(queues, key=lambda each: (num_running[each], waiting[queues[each][-1]]))
        if num_running[owner] and num_running.total() >= MAX_RUNNING:
            return
        if try_start(queues[owner].pop()):
            num_running[owner] += 1
        if not queues[owner]:
            del queues[owner]
