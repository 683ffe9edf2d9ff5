"""Recognizes requests of Anthropic's API, and the common parts of their responses."""

from aiohttp import web

from services.gateway.http.request_id import request_id

MESSAGES = "/v1/messages"
VERSION = "Anthropic-Version"
REQUEST_ID = "Request-Id"


def is_anthropic(request: web.BaseRequest) -> bool:
    """Recognized by the path, or by the header that Anthropic's clients always send."""
    path = request.path
    return path == MESSAGES or path.startswith(f"{MESSAGES}/") or VERSION in request.headers


async def name_message(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Adds the request's id in the header that Anthropic's clients read."""
    if is_anthropic(request):
        response.headers[REQUEST_ID] = request_id(request)
