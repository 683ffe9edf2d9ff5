"""Traces each request that reaches the mesh."""

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from services.gateway.http.account import owner_of
from services.gateway.http.failures import CLIENT_LEFT
from services.gateway.http.request_log import ERROR_CODE, METER
from services.gateway.http.routes import OBSERVER, Load, route_of
from services.gateway.mesh.observer import Attributes
from services.gateway.traces.context import HEADER, trace_context
from services.gateway.traces.request_trace import RequestTrace
from services.gateway.traces.store import TraceStore
from shared.wire.messages import MAX_NAME_CHARS

TRACE = web.RequestKey("trace", RequestTrace)


class Tracing:
    def __init__(self, store: TraceStore, loads: Mapping[str, Load]) -> None:
        self._store = store
        self._loads = loads

    @web.middleware
    async def trace(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        route = route_of(request)
        if self._loads.get(route) is not Load.GENERATION:
            return await handler(request)
        trace = request[TRACE] = request[OBSERVER] = self._store.trace(
            trace_context(request.headers.get(HEADER)), route
        )
        status = CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            trace.owner = owner_of(request)
            trace.attributes = _facts(request, status)
            self._store.end(trace)


def _facts(request: web.Request, status: int) -> Attributes:
    facts = request[METER].facts() if METER in request else {}
    if "model" in facts:
        facts["model"] = facts["model"][:MAX_NAME_CHARS]
    if (ttft_s := facts.pop("ttft_s", None)) is not None:
        facts["ttft_ms"] = round(1000 * ttft_s, 3)
    code = {"code": request[ERROR_CODE]} if ERROR_CODE in request else {}
    return {"status": status, **code, **facts}


async def answer_trace(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Shows the client its request's trace id."""
    if (trace := request.get(TRACE)) is not None:
        response.headers[HEADER] = trace.context.traceparent
