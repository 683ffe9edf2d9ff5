"""The fields of a request that become its options in the mesh."""

from typing import Protocol

from services.gateway.chat.requests.schema import CacheRetention, Slo
from shared.errors import InvalidRequest
from shared.wire.envelope import MAX_RETENTION_S, Promise, RequestOptions


class OptionFields(Protocol):
    priority: int | None
    cache_salt: str | None


class PromiseFields(Protocol):
    priority: int | None
    slo: Slo | None


class RetentionFields(Protocol):
    cache_ttl: int | None
    prompt_cache_retention: CacheRetention | None


def request_options(
    fields: OptionFields,
    max_priority_boost: int,
    promise: Promise | None = None,
    retention_s: int = 0,
) -> RequestOptions:
    """The options set by the client. Raises InvalidRequest."""
    return RequestOptions(
        priority=_priority(fields.priority or 0, max_priority_boost),
        salt=fields.cache_salt or "",
        promise=promise,
        retention_s=retention_s,
    )


def retention_of(fields: RetentionFields) -> int:
    if fields.cache_ttl is not None:
        return fields.cache_ttl
    return MAX_RETENTION_S if fields.prompt_cache_retention == "24h" else 0


def promise_of(fields: PromiseFields, standing: Promise) -> Promise | None:
    """The times in the request, and for absent ones those of the ``standing`` promise to its API
    key. Requests of a later priority, as in batches, have their own times only.

    Raises InvalidRequest for a time that is shorter than the standing promise.
    """
    own = fields.slo or Slo()
    _check_promised("ttft_ms", own.ttft_ms, standing.ttft_ms)
    _check_promised("tpot_ms", own.tpot_ms, standing.tpot_ms)
    rest = Promise() if (fields.priority or 0) > 0 else standing
    promise = Promise(
        ttft_ms=rest.ttft_ms if own.ttft_ms is None else own.ttft_ms,
        tpot_ms=rest.tpot_ms if own.tpot_ms is None else own.tpot_ms,
    )
    return None if promise == Promise() else promise


def _check_promised(name: str, own_ms: float | None, shortest_ms: float | None) -> None:
    if own_ms is not None and shortest_ms is not None and own_ms < shortest_ms:
        raise InvalidRequest(
            f"slo.{name} is {own_ms:.10g}; the shortest time is {shortest_ms:.10g}"
            f" ({name.replace('_', '-')})",
            param=f"slo.{name}",
        )


def _priority(priority: int, max_boost: int) -> int:
    if priority < -max_boost:
        raise InvalidRequest(
            f"priority is {priority}; the lowest is {-max_boost}, since lower is sooner"
            f" (max-priority-boost = {max_boost})",
            param="priority",
        )
    return priority
