"""Our objects as the bytes of a response: JSON, or server-sent events of it."""

from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from shared.errors import RequestError

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % encode(data)


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode(body), status=status, content_type="application/json")


class Error(Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct):
    error: Error


def error_body(error: RequestError) -> ErrorReply:
    return ErrorReply(Error(error.message, error.type, error.param, error.code))


def error_event(error: RequestError) -> bytes:
    return event(error_body(error))
