"""Pages of a list, in OpenAI's way: ``after`` an id, at most ``limit``, in an ``order`` of time."""

import re
from collections.abc import Sequence
from typing import TypeVar

from aiohttp import web

from services.gateway.apis.batches.objects import BatchObject, FileObject, ObjectList
from services.gateway.apis.batches.runner import BatchRunner
from services.gateway.http.violations import show
from shared.errors import InvalidRequest, NotFound

Listed = TypeVar("Listed", FileObject, BatchObject)


def enabled(batches: BatchRunner | None) -> BatchRunner:
    """Raises NotFound."""
    if batches is None:
        raise NotFound(
            "this server has no files and batches: the setting batch-dir names no folder for them",
            code="batches_disabled",
        )
    return batches


def page(request: web.Request, objects: Sequence[Listed], max_limit: int, limit: int) -> ObjectList:
    """``limit`` is the default. Raises InvalidRequest."""
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {show(order)}; expected asc or desc", param="order")
    ordered = sorted(objects, key=lambda each: (each.created_at, each.id), reverse=order == "desc")
    start = _start(request.query.get("after"), [each.id for each in ordered])
    num = _limit(request.query.get("limit"), max_limit, limit)
    data = ordered[start : start + num]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return ObjectList(data, start + num < len(ordered), first, last)


def _start(after: str | None, ids: list[str]) -> int:
    if after is None:
        return 0
    if after not in ids:
        raise InvalidRequest(
            f"after is {show(after)}; there is nothing with this id", param="after"
        )
    return ids.index(after) + 1


def _limit(text: str | None, max_limit: int, default: int) -> int:
    if text is None:
        return default
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= max_limit:
        raise InvalidRequest(
            f"limit is {show(text)}; expected a number from 1 to {max_limit}", param="limit"
        )
    return int(text)
