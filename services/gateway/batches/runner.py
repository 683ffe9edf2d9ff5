"""Runs the batches of a folder, each in one gateway at a time."""

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import aiohttp

from services.gateway.batches.batch import Batch
from services.gateway.batches.folder import BatchFolder
from shared.batch.errors import BatchStopped, WrongResults
from shared.config.gateway import GatewayConfig

log = logging.getLogger(__name__)

LOOK_S = 1.0
MAX_RUNNING = 4
PAUSE_S = 10.0
"""After an error, before a batch is tried again."""


class BatchRunner:
    """``socket`` is where this gateway answers them. What another gateway left is gone on with: its
    locks went with it."""

    def __init__(self, folder: Path, config: GatewayConfig, socket: Path) -> None:
        self.folder = BatchFolder(folder)
        self.socket = socket
        self._config = config
        self._slots = asyncio.Semaphore(config.max_open_batch_requests)
        self._running: set[str] = set()
        self._ended: set[str] = set()
        self._not_before_s: dict[str, float] = {}
        self._is_asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """There is a new batch."""
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

    async def stop(self) -> None:
        """Leaves the batches as they are; another gateway may go on with them at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        connector = aiohttp.UnixConnector(str(self.socket), limit=0)
        headers = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(
                "http://batches", connector=connector, headers=headers
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            while True:
                self._is_asked.clear()
                for batch_id in sorted(self._startable()):
                    if len(self._running) < MAX_RUNNING:
                        self._start(batch_id, session, tasks)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._is_asked.wait()

    def _startable(self) -> set[str]:
        now_s = time.monotonic()
        paused = {each for each, until_s in self._not_before_s.items() if until_s > now_s}
        return self.folder.batch_ids() - self._running - self._ended - paused

    def _start(
        self, batch_id: str, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> None:
        try:
            lock = self.folder.try_lock(batch_id)
        except OSError as error:
            self._pause(batch_id, error)
            return
        if lock is None:
            return
        self._running.add(batch_id)
        tasks.create_task(self._hold(batch_id, lock, session))

    async def _hold(self, batch_id: str, lock: int, session: aiohttp.ClientSession) -> None:
        """Runs it while we have its lock; what goes wrong ends nothing else."""
        try:
            await self._run_batch(batch_id, session)
            self._ended.add(batch_id)
        except* (BatchStopped, WrongResults, OSError) as errors:
            self._pause(batch_id, _first_leaf(errors))
        except* Exception as errors:
            log.exception("batch %s broke", batch_id)
            self._pause(batch_id, _first_leaf(errors))
        finally:
            self._running.discard(batch_id)
            os.close(lock)

    def _pause(self, batch_id: str, error: BaseException) -> None:
        log.error("batch %s has to wait: %s", batch_id, error)
        self._not_before_s[batch_id] = time.monotonic() + PAUSE_S

    async def _run_batch(self, batch_id: str, session: aiohttp.ClientSession) -> None:
        stored = self.folder.any_batch(batch_id)
        if stored is None or stored.batch.has_ended:
            return
        log.info("batch %s: %s", batch_id, stored.batch.status)
        await Batch(stored, self.folder, self._config, session, self._slots).run()
        log.info("batch %s: %s, %s", batch_id, stored.batch.status, stored.batch.request_counts)


def _first_leaf(errors: BaseException) -> BaseException:
    return _first_leaf(errors.exceptions[0]) if isinstance(errors, BaseExceptionGroup) else errors
