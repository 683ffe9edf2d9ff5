"""Loads and saves of one worker. Pure.

**Saves.** A block that is new in the prefix cache is saved by a row of the next plan, unless a
store of the location has it. The worker runs plans in order, and rows before the step, so that the
block is complete and not yet overwritten. Other workers find it once the plan has run.

**Loads.** A hit goes on in stores behind the cached prefix. The sequence gets its slot and its
blocks, rows of later plans load them, and it is computed once all are there. If one is lost, it is
forgotten, and the sequence returns to the queue for a shorter hit. A place is pinned until it is
read.

**Suspects.** A lost worker may have died of the bytes that it loaded. These are forgotten, and a
sequence that has lost two workers loads nothing.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import Counter

from services.scheduler.allocation import Allocation
from services.scheduler.resource import Resource
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.stores.index import Location, Store
from services.scheduler.worker_state import WorkerState
from shared.errors import CodecError
from shared.wire.messages import Copied, Forget, Load, PlanRow, Save

MIN_LOADED = 2
"""Blocks worth a load: the sequence waits for two plans."""
MAX_COPY_BYTES = 16 << 20
"""Of the loads of a plan, and of its saves: other sequences wait meanwhile. Chosen."""
MAX_COPIES, MAX_FORGETS = 256, 4096
"""Rows of a plan."""

HIT_TOKENS = Counter("shoal_kv_store_hit_tokens", "Tokens found in stores by admitted sequences")
RECOVERED_TOKENS = Counter(
    "shoal_kv_store_recovered_tokens",
    "The part of the tokens found in stores by sequences that had run before",
)


@dataclass(slots=True, eq=False)
class _Held:
    """A sequence with a slot, and the number of its blocks to load."""

    sequence: Sequence
    allocation: Allocation
    num_left: int = 0


class _Copy(NamedTuple):
    """A block to load."""

    held: _Held
    key: bytes
    block: int
    store: Store
    place: int


@dataclass(slots=True)
class _Sent:
    """The rows of a plan without a result."""

    step: int
    forgets: list[int] = field(default_factory=list)
    saves: dict[bytes, int] = field(default_factory=dict)
    loads: list[_Copy] = field(default_factory=list)
    is_answered: bool = False


class StoreCopies(Resource):
    """``worker`` reads the stores of ``location``, and saves in its own ``store``. ``put_back``
    returns a sequence of the worker to the queue."""

    reason = WaitReason.LOADING

    def __init__(
        self,
        worker: WorkerState,
        location: Location,
        store: Store,
        put_back: Callable[[Sequence], None],
    ) -> None:
        self.location = location
        self.store = store
        store.owner = self
        self._worker = worker
        self._size = worker.capacity.block_size
        self._put_back = put_back
        most = min(MAX_COPIES, MAX_COPY_BYTES // max(1, store.place_bytes))
        self._max_copies = max(1, most)
        self._held: dict[int, _Held] = {}  # by slot
        self._to_save: dict[bytes, int] = {}  # blocks by key, oldest first
        self._to_load: deque[_Copy] = deque()
        self._sent: deque[_Sent] = deque()
        self._is_down = False
        worker.index.on_add = self._add
        worker.resources.append(self)
        worker.may_await = True

    # --- sequences ------------------------------------------------------------------------------

    def num_loadable(self, sequence: Sequence, num_blocks: int) -> int:
        if sequence.num_worker_deaths > 1:
            return 0
        find, most = self.location.find, sequence.max_cached // self._size
        number = num_blocks
        while number < most and find(sequence.block_hash(number, self._size)) is not None:
            number += 1
        num = number - num_blocks
        return num if num >= MIN_LOADED else 0

    def take(self, sequence: Sequence) -> None:
        allocation = sequence.allocated
        first = allocation.num_indexed
        num = self.num_loadable(sequence, first)
        self._use(sequence, first + num)
        held = self._held[allocation.slot] = _Held(sequence, allocation, num)
        if not num:
            return
        for number in range(first, first + num):
            key = sequence.block_hash(number, self._size)
            store = self.location.find(key)
            assert store is not None
            store.pin(key)
            block = allocation.tables[0].blocks[number]
            self._to_load.append(_Copy(held, key, block, store, store.places[key]))
        allocation.num_computed += num * self._size
        allocation.is_held = True
        HIT_TOKENS.inc(num * self._size)
        if sequence.has_run:
            RECOVERED_TOKENS.inc(num * self._size)

    def free(self, slot: int) -> None:
        held = self._held.pop(slot, None)
        if held is None:
            return
        if held.num_left:
            for each in self._to_load:
                if each.held is held:
                    each.store.unpin(each.key)
            self._to_load = deque(each for each in self._to_load if each.held is not held)
        self._use(held.sequence, held.allocation.num_indexed)

    def distrust(self, sequence: Sequence) -> None:
        for number in range(sequence.allocated.num_indexed):
            self.location.forget(sequence.block_hash(number, self._size))

    def _use(self, sequence: Sequence, num_blocks: int) -> None:
        """Notes the use of its first blocks: the last one is overwritten first, since the ones
        before it are usable without it."""
        for number in reversed(range(num_blocks)):
            key = sequence.block_hash(number, self._size)
            if (store := self.location.find(key)) is not None:
                store.use(key)

    # --- plans ----------------------------------------------------------------------------------

    def rows(self, step: int) -> list[PlanRow]:
        if not (self._to_load or self._to_save or self.store.forgets):
            return []
        sent = _Sent(step)
        rows = [*self._forget(sent), *self._save(sent), *self._load(sent)]
        if rows:
            self._sent.append(sent)
        return rows

    def _forget(self, sent: _Sent) -> list[PlanRow]:
        forgets = self.store.forgets
        if forgets and self._is_owner:
            sent.forgets = [*forgets][:MAX_FORGETS]
            for place in sent.forgets:
                del forgets[place]
        return [Forget(place) for place in sent.forgets]

    def _save(self, sent: _Sent) -> list[PlanRow]:
        rows: list[PlanRow] = []
        while self._to_save and len(rows) < self._max_copies:
            key, block = next(iter(self._to_save.items()))
            is_known = key in self.location.saving or self.location.find(key) is not None
            if is_known or self._worker.index.find(key) != block:
                del self._to_save[key]
                continue
            place = self.store.take()
            if place is None:
                break
            del self._to_save[key]
            self.location.saving.add(key)
            sent.saves[key] = place
            rows.append(Save(key, block, place))
        return rows

    def _load(self, sent: _Sent) -> list[PlanRow]:
        num = min(len(self._to_load), self._max_copies)
        sent.loads = [self._to_load.popleft() for _ in range(num)]
        return [Load(each.key, each.block, each.store.name, each.place) for each in sent.loads]

    def _add(self, key: bytes, block: int) -> None:
        """The prefix cache has a new block."""
        if self._is_down or not self._is_owner:
            return
        self._to_save[key] = block
        if len(self._to_save) > 2 * self._worker.pool.num_blocks:
            find = self._worker.index.find
            self._to_save = {key: each for key, each in self._to_save.items() if find(key) == each}

    @property
    def _is_owner(self) -> bool:
        return self.store.owner is self

    # --- answers --------------------------------------------------------------------------------

    def finish(self, step: int) -> None:
        if self._sent and self._sent[0].step == step:
            sent = self._sent.popleft()
            if (sent.saves or sent.loads) and not sent.is_answered:
                raise CodecError(f"step {step} loads or saves blocks, and no Copied came before it")

    def note(self, copied: Copied) -> None:
        """Raises CodecError if no plan has such an answer."""
        sent = self._sent[0] if self._sent else None
        if sent is None or sent.step != copied.step or sent.is_answered:
            raise CodecError(f"a Copied of step {copied.step}, which has none")
        lost, unsaved = {*copied.lost}, {*copied.unsaved}
        if not (lost <= {each.key for each in sent.loads} and unsaved <= sent.saves.keys()):
            raise CodecError(f"a Copied of step {copied.step} with keys of another one")
        sent.is_answered = True
        if copied.is_down:
            self._is_down = True
            self._to_save.clear()
        self._note_saves(sent.saves, unsaved)
        self._note_loads(sent.loads, lost)

    def _note_saves(self, saves: dict[bytes, int], unsaved: set[bytes]) -> None:
        location, store = self.location, self.store
        for key, place in saves.items():
            is_dropped = key in location.dropped
            location.saving.discard(key)
            location.dropped.discard(key)
            if key in unsaved or is_dropped:
                store.give_back(place, is_full=is_dropped)
            else:
                store.put(key, place)

    def _note_loads(self, loads: list[_Copy], lost: set[bytes]) -> None:
        for each in loads:
            each.store.unpin(each.key)
            each.held.num_left -= 1
            if each.key in lost:
                self.location.forget(each.key)
        for held in dict.fromkeys(each.held for each in loads if each.key in lost):
            if held.sequence.allocation is held.allocation:
                self._put_back(held.sequence)
        for held in dict.fromkeys(each.held for each in loads):
            if held.sequence.allocation is held.allocation and not held.num_left:
                held.allocation.is_held = False
                self._worker.blocks.index_blocks(held.sequence)

    def reset(self) -> None:
        """New sequences compute their whole prompt: they find no block that others load now."""
        for held in self._held.values():
            if held.num_left:
                held.allocation.num_indexed = held.allocation.num_computed // self._size

    def close(self) -> None:
        """The worker is lost, or plans for it end. No cycle keeps its sequences, with their
        images."""
        self._worker.index.on_add = None
        self._worker.resources.remove(self)
        store, location = self.store, self.location
        for sent in self._sent:
            if not sent.is_answered:
                location.saving -= sent.saves.keys()
                location.dropped -= sent.saves.keys()
                for each in sent.loads:
                    each.store.unpin(each.key)
                    location.forget(each.key)
            if self._is_owner:
                store.forgets.update(dict.fromkeys(sent.forgets))
        for each in self._to_load:
            each.store.unpin(each.key)
        if self._is_owner:
            store.owner = None
