"""W3C's traceparent: adopted, or created if missing."""

import pytest

from services.gateway.traces.context import trace_context

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "is_sampled"), [("01", True), ("00", False), ("03", True)])
def test_a_clients_trace_goes_on(flags: str, is_sampled: bool) -> None:
    context = trace_context(f"00-{TRACE}-{PARENT}-{flags}")
    assert (context.trace_id, context.parent_id) == (TRACE, PARENT)
    assert context.is_sampled == is_sampled
    assert context.span_id != PARENT
    assert context.traceparent == f"00-{TRACE}-{context.span_id}-{int(is_sampled):02x}"


@pytest.mark.parametrize(
    "header",
    [
        None, "", "nonsense", f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-more",
        f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}-1",
    ],
)  # fmt: skip
def test_a_malformed_traceparent_begins_a_new_trace(header: str | None) -> None:
    first, second = trace_context(header), trace_context(header)
    assert first.trace_id not in (TRACE, second.trace_id)
    assert first.parent_id == ""
    assert trace_context(first.traceparent).parent_id == first.span_id


def test_a_later_version_may_say_more() -> None:
    assert trace_context(f"01-{TRACE}-{PARENT}-01-more").trace_id == TRACE
