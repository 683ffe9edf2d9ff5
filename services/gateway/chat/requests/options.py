"""The fields of a request that become its options in the mesh."""

from typing import Protocol

from shared.errors import InvalidRequest
from shared.wire.envelope import RequestOptions


class OptionFields(Protocol):
    priority: int | None
    cache_salt: str | None


def request_options(fields: OptionFields, max_priority_boost: int) -> RequestOptions:
    """The options set by the client. Raises InvalidRequest."""
    return RequestOptions(
        priority=_priority(fields.priority or 0, max_priority_boost),
        salt=fields.cache_salt or "",
    )


def _priority(priority: int, max_boost: int) -> int:
    if priority < -max_boost:
        raise InvalidRequest(
            f"priority is {priority}; the lowest is {-max_boost}, since lower is sooner"
            f" (max-priority-boost = {max_boost})",
            param="priority",
        )
    return priority
