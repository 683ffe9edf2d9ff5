"""aiohttp's server with our limits, and our error object for what is not even HTTP."""

import asyncio
import logging

from aiohttp import web
from aiohttp.typedefs import Handler

from services.gateway.failures import error_response
from shared.errors import InvalidRequest
from shared.log import client_text

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 8 << 10
MAX_HEADERS = 64
MAX_TOTAL_HEADER_BYTES = 32 << 10
CLEANUP_S = 1.0


@web.middleware
async def limit_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Each header and their number are limited while they are read, their sum here."""
    num_bytes = sum(len(name) + len(value) for name, value in request.raw_headers)
    if num_bytes > MAX_TOTAL_HEADER_BYTES:
        raise web.HTTPRequestHeaderFieldsTooLarge(
            reason=f"headers of {num_bytes} bytes; the limit is {MAX_TOTAL_HEADER_BYTES}"
        )
    return await handler(request)


class HttpRunner(web.AppRunner):
    """Runs ``app``. A handler is cancelled when its client leaves; ``cleanup`` gives those that
    still run ``CLEANUP_S``."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(app, shutdown_timeout=CLEANUP_S, access_log=None)

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=True,
        )


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None is how aiohttp turns it off
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status != 400:
            return super().handle_error(request, status, exc, message)
        log.info("%s sent what is not HTTP: %s", request.remote, client_text(message or ""))
        response = error_response(InvalidRequest(f"not HTTP: {message}", code="bad_request"))
        response.force_close()
        return response
