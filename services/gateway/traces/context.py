"""Trace context of a request from the client's header ``traceparent`` (W3C Trace Context, level 1).

https://www.w3.org/TR/trace-context/
"""

import re
from dataclasses import dataclass
from random import getrandbits

HEADER = "traceparent"
SAMPLED = 1

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Ids in hex digits: ``span_id`` of the request here, ``parent_id`` of the client's span, empty
    without one. The client records the trace only if it ``is_sampled``."""

    trace_id: str
    span_id: str
    parent_id: str = ""
    is_sampled: bool = True

    @property
    def traceparent(self) -> str:
        """The header for services called after this one."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def trace_context(traceparent: str | None) -> TraceContext:
    """Continues the client's trace, or begins one if the header is missing or invalid."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    span_id = _new_id(64)
    if match is None or not _is_valid(*match.groups()):
        return TraceContext(_new_id(128), span_id)
    _, trace_id, parent_id, flags, _ = match.groups()
    return TraceContext(trace_id, span_id, parent_id, bool(int(flags, 16) & SAMPLED))


def _new_id(num_bits: int) -> str:
    """Random, not zero, and no secret."""
    return f"{getrandbits(num_bits) or 1:0{num_bits // 4}x}"


def _is_valid(version: str, trace_id: str, parent_id: str, flags: str, rest: str | None) -> bool:
    """Later versions may add fields after the flags. Ids of zeros alone are invalid."""
    is_version = version != "ff" and (version != "00" or rest is None)
    return is_version and int(trace_id, 16) != 0 and int(parent_id, 16) != 0
