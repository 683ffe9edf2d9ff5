"""Exports traces to OpenTelemetry collectors: OTLP over HTTP, with its SDK (the extra ``otel``)."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from services.gateway.traces.objects import SpanObject, spans_of
from services.gateway.traces.store import Kept
from shared.version import VERSION
from shared.wire.messages import SpanValue

LATE_S = 2.0
"""Delay between a request's end and the export of its trace, for late reports."""
# Attributes with a name in the semantic conventions; the others keep ours.
CONVENTIONS = {
    "status": "http.response.status_code",
    "model": "gen_ai.request.model",
    "num_prompt_tokens": "gen_ai.usage.input_tokens",
    "num_output_tokens": "gen_ai.usage.output_tokens",
    "code": "error.type",
}
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpExport:
    """Sends traces to ``endpoint``, except traces that their clients do not record. A thread of the
    SDK sends them in batches, and drops them if the collector does not keep up."""

    def __init__(self, endpoint: str) -> None:
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint))
        self._waiting: dict[Kept, asyncio.TimerHandle] = {}

    def send_later(self, kept: Kept) -> None:
        """Called at the end of the trace's request."""
        if kept.trace.context.is_sampled:
            loop = asyncio.get_running_loop()
            self._waiting[kept] = loop.call_later(LATE_S, self._send, kept)

    async def close(self) -> None:
        """Sends the waiting traces, as far as the collector accepts them in a few seconds."""
        for kept, timer in list(self._waiting.items()):
            timer.cancel()
            self._send(kept)
        await asyncio.get_running_loop().run_in_executor(None, self._processor.shutdown)

    def _send(self, kept: Kept) -> None:
        del self._waiting[kept]
        for span in spans_of(kept):
            self._processor.on_end(_exported(span, kept))


def _exported(span: SpanObject, kept: Kept) -> ReadableSpan:
    """A span built as a whole, since it has ended elsewhere, without a tracer."""
    context, is_whole = kept.trace.context, span.parent is None
    parent_id = span.parent or context.parent_id
    start_ns = round(span.start * 1e9)
    resource = {
        "service.name": f"shoal-{span.service.role}",
        "service.instance.id": span.service.instance,
        "service.version": VERSION,
    }
    return ReadableSpan(
        span.name,
        _context(context.trace_id, span.id, is_remote=False),
        _context(context.trace_id, parent_id, is_remote=is_whole) if parent_id else None,
        Resource(resource),
        _named(span.attributes, CONVENTIONS if is_whole else {}),
        kind=SpanKind.SERVER if is_whole else SpanKind.INTERNAL,
        status=_status(span) if is_whole else Status(StatusCode.UNSET),
        start_time=start_ns,
        end_time=start_ns + round(span.duration_ms * 1e6),
    )


def _context(trace_id: str, span_id: str, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, SAMPLED)


def _named(attributes: Mapping[str, SpanValue], names: Mapping[str, str]) -> dict[str, SpanValue]:
    return {names.get(name, f"shoal.{name}"): value for name, value in attributes.items()}


def _status(whole: SpanObject) -> Status:
    """A server's span is an error if the server is to blame."""
    status = whole.attributes.get("status")
    is_error = isinstance(status, int) and status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return Status(StatusCode.ERROR if is_error else StatusCode.UNSET)
