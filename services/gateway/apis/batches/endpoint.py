"""``/v1/batches``: files of requests, answered when there is room for them. A batch belongs to the
API key of its request; to other keys it does not exist."""

import re
import time
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from services.gateway.api import Api, Core
from services.gateway.apis.batches.files import Files
from services.gateway.apis.batches.folder import (
    BatchFolder,
    BatchKey,
    new_batch_id,
    new_file_id,
    no_room,
)
from services.gateway.apis.batches.listing import enabled, page
from services.gateway.apis.batches.objects import BatchObject, RequestCounts, StoredBatch
from services.gateway.apis.batches.runner import BatchRunner
from services.gateway.chat.requests.json_body import check, decode
from services.gateway.chat.requests.unsupported import Neutral
from services.gateway.http.account import owner_of
from services.gateway.http.body import BodyReader
from services.gateway.http.json_reply import json_response
from services.gateway.http.violations import show
from shared.batch.lines import ENDPOINTS
from shared.errors import InvalidRequest, Overloaded

MAX_BODY_BYTES = 1 << 20
MAX_LISTED, DEFAULT_LISTED = 100, 20
MAX_WINDOW_S = 30 * 86400
WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
SECONDS = {"m": 60, "h": 3600, "d": 86400}

UNSUPPORTED: Neutral = {"output_expires_after": ()}

Key = Annotated[str, Meta(max_length=64)]
Value = Annotated[str, Meta(max_length=512)]


class CreateBatch(Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Key, Value], Meta(max_length=16)] | None = None


class Batches:
    """Without a folder every route returns an error with the setting's name."""

    def __init__(self, batches: BatchRunner | None) -> None:
        self._batches = batches
        self._bodies = BodyReader(MAX_BODY_BYTES)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/batches", self._create),
            web.get("/v1/batches", self._list),
            web.get("/v1/batches/{batch_id}", self._get),
            web.post("/v1/batches/{batch_id}/cancel", self._cancel),
        ]

    @property
    def _runner(self) -> BatchRunner:
        return enabled(self._batches)

    async def _create(self, request: web.Request) -> web.Response:
        runner, owner = self._runner, owner_of(request)
        body = await self._bodies.read(request)
        wanted = check(decode(body), CreateBatch, UNSUPPORTED)
        window_s = _check(wanted)
        find, file_id = runner.folder.file, wanted.input_file_id
        if (await runner.threads.run(owner, find, file_id, owner)).file.purpose != "batch":
            raise InvalidRequest(
                f"input_file_id is {show(wanted.input_file_id)}; its purpose is not batch",
                param="input_file_id",
            )
        now = int(time.time())
        batch = BatchObject(
            id=new_batch_id(),
            endpoint=wanted.endpoint,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            created_at=now,
            expires_at=now + window_s,
            request_counts=RequestCounts(),
            metadata=wanted.metadata,
        )
        stored = StoredBatch(owner, batch, new_file_id(), new_file_id())
        await self._add(runner, stored)
        runner.wake()
        return json_response(batch)

    async def _add(self, runner: BatchRunner, stored: StoredBatch) -> None:
        """Raises Overloaded, NoRoom."""
        add, limit = runner.folder.try_add, runner.max_open
        try:
            is_added = await runner.threads.run(stored.owner, add, stored, limit)
        except OSError as error:
            raise no_room(error) from None
        if not is_added:
            raise Overloaded(
                f"{limit} batches of this API key have not ended; the limit is max-batches-per-key"
                f" = {limit}",
                code="rate_limit_exceeded",
            )

    async def _list(self, request: web.Request) -> web.Response:
        runner, owner = self._runner, owner_of(request)
        batches = await runner.threads.run(owner, _all, runner.folder, owner)
        return json_response(page(request, batches, MAX_LISTED, DEFAULT_LISTED))

    async def _get(self, request: web.Request) -> web.Response:
        runner, key = self._runner, _asked(request)
        return json_response(await runner.threads.run(key.owner, _one, runner.folder, key))

    async def _cancel(self, request: web.Request) -> web.Response:
        runner, key = self._runner, _asked(request)
        try:
            batch = await runner.threads.run(key.owner, _cancelled, runner.folder, key)
        except OSError as error:
            raise no_room(error) from None
        return json_response(batch)


def _asked(request: web.Request) -> BatchKey:
    return BatchKey(owner_of(request), request.match_info["batch_id"])


def _check(wanted: CreateBatch) -> int:
    """The seconds of the window. Raises InvalidRequest."""
    if wanted.endpoint not in ENDPOINTS:
        raise InvalidRequest(
            f"endpoint is {show(wanted.endpoint)}; expected one of {', '.join(sorted(ENDPOINTS))}",
            param="endpoint",
        )
    match = WINDOW.fullmatch(wanted.completion_window)
    window_s = int(match[1]) * SECONDS[match[2]] if match else 0
    if not 0 < window_s <= MAX_WINDOW_S:
        raise InvalidRequest(
            f"completion_window is {show(wanted.completion_window)}; expected a number of m, h or d"
            f" such as 24h, up to {MAX_WINDOW_S // 86400}d",
            param="completion_window",
        )
    return window_s


def _all(folder: BatchFolder, owner: str) -> list[BatchObject]:
    return [_as_it_is(folder, each) for each in folder.batches(owner)]


def _one(folder: BatchFolder, key: BatchKey) -> BatchObject:
    """Raises NotFound."""
    return _as_it_is(folder, folder.batch(key))


def _cancelled(folder: BatchFolder, key: BatchKey) -> BatchObject:
    """Raises NotFound; InvalidRequest for a batch that has ended; OSError."""
    stored = folder.batch(key)
    if stored.batch.has_ended:
        raise InvalidRequest(
            f"{key.id} is {stored.batch.status} and cannot be cancelled any more", param="batch_id"
        )
    folder.cancel(key)
    return _as_it_is(folder, stored)


def _as_it_is(folder: BatchFolder, stored: StoredBatch) -> BatchObject:
    """The batch, shown as cancelled even before its gateway has seen the cancellation."""
    batch = stored.batch
    if not batch.has_ended:
        at = folder.cancelled_at(BatchKey(stored.owner, batch.id))
        if at is not None:
            batch.status, batch.cancelling_at = "cancelling", at
    return batch


class BatchesApi(Api):
    """Without ``batch-dir`` every route returns an error."""

    cheap_routes = ("/v1/batches/{batch_id}/cancel",)

    def __init__(self, core: Core) -> None:
        """Raises ConfigError."""
        folder, self._runner = core.config.batch_dir, None
        if folder is not None:
            self._runner = BatchRunner(folder, core.config, core.internal_socket)
        self._files = Files(self._runner, core.admission, core.config)
        if folder is not None:
            core.media.find = self._files.image
        self._batches = Batches(self._runner)

    def routes(self) -> list[web.RouteDef]:
        return [*self._files.routes(), *self._batches.routes()]

    async def run(self) -> None:
        if self._runner is not None:
            await self._runner.run()

    async def drain(self) -> None:
        if self._runner is not None:
            await self._runner.stop()

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
