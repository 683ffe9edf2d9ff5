"""``/v1/traces``: the time spent in each part of a request. A client sees traces of its own API
key."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler

from services.gateway.api import Api, Core
from services.gateway.http.account import owner_of
from services.gateway.http.failures import CLIENT_LEFT
from services.gateway.http.json_reply import json_response
from services.gateway.http.request_log import ERROR_CODE, METER
from services.gateway.http.routes import OBSERVER, Load, route_of
from services.gateway.http.violations import show
from services.gateway.mesh.observer import Attributes
from services.gateway.traces.context import HEADER, trace_context
from services.gateway.traces.objects import TraceList, summary, trace_object
from services.gateway.traces.request_trace import RequestTrace
from services.gateway.traces.store import TraceStore
from shared.errors import ConfigError, InvalidRequest, NotFound
from shared.settings.gateway import GatewayConfig
from shared.wire.messages import MAX_NAME_CHARS

TRACE = web.RequestKey("trace", RequestTrace)


class Tracing:
    """Traces each request that reaches the mesh."""

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


if TYPE_CHECKING:
    from services.gateway.traces.otlp import OtlpExport

ROUTE = "/v1/traces"
MAX_LISTED = 100
NUM_LISTED = 20
MAX_AGE_S = 3600.0
NEWEST, SLOWEST = "newest", "slowest"


class Traces(Api):
    cheap_routes = ROUTE, ROUTE + "/{id}"

    def __init__(self, core: Core) -> None:
        """Raises ConfigError."""
        config = core.config
        self._store = TraceStore(config.instance, config.trace_store_bytes, MAX_AGE_S)
        self._otlp = _otlp_export(config)
        if self._otlp is not None:
            self._store.on_end = self._otlp.send_later
        core.mesh.on_report = self._store.add
        self.middleware = Tracing(self._store, core.loads).trace
        self.prepare = answer_trace

    def routes(self) -> list[web.RouteDef]:
        return [web.get(ROUTE, self._list), web.get(ROUTE + "/{id:.+}", self._get)]

    async def close(self) -> None:
        if self._otlp is not None:
            await self._otlp.close()

    async def _list(self, request: web.Request) -> web.Response:
        self._check_on()
        order, limit = request.query.get("order", NEWEST), _limit(request.query.get("limit"))
        if order not in (NEWEST, SLOWEST):
            raise InvalidRequest(
                f"order is {show(order)}; expected {NEWEST} or {SLOWEST}", param="order"
            )
        found = self._store.last(owner_of(request), limit, is_by_duration=order == SLOWEST)
        return json_response(TraceList([summary(kept) for kept in found]))

    async def _get(self, request: web.Request) -> web.Response:
        self._check_on()
        trace_id = request.match_info["id"]
        if (kept := self._store.find(trace_id, owner_of(request))) is None:
            raise NotFound(
                f"there is no trace {show(trace_id)}: it is kept when the request has ended, by the"
                " gateway that served it, for an hour at most, as far as trace-store-bytes allows",
                code="trace_not_found",
            )
        return json_response(trace_object(kept))

    def _check_on(self) -> None:
        if not self._store.is_on:
            raise NotFound(
                "this server keeps no traces: trace-store-bytes is 0", code="traces_disabled"
            )


def _otlp_export(config: GatewayConfig) -> "OtlpExport | None":
    """None without an endpoint. Raises ConfigError."""
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from services.gateway.traces.otlp import OtlpExport
    except ImportError as error:
        raise ConfigError(
            "otlp-traces-endpoint needs OpenTelemetry's SDK, a part of shoal's extra `otel`:"
            f" {error}"
        ) from None
    return OtlpExport(config.otlp_traces_endpoint)


def _limit(text: str | None) -> int:
    """Raises InvalidRequest."""
    if text is None:
        return NUM_LISTED
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_LISTED:
        raise InvalidRequest(f"limit is {show(text)}; expected 1 to {MAX_LISTED}", param="limit")
    return int(text)
