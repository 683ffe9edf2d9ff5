"""Logs one line for each request, when it ends."""

from aiohttp import web

from services.gateway.http.account import ACCOUNT
from services.gateway.http.request_id import request_id
from services.gateway.http.request_meter import RequestMeter
from services.gateway.http.routes import route_of
from shared.process.log import log_end

METER = web.RequestKey("meter", RequestMeter)
"""The measurements of a generation request."""

ERROR_CODE = web.RequestKey("error_code", str)
"""Why a request failed; a stream may fail after its status 200."""

QUIET_ROUTES = {
    "/health",
    "/ready",
    "/ping",
    "/load",
    "/metrics",
    "/v1/metrics",
    "/v1/mesh",
    "/page/{name}",
}
"""Polled by machines every few seconds, or requested by browsers for many files at once."""


def log_request(request: web.Request, status: int, total_s: float) -> None:
    route, code = route_of(request), request.get(ERROR_CODE)
    if route in QUIET_ROUTES and code is None:
        return
    facts = request[METER].facts() if METER in request else {}
    log_end(
        "request ended",
        request_id(request),
        route=route,
        status=status,
        code=code,
        key=request[ACCOUNT].key_id if ACCOUNT in request else None,
        **facts,
        total_s=total_s,
    )
