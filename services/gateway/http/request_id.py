"""The id of a request: its client's, or our own."""

import re
import uuid

from aiohttp import web

from services.gateway.http.violations import show
from shared.errors import InvalidRequest

HEADER = "X-Request-Id"
PATTERN = r"^[!-}]{1,128}\Z"
"""Printable ASCII but for space and ``~``, which separates an id from its nonce in the mesh."""

_ID = web.RequestKey("request_id", str)


def request_id(request: web.BaseRequest) -> str:
    """Constant for a request; 32 hex digits if the client gave none."""
    if _ID not in request:
        given = request.headers.get(HEADER, "")
        request[_ID] = given if re.match(PATTERN, given) else uuid.uuid4().hex
    return request[_ID]


def check_request_id(request: web.Request) -> None:
    """Raises InvalidRequest for an unacceptable id of the client."""
    given = request.headers.get(HEADER)
    if given is not None and not re.match(PATTERN, given):
        value = show(given.encode(errors="replace").decode())
        raise InvalidRequest(
            f"{HEADER} is {value}; expected 1 to 128 printable ASCII characters, no space and no ~",
            param=HEADER,
        )


def take_request_id(request: web.Request, given: str | None) -> None:
    """The id in the body counts where no header has one."""
    if given is not None and HEADER not in request.headers:
        request[_ID] = given


async def name_response(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers[HEADER] = request_id(request)
