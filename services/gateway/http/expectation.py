"""``Expect``: a client that waits for our permission to send its body (RFC 9110, 10.1.1)."""

from typing import Any

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict, CIMultiDictProxy

from services.gateway.http.violations import show

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EXPECTED = web.RequestKey("expected", str)
"""The request's ``Expect`` value, if any."""


def take_expectation(message: Any) -> tuple[Any, str]:
    """``message`` without ``Expect``, and its value: otherwise aiohttp would answer before the
    request is checked."""
    if message.version < HttpVersion11 or hdrs.EXPECT not in message.headers:
        return message, ""
    headers = CIMultiDict(message.headers)
    expected = ", ".join(headers.popall(hdrs.EXPECT))
    return message._replace(headers=CIMultiDictProxy(headers)), expected


@web.middleware
async def check_expectation(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises web.HTTPExpectationFailed."""
    expected = request.get(EXPECTED, "")
    if expected and expected.lower() != "100-continue":
        raise web.HTTPExpectationFailed(
            reason=f"Expect is {show(expected)}; only 100-continue is known"
        )
    return await handler(request)


async def let_continue(request: web.Request) -> None:
    """Asks for the body."""
    if request.get(EXPECTED):
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0  # aiohttp would take it for a response that has begun
