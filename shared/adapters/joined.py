"""The adapters of several workers as one list, and the adapter that a name stands for. Pure."""

from collections.abc import Iterable
from itertools import chain

from msgspec.msgpack import encode
from msgspec.structs import replace

from shared.wire.messages import MAX_ADAPTERS, Adapter

MAX_ROWS = 2 * MAX_ADAPTERS
MAX_LIST_BYTES = 2 << 20  # of the 4 MiB of a header
MAX_WORKERS = 2**31 - 1


def join(lists: Iterable[Iterable[Adapter]]) -> list[Adapter]:
    """One row for each name and digest, with the workers of all ``lists``, and one for each name
    and load that was refused. The order of the lists is of no account. Of more rows than a message
    has room for, the refused ones are left out first."""
    found: dict[tuple[str, str, str], Adapter] = {}
    for each in chain.from_iterable(lists):
        key = (each.name, each.digest, each.load if each.problem else "")
        found[key] = _both(found[key], each) if key in found else each
    return _fitting(sorted(found.values(), key=_place))


def _both(one: Adapter, other: Adapter) -> Adapter:
    latest = max(one, other, key=lambda each: (each.loaded_s, each.load, each.path, each.problem))
    return replace(
        latest,
        num_workers=min(one.num_workers + other.num_workers, MAX_WORKERS),
        is_retired=one.is_retired and other.is_retired,
    )


def _place(adapter: Adapter) -> tuple[bool, str, str, str]:
    return bool(adapter.problem), adapter.name, adapter.digest, adapter.load


def _fitting(adapters: list[Adapter]) -> list[Adapter]:
    num_bytes = 0
    for index, each in enumerate(adapters[:MAX_ROWS]):
        num_bytes += len(encode(each))
        if num_bytes > MAX_LIST_BYTES:
            return adapters[:index]
    return adapters[:MAX_ROWS]


def served(adapters: Iterable[Adapter]) -> dict[str, Adapter]:
    """The adapter of new requests for each name: that of the most workers, among equals the latest.
    Refused and retired ones are none."""
    found: dict[str, Adapter] = {}
    for each in adapters:
        if each.digest and not each.problem and not each.is_retired:
            other = found.get(each.name)
            found[each.name] = each if other is None else max(other, each, key=_rank)
    return found


def _rank(adapter: Adapter) -> tuple[int, float, str]:
    return adapter.num_workers, adapter.loaded_s, adapter.digest


def digests(adapters: Iterable[Adapter]) -> set[str]:
    """The adapters that open requests may have, retired ones included."""
    return {each.digest for each in adapters if each.digest and not each.problem}
