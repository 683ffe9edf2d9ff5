"""``/v1/batches``: files of requests that are answered when there is room for them. A batch belongs
to the API key that it came with; to all others it does not exist."""

import asyncio
import re
import time
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct

from services.gateway.batches.folder import new_batch_id, new_file_id, no_room
from services.gateway.batches.objects import BatchObject, RequestCounts, StoredBatch
from services.gateway.batches.runner import BatchRunner
from services.gateway.endpoints.listing import enabled, page
from services.gateway.http.account import owner_of
from services.gateway.http.body import BodyReader
from services.gateway.requests.json_body import check, decode
from services.gateway.requests.unsupported import Neutral
from services.gateway.requests.violations import show
from services.gateway.responses.json_reply import json_response
from shared.batch.lines import ENDPOINTS
from shared.errors import InvalidRequest

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
    """Without a folder every route is refused, with the setting's name."""

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
        if runner.folder.file(wanted.input_file_id, owner).file.purpose != "batch":
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
        await _written(runner.folder.save_batch, stored)
        runner.wake()
        return json_response(batch)

    async def _list(self, request: web.Request) -> web.Response:
        stored = await asyncio.to_thread(self._runner.folder.batches, owner_of(request))
        batches = [self._as_it_is(each.batch) for each in stored]
        return json_response(page(request, batches, MAX_LISTED, DEFAULT_LISTED))

    async def _get(self, request: web.Request) -> web.Response:
        return json_response(self._batch(request))

    async def _cancel(self, request: web.Request) -> web.Response:
        batch = self._batch(request)
        if batch.has_ended:
            raise InvalidRequest(
                f"{batch.id} is {batch.status} and cannot be cancelled any more", param="batch_id"
            )
        await _written(self._runner.folder.cancel, batch.id)
        return json_response(self._as_it_is(batch))

    def _batch(self, request: web.Request) -> BatchObject:
        stored = self._runner.folder.batch(request.match_info["batch_id"], owner_of(request))
        return self._as_it_is(stored.batch)

    def _as_it_is(self, batch: BatchObject) -> BatchObject:
        """With what the gateway that runs it has not seen yet."""
        if not batch.has_ended and (at := self._runner.folder.cancelled_at(batch.id)) is not None:
            batch.status, batch.cancelling_at = "cancelling", at
        return batch


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


async def _written(write: Any, *arguments: Any) -> None:
    try:
        await asyncio.to_thread(write, *arguments)
    except OSError as error:
        raise no_room(error) from None
