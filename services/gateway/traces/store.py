"""The traces a gateway keeps: of the most recent requests, up to a number of bytes."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.gateway.traces.context import TraceContext
from services.gateway.traces.request_trace import RequestTrace, request_and_prompt
from shared.wire.messages import SpanReport
from shared.wire.spans import unix_s

ENTRY_BYTES = 2000  # Python's memory for a trace without its spans, approximately

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(SpanReport)


@dataclass(slots=True, eq=False)
class Kept:
    """The trace of an ended request, in unix time. Late reports are added."""

    trace: RequestTrace
    start_s: float
    duration_s: float
    reports: list[bytes]
    num_bytes: int = ENTRY_BYTES

    def add(self, report: SpanReport) -> int:
        """Returns the number of bytes added."""
        data = _encode(report)
        self.reports.append(data)
        self.num_bytes += len(data)
        return len(data)

    def decoded(self) -> list[SpanReport]:
        """The gateway's own report is the first."""
        return [_decoder.decode(data) for data in self.reports]


class TraceStore:
    """Keeps up to ``max_bytes`` of reports, none older than ``age_s``; with 0 bytes it traces
    nothing. ``on_end`` is called with each trace at the end of its request."""

    def __init__(self, instance: str, max_bytes: int, age_s: float) -> None:
        self._instance = instance
        self.on_end: Callable[[Kept], None] = lambda kept: None
        self._max_bytes = max_bytes
        self._age_s = age_s
        self._open: dict[str, RequestTrace] = {}
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # oldest first
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def trace(self, context: TraceContext, route: str) -> RequestTrace:
        """Follows a new request. Its trace is kept if the request reaches the mesh."""
        return RequestTrace(context, route, self._begin)

    def _begin(self, trace: RequestTrace, name: str) -> bool:
        if self.is_on:
            trace.name = name
            self._open[name] = trace
        return self.is_on

    def add(self, report: SpanReport) -> None:
        """Reports of unknown requests, or of dropped traces, are ignored."""
        (name, _), now_s = request_and_prompt(report), time.monotonic()
        if (trace := self._open.get(name)) is not None:
            if placed := trace.place(report, now_s):
                trace.reports.append(placed)
        elif (kept := self._kept.get(name)) is not None:
            if placed := kept.trace.place(report, now_s):
                self._num_bytes += kept.add(placed)
            self._make_room(now_s)

    def end(self, trace: RequestTrace) -> Kept | None:
        """Keeps the trace if its request has reached the mesh."""
        if self._open.pop(trace.name, None) is None:
            return None
        now_s = time.monotonic()
        kept = Kept(trace, unix_s(trace.started_s), now_s - trace.started_s, [])
        for report in (trace.own_report(self._instance, now_s), *trace.reports):
            kept.add(report)
        trace.reports.clear()
        self._kept[trace.name] = kept
        self._num_bytes += kept.num_bytes
        self._make_room(now_s)
        self.on_end(kept)
        return kept

    def find(self, trace_id: str, owner: str) -> Kept | None:
        """The newest trace of ``owner`` with this id: the request's, a reply's, or W3C's."""
        self._make_room(time.monotonic())
        for kept in reversed(self._kept.values()):
            trace = kept.trace
            if trace.owner == owner and (
                trace_id in trace.ids or trace_id == trace.context.trace_id
            ):
                return kept
        return None

    def last(self, owner: str, limit: int, is_by_duration: bool) -> list[Kept]:
        """Up to ``limit`` traces of ``owner``, the newest or the slowest first."""
        self._make_room(time.monotonic())
        own = [kept for kept in reversed(self._kept.values()) if kept.trace.owner == owner]
        if is_by_duration:
            own.sort(key=lambda kept: -kept.duration_s)
        return own[:limit]

    def _make_room(self, now_s: float) -> None:
        oldest_s = unix_s(now_s) - self._age_s
        while self._kept:
            kept = next(iter(self._kept.values()))
            ended_s = kept.start_s + kept.duration_s
            if self._num_bytes <= self._max_bytes and ended_s >= oldest_s:
                return
            self._kept.popitem(last=False)
            self._num_bytes -= kept.num_bytes
