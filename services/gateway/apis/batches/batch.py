"""One batch, continued to its end by the gateway that holds its lock."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import aiohttp
from prometheus_client import Counter

from services.gateway.apis.batches.folder import BatchFolder, BatchKey
from services.gateway.apis.batches.objects import (
    BatchError,
    BatchErrors,
    BatchStatus,
    FileObject,
    RequestCounts,
    StoredBatch,
    StoredFile,
)
from services.gateway.http.fair_time import FairThreads
from services.gateway.http.internal_socket import OWNER_HEADER
from shared.batch.check import MAX_ERRORS, Checked, check
from shared.batch.lines import LineError
from shared.batch.results import ResultFile
from shared.batch.run import BatchRun, Counts, Done, Plan, read_results
from shared.client.sender import KeyRefused, Sender
from shared.process.fair_slots import FairSlots
from shared.settings.gateway import GatewayConfig

BATCH_REQUESTS = Counter(
    "shoal_batch_requests",
    "Lines of batches that have a result; result: completed or failed",
    ["result"],
)
Result = TypeVar("Result")

LOOK_S = 0.5
EXPIRED = "This request could not be executed before the completion window expired."
KEY_GONE = "the API key that the batch came with is none of this server's any more"


class Batch:
    """``slots`` bounds the requests of all batches; ``checks`` are threads for whole files. ``run``
    raises BatchStopped, in groups, and OSError: the files then hold the batch's progress, and the
    next start continues from there."""

    def __init__(
        self,
        stored: StoredBatch,
        folder: BatchFolder,
        config: GatewayConfig,
        session: aiohttp.ClientSession,
        slots: FairSlots,
        checks: FairThreads,
    ) -> None:
        owner = stored.owner
        self._stored = stored
        self._owner = owner
        self._key = BatchKey(owner, stored.batch.id)
        self._batch = stored.batch
        self._folder = folder
        self._config = config
        self._checks = checks
        headers = {OWNER_HEADER: owner}
        self._sender = Sender(session, float("inf"), None, headers, lambda: slots.hold(owner))

    async def run(self) -> None:
        if self._batch.status == "validating" and not await self._validate():
            return
        with ExitStack() as files:
            good = files.enter_context(self._results(self._stored.good_file_id))
            bad = files.enter_context(self._results(self._stored.bad_file_id))
            counts = Counts(self._batch.request_counts.total)
            done = await self._check(read_results, (good, bad), self._stored.num_lines, counts)
            status = await self._answer(good, bad, counts, done)
            if status == "failed":
                self._batch.errors = BatchErrors([BatchError("invalid_api_key", KEY_GONE)])
            if status == "expired":
                await self._new_run(good, bad, counts, done).fail_rest("batch_expired", EXPIRED)
            await self._finalize(status, good, bad, counts)

    async def _check(self, call: Callable[..., Result], *arguments: object) -> Result:
        return await self._checks.run(self._owner, call, *arguments)

    # --- validating -----------------------------------------------------------------------------

    async def _validate(self) -> bool:
        """Whether the batch is in progress now."""
        if self._folder.cancelled_at(self._key) is not None:
            await self._save("cancelled")
            return False
        path = self._input_path
        max_bytes, endpoint = self._config.max_body_bytes, self._batch.endpoint
        try:
            checked = await self._check(check, path, max_bytes, endpoint)
        except FileNotFoundError:  # it was deleted in the same moment
            checked = Checked()
        self._stored.num_lines = checked.num_lines
        self._batch.request_counts.total = checked.num_requests
        if errors := self._errors(checked):
            self._batch.errors = BatchErrors(errors)
            await self._save("failed")
            return False
        self._batch.in_progress_at = _now()
        await self._save("in_progress")
        return True

    def _errors(self, checked: Checked) -> list[BatchError]:
        num, limit = checked.num_requests, self._config.max_batch_requests
        if not num:
            return [BatchError("empty_file", "the input file has no line", "input_file_id")]
        if num > limit:
            message = f"the input file has {num} lines; the limit is max-batch-requests = {limit}"
            return [BatchError("too_many_requests", message, "input_file_id")]
        wrong = [*checked.duplicates, *checked.errors][:MAX_ERRORS]
        return [_batch_error(each) for each in wrong]

    # --- in progress ----------------------------------------------------------------------------

    def _results(self, file_id: str) -> ResultFile:
        return ResultFile(self._folder.data_path(file_id, self._owner), self._name)

    @property
    def _input_path(self) -> Path:
        return self._folder.data_path(self._batch.input_file_id, self._owner)

    @property
    def _name(self) -> str:
        return self._batch.id.removeprefix("batch_")

    def _new_run(self, good: ResultFile, bad: ResultFile, counts: Counts, done: Done) -> BatchRun:
        plan = Plan(
            path=self._input_path,
            batch=self._name,
            max_line_bytes=self._config.max_body_bytes,
            num_lines=self._stored.num_lines,
            endpoint=self._batch.endpoint,
            priority=self._config.batch_priority,
        )
        return BatchRun(
            plan=plan,
            good=good,
            bad=bad,
            counts=counts,
            done=done,
            send=self._sender.send,
        )

    async def _answer(
        self, good: ResultFile, bad: ResultFile, counts: Counts, done: Done
    ) -> BatchStatus:
        """The status at the batch's end."""
        run = self._new_run(good, bad, counts, done)
        running = asyncio.create_task(run.run(self._config.max_open_batch_requests))
        try:
            while not running.done():
                await asyncio.wait([running], timeout=LOOK_S)
                await self._save_counts(counts)
                if running.done():
                    break
                if self._folder.cancelled_at(self._key) is not None:
                    return "cancelled"
                if _now() >= self._batch.expires_at:
                    return "expired"
            return _status_of(running)
        finally:
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # retrieved: an end of ours came first

    async def _save_counts(self, counts: Counts) -> None:
        saved = self._batch.request_counts
        BATCH_REQUESTS.labels("completed").inc(max(0, counts.completed - saved.completed))
        BATCH_REQUESTS.labels("failed").inc(max(0, counts.failed - saved.failed))
        if (counts.completed, counts.failed) != (saved.completed, saved.failed):
            total = saved.total
            self._batch.request_counts = RequestCounts(total, counts.completed, counts.failed)
            await self._save(self._batch.status)

    # --- the end --------------------------------------------------------------------------------

    async def _finalize(
        self, status: BatchStatus, good: ResultFile, bad: ResultFile, counts: Counts
    ) -> None:
        if status == "completed":
            self._batch.finalizing_at = self._batch.finalizing_at or _now()
            await self._save("finalizing")
        await self._save_counts(counts)
        self._batch.output_file_id = await self._publish(self._stored.good_file_id, good, "output")
        self._batch.error_file_id = await self._publish(self._stored.bad_file_id, bad, "error")
        await self._save(status)

    async def _publish(self, file_id: str, results: ResultFile, kind: str) -> str | None:
        """Makes a file for clients of it, unless it is empty."""
        if not results.num_bytes:
            self._folder.drop_data(file_id, self._owner)
            return None
        await asyncio.to_thread(results.sync)
        file = FileObject(
            id=file_id,
            bytes=results.num_bytes,
            created_at=_now(),
            filename=f"{self._batch.id}_{kind}.jsonl",
            purpose="batch_output",
        )
        await asyncio.to_thread(self._folder.save_file, StoredFile(self._owner, file))
        return file_id

    async def _save(self, status: BatchStatus) -> None:
        """Saves the batch with its status, and the time of its end if it has ended."""
        batch = self._batch
        batch.status = status
        match status:
            case "completed":
                batch.completed_at = _now()
            case "failed":
                batch.failed_at = _now()
            case "expired":
                batch.expired_at = _now()
            case "cancelled":
                batch.cancelling_at = self._folder.cancelled_at(self._key)
                batch.cancelled_at = _now()
        await asyncio.to_thread(self._folder.save_batch, self._stored)


def _status_of(running: asyncio.Task[None]) -> BatchStatus:
    """Raises the batch's error, except for a removed key."""
    status: BatchStatus = "completed"
    try:
        running.result()
    except* KeyRefused:
        status = "failed"
    return status


def _batch_error(wrong: LineError) -> BatchError:
    return BatchError(wrong.code, wrong.message, wrong.param, wrong.number)


def _now() -> int:
    return int(time.time())
