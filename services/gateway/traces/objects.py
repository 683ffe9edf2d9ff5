"""Traces in the form shown to clients."""

from collections import defaultdict

import msgspec

from services.gateway.traces.store import Kept
from shared.wire.messages import ServiceName, SpanReport, SpanValue

DEPTHS: dict[ServiceName, int] = {"gateway": 0, "tokenizer": 1, "scheduler": 2, "worker": 3}


class Service(msgspec.Struct):
    role: str
    instance: str


class SpanObject(msgspec.Struct):
    """``start`` is unix time in seconds. The span with ``parent`` None is the whole request."""

    id: str
    parent: str | None
    service: Service
    name: str
    start: float
    duration_ms: float
    attributes: dict[str, SpanValue]


class TraceSummary(msgspec.Struct):
    id: str
    trace_id: str
    route: str
    start: float
    duration_ms: float
    attributes: dict[str, SpanValue]
    object: str = "trace.summary"


class TraceObject(msgspec.Struct):
    id: str
    trace_id: str
    parent_id: str | None
    route: str
    start: float
    duration_ms: float
    spans: list[SpanObject]
    object: str = "trace"


class TraceList(msgspec.Struct):
    data: list[TraceSummary]
    object: str = "list"


def summary(kept: Kept) -> TraceSummary:
    trace = kept.trace
    return TraceSummary(
        *(_public_id(kept), trace.context.trace_id, trace.route),
        *(kept.start_s, _ms(kept.duration_s), trace.attributes),
    )


def trace_object(kept: Kept) -> TraceObject:
    """Spans are sorted by start; of several with one start the longest is first."""
    trace, context = kept.trace, kept.trace.context
    whole, *spans = spans_of(kept)
    spans.sort(key=lambda span: (span.start, -span.duration_ms))
    return TraceObject(
        *(_public_id(kept), context.trace_id, context.parent_id or None, trace.route),
        *(kept.start_s, _ms(kept.duration_s), [whole, *spans]),
    )


def spans_of(kept: Kept) -> list[SpanObject]:
    """All spans with unique ids, the whole request first."""
    own, *others = kept.decoded()
    root = kept.trace.context.span_id
    spans = _spans(own, 0, root, root)
    spans[0].parent = None
    parents = _Parents(root)
    for number, report in sorted(enumerate(others, 1), key=lambda item: DEPTHS[item[1].service]):
        found = _spans(report, number, root, parents.of(report))
        parents.note(report, found)
        spans += found
    return spans


class _Parents:
    """Finds a report's parent span: a stay of the sequence for a worker's, the prompt for a
    sequence's, the request for a prompt's."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._prompts: dict[tuple[str, int], str] = {}
        self._sequences: dict[tuple[str, int], str] = {}
        self._stays: dict[tuple[str, int, str], list[str]] = defaultdict(list)

    def note(self, report: SpanReport, spans: list[SpanObject]) -> None:
        name = report.request, report.attempt
        if report.service == "tokenizer" and spans:
            self._prompts[name] = spans[0].id
        elif report.service == "scheduler" and spans:
            self._sequences[name] = spans[0].id
            for span in spans:
                if worker := span.attributes.get("worker"):
                    self._stays[*name, str(worker)].append(span.id)

    def of(self, report: SpanReport) -> str:
        name = report.request, report.attempt
        match report.service:
            case "scheduler":
                return self._prompts.get((report.request.rpartition("/")[0], name[1]), self._root)
            case "worker":
                stays = self._stays[*name, report.instance]
                return stays.pop(0) if stays else self._sequences.get(name, self._root)
            case _:
                return self._root


def _spans(report: SpanReport, number: int, root: str, parent: str) -> list[SpanObject]:
    """The spans of report ``number``. ``parent`` is the parent of spans that name none before
    them."""
    service = Service(report.service, report.instance)
    return [
        SpanObject(
            id=_span_id(root, number, index),
            parent=_span_id(root, number, span.parent - 1) if 0 < span.parent <= index else parent,
            service=service,
            name=span.name,
            start=span.start_s,
            duration_ms=_ms(span.duration_s),
            attributes=span.attributes,
        )
        for index, span in enumerate(report.spans)
    ]


def _span_id(root: str, number: int, index: int) -> str:
    """The id of span ``index`` of report ``number``; 0 of 0 is the ``root``."""
    return f"{int(root, 16) ^ (number << 32 | index):016x}"


def _public_id(kept: Kept) -> str:
    return kept.trace.name.partition("~")[0]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
