"""Every failure reaches the client as the error object of its API: OpenAI's, or another shape."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from msgspec import Struct

from services.gateway.http.client import CLIENT
from services.gateway.http.head_parser import CODINGS, UnsupportedCoding
from services.gateway.http.json_reply import error_body, json_response
from services.gateway.http.log_limit import LogLimit
from services.gateway.http.request_id import request_id
from services.gateway.http.request_log import ERROR_CODE, log_request
from services.gateway.http.routes import route_of
from services.gateway.http.violations import show
from services.gateway.metrics import HTTP_REQUESTS, STREAM_ERRORS
from shared.errors import (
    DEADLY,
    RETRY_AFTER_S,
    STORE_FAILED,
    InternalError,
    RequestError,
    Unavailable,
)
from shared.process.log import client_text

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

CLIENT_LEFT = 499
SERVER = "shoal"  # aiohttp would name itself and Python, with versions
OUT_OF_MEMORY = Unavailable(
    "the gateway has no memory for this request", code="out_of_memory", retry_after_s=RETRY_AFTER_S
)
HINTS = (hdrs.ALLOW, hdrs.ACCEPT)
"""Headers that describe an acceptable request."""
SHOULD_RETRY = "X-Should-Retry"
"""OpenAI's clients obey this header; without it they try again after each 5xx."""


class ErrorShape(NamedTuple):
    """Errors of an API other than OpenAI's: the requests they apply to, their status, the body of
    an error and the id of its request."""

    is_for: Callable[[web.BaseRequest], bool]
    status: Callable[[RequestError], int]
    body: Callable[[RequestError, str], Struct]


_shapes: list[ErrorShape] = []


def add_error_shape(shape: ErrorShape) -> None:
    if shape not in _shapes:
        _shapes.append(shape)


def error_response(error: RequestError, request: web.BaseRequest | None = None) -> web.Response:
    """OpenAI's shape if there is no ``request``."""
    response = json_response(error_body(error), error.status)
    for shape in _shapes:
        if request is not None and shape.is_for(request):
            response = json_response(shape.body(error, request_id(request)), shape.status(error))
    response.headers[hdrs.SERVER] = SERVER
    if error.retry_after_s is not None:
        response.headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after_s)))
    if error.code in DEADLY or error.code == STORE_FAILED:
        response.headers[SHOULD_RETRY] = "false"
    if isinstance(error, UnsupportedCoding):
        response.headers[hdrs.ACCEPT_ENCODING] = ", ".join(CODINGS)
    if error.status == HTTPStatus.UNAUTHORIZED:
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return response


async def name_server(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = SERVER


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts and logs each request once, when it ends."""
    started_s, status = time.monotonic(), CLIENT_LEFT
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        HTTP_REQUESTS.labels(route_of(request), status).inc()
        log_request(request, status, time.monotonic() - started_s)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The edge of one request: only cancellation passes it."""
    try:
        return await handler(request)
    except RequestError as error:
        return await _answer(request, error)
    except web.HTTPException as error:
        return _from_aiohttp(request, error)
    except asyncio.CancelledError:
        request[ERROR_CODE] = "client_left"
        raise
    except ConnectionError:
        request[ERROR_CODE] = "client_left"
        client = request.get(CLIENT)
        return client.response if client is not None else web.Response(status=CLIENT_LEFT)
    except MemoryError:
        log.error("request %s is refused: there is no memory for it", request_id(request))
        return await _answer(request, OUT_OF_MEMORY)
    except Exception:
        log.exception("request %s broke", request_id(request))
        return await _answer(request, InternalError("the request broke inside the server"))


async def _answer(request: web.Request, error: RequestError) -> web.StreamResponse:
    """The error as the response, or as the end of a stream that has begun. A begun reply that is no
    stream is cut off: JSON has no place for an error after its beginning."""
    request[ERROR_CODE] = error.code
    if CLIENT not in request:
        return error_response(error, request)
    client = request[CLIENT]
    STREAM_ERRORS.inc()
    log.warning("reply %s failed: %s", request_id(request), client_text(error.message))
    if not client.is_stream:
        client.cut_off()
        return client.response
    with suppress(ConnectionError):
        await client.write(client.failure(error))
        await client.end()
    return client.response


def _from_aiohttp(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own errors: an unknown route, a method that is not allowed, a body too large."""
    failure = RequestError(
        f"{request.method} {show(request.path)}: {error.reason}{_hint(request, error)}",
        code=HTTPStatus(error.status).name.lower(),
    )
    failure.status, failure.type = error.status, "invalid_request_error"
    request[ERROR_CODE] = failure.code
    response = error_response(failure, request)
    for name in {*HINTS} & {*error.headers}:
        response.headers[name] = error.headers[name]
    return response


def _hint(request: web.Request, error: web.HTTPException) -> str:
    """For a base URL that lacks its /v1."""
    if error.status != HTTPStatus.NOT_FOUND:
        return ""
    path = f"/v1{request.path}"
    is_ours = any(each.canonical == path for each in request.app.router.resources())
    return f"; did you mean {path}?" if is_ours else ""
