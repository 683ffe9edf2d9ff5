"""Stored traces, their lifetimes, and the placement of other hosts' spans."""

import time

import pytest

from services.gateway.traces.context import trace_context
from services.gateway.traces.objects import SpanObject, spans_of
from services.gateway.traces.request_trace import MAX_REPORTED, RequestTrace
from services.gateway.traces.store import Kept, TraceStore
from shared.wire.messages import MAX_SPANS, Span, SpanReport

ROUTE = "/v1/completions"


def begun(store: TraceStore, name: str, owner: str = "") -> RequestTrace:
    trace = store.trace(trace_context(None), ROUTE)
    trace.note_ids({name})
    trace.owner = owner
    trace.begin(f"{name}~1")
    assert trace.is_traced
    return trace


def report(request: str, *spans: Span, service: str = "scheduler") -> SpanReport:
    return SpanReport(request, 1, service, "s", list(spans))  # type: ignore[arg-type]


def found(store: TraceStore, name: str, owner: str = "") -> Kept:
    kept = store.find(name, owner)
    assert kept is not None
    return kept


def span_of(store: TraceStore, name: str) -> SpanObject:
    """The last span of request ``a``."""
    (span,) = (span for span in spans_of(found(store, "a")) if span.name == name)
    return span


def test_the_oldest_go_when_there_is_no_room_and_when_they_are_old(monkeypatch) -> None:
    store = TraceStore("g", 10_000, 60.0)
    for number in range(10):
        store.end(begun(store, str(number)))
    kept = [next(iter(each.trace.ids)) for each in store.last("", 100, is_by_duration=False)]
    assert 1 < len(kept) < 6
    assert kept == [str(9 - number) for number in range(len(kept))]
    later_s = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later_s)
    assert store.find("9", "") is None
    assert store.last("", 100, is_by_duration=False) == []


def test_a_trace_is_found_by_its_owner_alone_and_by_all_of_its_ids() -> None:
    store = TraceStore("g", 1 << 20, 60.0)
    trace = begun(store, "a", owner="me")
    assert store.find("a", "me") is None, "it is not over"
    store.end(trace)
    assert found(store, "a", "me") is found(store, trace.context.trace_id, "me")
    assert store.find("a", "you") is None
    assert store.last("you", 10, is_by_duration=True) == []


def test_late_spans_are_added_and_unknown_ones_skipped() -> None:
    store = TraceStore("g", 1 << 20, 60.0)
    store.end(begun(store, "a"))
    for name in ("a~1/0/0", "b~1/0/0"):
        store.add(report(name, Span("late", time.time(), 0.0)))
    assert span_of(store, "late").service.role == "scheduler"


@pytest.mark.parametrize(("shift_s", "shown"), [(0.0, False), (-3600.0, True), (3600.0, True)])
def test_spans_of_a_wrong_clock_are_shifted(shift_s: float, shown: bool) -> None:
    store = TraceStore("g", 1 << 20, 60.0)
    trace = begun(store, "a")
    trace.begin_attempt(0, 1, "t", time.monotonic() - 10)
    before_s = time.time()
    start_s = before_s - 5 + shift_s
    parts = Span("whole", start_s, 2.0), Span("part", start_s + 1, 1.0, 1)
    store.add(report("a~1/0/0", *parts))
    store.end(trace)
    whole, part = span_of(store, "whole"), span_of(store, "part")
    assert before_s - 10.1 <= whole.start <= before_s - 1.9
    assert part.start - whole.start == pytest.approx(1.0, abs=1e-3)
    assert (whole.duration_ms, part.duration_ms) == (2000.0, 1000.0)
    assert part.parent == whole.id
    assert ("clock_shift_ms" in whole.attributes) == shown


def test_a_trace_has_a_bound_and_a_span_without_a_parent_belongs_to_the_request() -> None:
    store = TraceStore("g", 1 << 24, 60.0)
    trace = begun(store, "a")
    now_s = time.time()
    many = [Span("n", now_s, 0.0, parent=5000)] * MAX_SPANS
    for _ in range(2 * MAX_REPORTED // MAX_SPANS):
        store.add(report("a~1/0/0", *many))
    store.end(trace)
    whole, *others = spans_of(found(store, "a"))
    assert MAX_REPORTED - MAX_SPANS < len(others) <= MAX_REPORTED
    assert {span.parent for span in others} == {whole.id}
    assert len({span.id for span in others}) == len(others)


def test_without_room_nothing_is_traced() -> None:
    store = TraceStore("g", 0, 60.0)
    trace = store.trace(trace_context(None), ROUTE)
    trace.begin("a~1")
    trace.begin_attempt(0, 1, "t", 0.0)
    assert not trace.is_traced
    assert not trace.attempts
    assert store.end(trace) is None


def test_the_gateways_own_spans_can_be_read_back_at_any_size() -> None:
    store = TraceStore("g", 1 << 24, 60.0)
    trace = begun(store, "a")
    for number in range(2 * MAX_SPANS):
        trace.begin_attempt(0, number, "t", time.monotonic())
        trace.end_attempt(0, number, "scheduler " + "x" * 256, time.monotonic())
    store.end(trace)
    whole, *attempts = spans_of(found(store, "a"))
    assert 100 < len(attempts) < MAX_SPANS
    assert {span.parent for span in attempts} == {whole.id}
