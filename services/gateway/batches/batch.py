"""One batch, from where it is to its end, in the gateway that holds its lock."""

import asyncio
import time
from contextlib import ExitStack

import aiohttp

from services.gateway.batches.folder import BatchFolder
from services.gateway.batches.objects import (
    BatchError,
    BatchErrors,
    BatchStatus,
    FileObject,
    RequestCounts,
    StoredBatch,
    StoredFile,
)
from services.gateway.http.own_socket import OWNER_HEADER
from services.gateway.metrics import BATCH_REQUESTS
from shared.batch.check import MAX_ERRORS, Checked, check
from shared.batch.errors import KeyRefused
from shared.batch.lines import LineError
from shared.batch.results import ResultFile
from shared.batch.run import BatchRun, Counts, Done, Plan, read_results
from shared.batch.sender import Reply, Sender
from shared.config.gateway import GatewayConfig

LOOK_S = 0.5
EXPIRED = "This request could not be executed before the completion window expired."
KEY_GONE = "the API key that the batch came with is none of this server's any more"


class Batch:
    """``slots`` bounds the requests of all batches. ``run`` raises BatchStopped, in groups, and
    OSError: then the batch is as far as its files say, and the next start goes on from there."""

    def __init__(
        self,
        stored: StoredBatch,
        folder: BatchFolder,
        config: GatewayConfig,
        session: aiohttp.ClientSession,
        slots: asyncio.Semaphore,
    ) -> None:
        self._stored = stored
        self._batch = stored.batch
        self._folder = folder
        self._config = config
        self._slots = slots
        self._sender = Sender(session, float("inf"), None, {OWNER_HEADER: stored.owner})

    async def run(self) -> None:
        if self._batch.status == "validating" and not await self._validate():
            return
        with ExitStack() as files:
            good = files.enter_context(self._results(self._stored.good_file_id))
            bad = files.enter_context(self._results(self._stored.bad_file_id))
            counts = Counts(self._batch.request_counts.total)
            num_lines = self._stored.num_lines
            done = await asyncio.to_thread(read_results, (good, bad), num_lines, counts)
            status = await self._answer(good, bad, counts, done)
            if status == "failed":
                self._batch.errors = BatchErrors([BatchError("invalid_api_key", KEY_GONE)])
            if status == "expired":
                await self._new_run(good, bad, counts, done).fail_rest("batch_expired", EXPIRED)
            await self._finalize(status, good, bad, counts)

    # --- validating -----------------------------------------------------------------------------

    async def _validate(self) -> bool:
        """Whether the batch is in progress now."""
        if self._folder.cancelled_at(self._batch.id) is not None:
            await self._save("cancelled")
            return False
        path = self._folder.data_path(self._batch.input_file_id)
        max_bytes, endpoint = self._config.max_body_bytes, self._batch.endpoint
        try:
            checked = await asyncio.to_thread(check, path, max_bytes, endpoint)
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
        return ResultFile(self._folder.data_path(file_id), self._name)

    @property
    def _name(self) -> str:
        return self._batch.id.removeprefix("batch_")

    def _new_run(self, good: ResultFile, bad: ResultFile, counts: Counts, done: Done) -> BatchRun:
        plan = Plan(
            self._folder.data_path(self._batch.input_file_id),
            self._name,
            self._config.max_body_bytes,
            self._stored.num_lines,
            self._batch.endpoint,
            self._config.batch_priority,
        )
        return BatchRun(plan, good, bad, counts, done, self._send)

    async def _send(self, url: str, body: bytes) -> Reply:
        async with self._slots:
            return await self._sender.send(url, body)

    async def _answer(
        self, good: ResultFile, bad: ResultFile, counts: Counts, done: Done
    ) -> BatchStatus:
        """How the batch ends."""
        run = self._new_run(good, bad, counts, done)
        running = asyncio.create_task(run.run(self._config.max_open_batch_requests))
        try:
            while not running.done():
                await asyncio.wait([running], timeout=LOOK_S)
                await self._save_counts(counts)
                if running.done():
                    break
                if self._folder.cancelled_at(self._batch.id) is not None:
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
            self._folder.drop_data(file_id)
            return None
        await asyncio.to_thread(results.sync)
        file = FileObject(
            id=file_id,
            bytes=results.num_bytes,
            created_at=_now(),
            filename=f"{self._batch.id}_{kind}.jsonl",
            purpose="batch_output",
        )
        await asyncio.to_thread(self._folder.save_file, StoredFile(self._stored.owner, file))
        return file_id

    async def _save(self, status: BatchStatus) -> None:
        """Notes when the batch has got to its end."""
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
                batch.cancelling_at = self._folder.cancelled_at(batch.id)
                batch.cancelled_at = _now()
        await asyncio.to_thread(self._folder.save_batch, self._stored)


def _status_of(running: asyncio.Task[None]) -> BatchStatus:
    """Raises what ended it, but for a key that is gone."""
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
