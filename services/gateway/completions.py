"""``/v1/chat/completions`` and ``/v1/completions``."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from services.gateway.admission import Admission
from services.gateway.body import BodyReader
from services.gateway.exchange import Exchange
from services.gateway.failures import STREAM, request_id
from services.gateway.job import Job
from services.gateway.mesh import Mesh
from services.gateway.metrics import RequestMeter
from services.gateway.parse import parse_chat, parse_completion
from services.gateway.replies import (
    ChatFormat,
    EventWriter,
    Format,
    Head,
    TextFormat,
    WholeWriter,
)
from shared.errors import RETRY_AFTER_S, Unavailable
from shared.messages import ModelInfo

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True)
class Endpoint:
    """In what the two endpoints differ."""

    id_prefix: str
    parse: Callable[[bytes, ModelInfo], Job]
    format: Format


CHAT = Endpoint("chatcmpl-", parse_chat, ChatFormat())
TEXT = Endpoint("cmpl-", parse_completion, TextFormat())


class Completions:
    """Body → Job → mesh → reply. Nothing is sent to the client before the mesh has accepted."""

    def __init__(
        self, mesh: Mesh, admission: Admission, bodies: BodyReader, accept_timeout_s: float
    ) -> None:
        self._mesh = mesh
        self._admission = admission
        self._bodies = bodies
        self._accept_timeout_s = accept_timeout_s

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, CHAT)

    async def text(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, TEXT)

    async def _serve(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        started_s = time.monotonic()
        with self._admission.admit():
            body = await self._bodies.read(request)
            model = self._mesh.model
            job = endpoint.parse(body, model)
            name = endpoint.id_prefix + request_id(request)
            head = Head(name, int(time.time()), job.model, model.fingerprint)
            meter = RequestMeter(job.model, started_s)
            with self._mesh.exchange(f"{name}/0", job) as exchange:
                await self._accepted(exchange)
                if job.is_stream:
                    writer = EventWriter(endpoint.format, head, job.includes_usage)
                    return await _stream(request, exchange, writer, meter)
                return await _whole(exchange, WholeWriter(endpoint.format, head), meter)

    async def _accepted(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self._accept_timeout_s):
                await exchange.accepted()
        except TimeoutError:
            raise Unavailable(
                f"not accepted within {self._accept_timeout_s:g} s", retry_after_s=RETRY_AFTER_S
            ) from None


async def _stream(
    request: web.Request, exchange: Exchange, writer: EventWriter, meter: RequestMeter
) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    request[STREAM] = response
    async for progress in exchange:
        meter.observe(progress)
        if events := writer.write(progress):
            await response.write(events)
    return response


async def _whole(exchange: Exchange, writer: WholeWriter, meter: RequestMeter) -> web.Response:
    body = b""
    async for progress in exchange:
        meter.observe(progress)
        body += writer.write(progress)
    return web.Response(body=body, content_type="application/json")
