"""Messages about adapters (LoRA, arXiv 2106.09685): lists of loaded ones go up, orders go down.

Peers below minor ``ADAPTERS_MINOR`` get none of them.
"""

from typing import Annotated

from msgspec import Meta

from shared.wire.messages.ranges import (
    MAX_ADAPTERS,
    AdapterDigest,
    Int32,
    Int64,
    Name,
    Reason,
    Row,
    Seconds,
)

AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]
AdapterPath = Annotated[str, Meta(max_length=4096)]


class Adapter(Row, frozen=True, kw_only=True):
    """An adapter of ``num_workers`` workers, known by the ``digest`` of its bytes.

    One ``name`` may have several digests: a text keeps the adapter it began with. ``loaded_s`` is
    the unix time of loading, in the latest worker. ``load`` is the order that loaded it from the
    folder ``path``; empty: it was loaded at the start. With a ``problem`` it was refused, and has
    no digest. One that ``is_retired``, unloaded or replaced, has only the requests that it had.
    """

    name: AdapterName
    digest: AdapterDigest = ""
    rank: Int32 = 0
    num_bytes: Int64 = 0
    num_workers: Int32 = 1
    loaded_s: Seconds = 0.0
    path: AdapterPath = ""
    load: Name = ""
    problem: Reason = ""
    is_retired: bool = False


class Adapters(Row, tag=33, frozen=True):
    """Up every link, when it changes and first of all: the adapters that the sender, or the workers
    below it, have."""

    adapters: Annotated[list[Adapter], Meta(max_length=2 * MAX_ADAPTERS)]


class LoadAdapter(Row, tag=34, frozen=True):
    """Down to every worker: read ``path``, a folder in ``lora-dir``, as the adapter ``name``. The
    answer is its row in Adapters, with this ``load``, which is unique. Other adapters of the name
    stay.
    """

    load: Name
    name: AdapterName
    path: AdapterPath


class UnloadAdapter(Row, tag=35, frozen=True):
    """Gateway → tokenizer → scheduler: ``name`` is no longer served. Open requests end with it. The
    order ``unload`` is unique: it comes through several tokenizers.
    """

    name: AdapterName
    unload: Name


class ForgetAdapter(Row, tag=36, frozen=True):
    """Scheduler → worker: no sequence needs this adapter any more."""

    digest: AdapterDigest
