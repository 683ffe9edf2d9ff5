"""aiohttp's server with our limits, and our error object for requests that never reach a route."""

import asyncio
import ssl
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage, StreamWriter
from aiohttp.streams import StreamReader
from aiohttp.typedefs import Handler

from services.gateway.http.connection import HttpConnection, ReadingCheck
from services.gateway.http.connection_limit import ConnectionLimit
from services.gateway.http.failures import error_response
from services.gateway.http.head_parser import (
    EXPECTED,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_URL_BYTES,
    VERSION_WORDS,
    take_expectation,
)
from shared.link.tcp import BACKLOG, listen_on_both
from shared.settings.gateway import GatewayConfig

CLEANUP_S = 1.0


@web.middleware
async def check_head(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Each header and their number are limited while they are read, their sum here, for a head may
    have come at once."""
    num_bytes = sum(len(name) + len(value) for name, value in request.raw_headers)
    if num_bytes > MAX_HEAD_BYTES:
        raise web.HTTPRequestHeaderFieldsTooLarge(
            reason=f"headers of {num_bytes} bytes; the limit is {MAX_HEAD_BYTES}"
        )
    if request.version not in (HttpVersion10, HttpVersion11):
        raise web.HTTPVersionNotSupported(reason=VERSION_WORDS)
    return await handler(request)


class HttpRunner(web.AppRunner):
    """Runs ``app``. A handler is cancelled when its client leaves; ``cleanup`` gives running
    handlers ``CLEANUP_S``."""

    def __init__(self, app: web.Application, config: GatewayConfig) -> None:
        super().__init__(app, shutdown_timeout=CLEANUP_S, access_log=None)
        self._config = config

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self._config)


class HttpSite(web.TCPSite):
    """The address on which ``runner`` listens. aiohttp's own leaves clients a minute for the TLS
    handshake, and on ``::`` serves no IPv4."""

    def __init__(
        self, runner: HttpRunner, config: GatewayConfig, tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(
            *(runner, config.host, config.port),
            ssl_context=tls,
            backlog=BACKLOG,
            reuse_port=config.reuse_port,
        )
        self._is_port_shared = config.reuse_port
        self._handshake_timeout_s = None if tls is None else config.header_timeout_s

    async def start(self) -> None:
        await web.BaseSite.start(self)
        assert self._runner.server is not None
        host, port, is_shared = self._host or "", self._port, self._is_port_shared
        both = listen_on_both(host, port, reuse_port=is_shared)
        where: dict[str, Any] = {"host": host, "port": port, "reuse_port": is_shared}
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,
            **(where if both is None else {"sock": both}),
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=self._handshake_timeout_s,
        )


class _Server(web.Server):
    """``server``, with our own connections."""

    def __init__(self, server: web.Server, config: GatewayConfig) -> None:
        super().__init__(
            self._answer, request_factory=self._make_request, handler_cancellation=True
        )
        self._make = server.request_factory
        self._handle = server.request_handler
        self._config = config
        self._open = ConnectionLimit()

    def __call__(self) -> web.RequestHandler:
        return HttpConnection(
            self,
            self._open,
            self._config.header_timeout_s,
            self._config.stream_heartbeat_s,
            ReadingCheck(self._config.slow_client_s),
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self._config.keep_alive_timeout_s,
            access_log=None,
            max_line_size=MAX_URL_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=MAX_HEADERS,
        )

    def _make_request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        connection: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        if message.method == hdrs.METH_HEAD:
            writer = _HeadWriter(connection, asyncio.get_running_loop())
        assert isinstance(connection, HttpConnection)
        connection.begin_request(writer)
        message, expected = take_expectation(message)
        request = self._make(message, payload, connection, writer, task)
        if expected:
            request[EXPECTED] = expected
        return request

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, HttpConnection)
        if connection.refusal is not None:
            response = error_response(connection.refusal, request)
            response.force_close()
            return response
        try:
            return await self._handle(request)
        finally:
            connection.end_request()


class _HeadWriter(StreamWriter):
    """Writes only the head of an answer: on a kept connection, bytes after the head of an answer to
    HEAD are the beginning of the next answer."""

    async def write(self, chunk: object, **options: Any) -> None:
        self.send_headers()

    async def write_eof(self, chunk: bytes = b"") -> None:
        self.set_eof()
        await self.drain()
