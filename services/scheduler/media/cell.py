"""The images and videos of a cell's sequences, and the memory of their pixels."""

import sys
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
from prometheus_client import Gauge

from services.scheduler.extension import Cell, CellExtension
from services.scheduler.resource import Resource
from services.scheduler.sequence import Arrival, Sequence, Span, WaitReason
from shared.errors import (
    NO_WORKER,
    RETRY_AFTER_S,
    CodecError,
    InvalidRequest,
    RequestError,
    Unavailable,
)
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import Capacity, Encoded, Item, Message

HELD_BYTES = Gauge("shoal_media_held_bytes", "Pixels of images in open sequences")
SLOTS_PER_AWAITING = 4  # of a worker, for each sequence with an image to encode. Chosen


class CellMedia(CellExtension):
    """Holds the pixels of open sequences, equal ones once: another worker may compute them again.
    At most ``max_media_bytes`` are held."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._held: WeakValueDictionary[bytes, np.ndarray] = WeakValueDictionary()  # by digest

    def check(self, arrival: Arrival) -> None:
        if not arrival.spans:
            return
        if self._cell.workers and not self._are_taken(arrival.spans):
            if arrival.generate.attempt > 1:
                raise _lost(arrival.spans)
            text = f"the workers of this model take no {_noun(arrival.spans)}"
            raise InvalidRequest(text, param="messages")
        sizes = {item.digest: pixels.nbytes for item, pixels in arrival.spans}
        limit = self._cell.config.max_media_bytes
        if (num_own := sum(sizes.values())) > limit:
            raise InvalidRequest(
                f"the images of the prompt have {num_own} bytes of pixels; the limit is"
                f" max-media-bytes = {limit}",
                param="messages",
            )
        num_new = sum(size for digest, size in sizes.items() if digest not in self._held)
        if (num_bytes := num_new + self._num_bytes) > limit:
            raise Unavailable(
                f"the images of open requests would have {num_bytes} bytes of pixels; the limit is"
                f" max-media-bytes = {limit}",
                code="media_memory_full",
                retry_after_s=RETRY_AFTER_S,
            )
        arrival.spans = tuple(
            span._replace(pixels=self._held.setdefault(span.item.digest, span.pixels))
            for span in arrival.spans
        )

    def takes(self, peer: Peer, message: Message, arrays: Series[Array] = ()) -> bool:
        if not isinstance(message, Encoded) or peer.hello.service != "worker":
            return False
        sequence = self._cell.core.sequences.get((message.request, message.attempt))
        if sequence is None or sequence.allocation is None:
            return True  # it has ended or was preempted meanwhile
        if message.num_ids > len(sequence.prompt):
            raise CodecError(f"{message.num_ids} ids of {message.request} are more than it has")
        if self._cell.workers.get(sequence.allocation.worker_id) is peer:
            note_encoded(sequence, message.num_ids)
        return True

    def why_unservable(self, sequence: Sequence) -> RequestError | None:
        return None if self._are_taken(sequence.spans) else _lost(sequence.spans)

    def resource_of(self, worker: Peer) -> "EncodingRoom | None":
        capacity = worker.hello.capacity
        assert capacity is not None
        return EncodingRoom(capacity) if capacity.all_media else None

    def look(self, now_s: float) -> None:
        HELD_BYTES.set(self._num_bytes)

    @property
    def _num_bytes(self) -> int:
        return sum(each.nbytes for each in self._held.values())

    def _are_taken(self, spans: Series[Span]) -> bool:
        kinds = {span.item.kind for span in spans}
        capacities = (each.hello.capacity for each in self._cell.workers.values())
        return not kinds or any(
            each is not None and kinds <= {*each.all_media} for each in capacities
        )


def note_encoded(sequence: Sequence, num_ids: int) -> None:
    """The items among its first ``num_ids`` ids are encoded; the next one begins there, unless that
    is the end of the prompt. A message of an earlier admission may come late."""
    allocation, is_all = sequence.allocated, num_ids == len(sequence.prompt)
    allocation.num_ready = sys.maxsize if is_all else max(allocation.num_ready, num_ids)


@dataclass(frozen=True, slots=True)
class WholeItem:
    """A chunk computes all of an item or nothing of it: it stops before, or goes on."""

    start: int
    end: int

    def __call__(self, first: int, end: int, most: int) -> int:
        if not self.start < end < self.end:
            return end
        if first < self.start:
            return self.start
        return self.end if self.end <= most else first


class EncodingRoom(Resource):
    """Room for sequences whose images a worker encodes: a part of its slots, since one image
    follows another meanwhile. Each takes a bounded time, so every sequence gets its turn. It spares
    room in plans for items that are computed whole."""

    reason = WaitReason.MEDIA

    def __init__(self, capacity: Capacity) -> None:
        self._most = max(1, capacity.max_num_seqs // SLOTS_PER_AWAITING)
        self._whole, self._num_tokens = capacity.whole_media, capacity.max_num_batched_tokens
        self._held: dict[int, Sequence] = {}  # with images, by slot

    def has_room_for(self, sequence: Sequence, without: Iterable[Sequence] = ()) -> bool:
        if not sequence.spans:
            return True
        awaiting = {each.request for each in self._held.values() if each.awaits_data}
        return len(awaiting - {each.request for each in without}) < self._most

    def fits(self, sequence: Sequence) -> bool:
        """Unless an item has more tokens than a step."""
        return all(item.num_tokens <= self._num_tokens for item in self._whole_items(sequence))

    @property
    def spare(self) -> int:
        items = (item for each in self._held.values() for item in self._whole_items(each))
        return max((item.num_tokens - 1 for item in items), default=0)

    def _whole_items(self, sequence: Sequence) -> Iterator[Item]:
        """Its items to compute in one step."""
        if self._whole:
            for item, _ in sequence.spans:
                if item.kind in self._whole and item.end > sequence.num_computed:
                    yield item

    def take(self, sequence: Sequence) -> None:
        if sequence.spans:
            self._held[sequence.allocated.slot] = sequence

    def begin(self, sequence: Sequence) -> None:
        """Its worker begins to encode the items of its ids to compute."""
        allocation = sequence.allocated
        left = [item for item, _ in sequence.spans if item.end > allocation.num_computed]
        if left:
            allocation.num_ready = left[0].start
        whole = self._whole_items(sequence)
        allocation.cuts += (WholeItem(item.start, item.end) for item in whole)

    def free(self, slot: int) -> None:
        self._held.pop(slot, None)


def _noun(spans: Series[Span]) -> str:
    return "videos" if any(span.item.kind == "video" for span in spans) else "images"


def _lost(spans: Series[Span]) -> Unavailable:
    return Unavailable(
        f"no connected worker takes {_noun(spans)}", code=NO_WORKER, retry_after_s=RETRY_AFTER_S
    )
