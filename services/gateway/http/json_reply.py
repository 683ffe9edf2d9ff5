"""Our objects as the bytes of a response: JSON, or server-sent events of it."""

from typing import Any

import msgspec
from aiohttp import web

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % encode(data)


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=encode(body), status=status, content_type="application/json")
