"""Loads and saves of one worker. Pure.

**Saves.** A block that is new in the prefix cache is saved by a row of the next plan, unless a
store of the location has it; so is the state of a new keep point. The worker runs plans in order,
and rows before the step, so that both are complete and not yet overwritten. Other workers find them
once the plan has run.

**Loads.** A hit goes on in stores behind the cached prefix, as far as each block is in a store or
in the cache; with states it ends where the state is in one of both. The sequence gets its slot and
its blocks, rows of later plans load them, and it is computed once all are there. If one is lost, it
is forgotten, and the sequence returns to the queue for a shorter hit. A place is pinned until it is
read. A state is loaded to the copy of its sequence, and stays there as a keep point.

**Suspects.** A lost worker may have died of the bytes that it loaded. These are forgotten, and a
sequence that has lost two workers loads nothing.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from prometheus_client import Counter

from services.scheduler.allocation import Allocation
from services.scheduler.block_pool import KeepPoint
from services.scheduler.resource import Resource
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.stores.index import Location, Places, Store, state_key
from services.scheduler.stores.saves import MAX_COPIES, MAX_COPY_BYTES, Saves
from services.scheduler.worker_state import WorkerState
from shared.errors import CodecError
from shared.wire.kv_groups import copy_interval
from shared.wire.messages import Copied, Forget, Load, PlanRow, Save

MIN_LOADED = 2
"""Blocks worth a load: the sequence waits for two plans."""
MAX_FORGETS = 4096  # rows of a plan

HIT_TOKENS = Counter("shoal_kv_store_hit_tokens", "Tokens of hits that went on in stores")
RECOVERED_TOKENS = Counter(
    "shoal_kv_store_recovered_tokens",
    "The part of the tokens found in stores by sequences that had run before",
)


@dataclass(slots=True, eq=False)
class _Held:
    """A sequence with a slot, and the number of its blocks and states to load."""

    sequence: Sequence
    allocation: Allocation
    num_left: int = 0


class _Copy(NamedTuple):
    """A block to load, or the state of a ``slot`` to its copy ``number``."""

    held: _Held
    key: bytes
    number: int
    store: str
    places: Places
    place: int
    slot: int | None = None


@dataclass(slots=True)
class _Sent:
    """The rows of a plan without a result."""

    step: int
    forgets: list[tuple[Places, int]] = field(default_factory=list)
    saves: dict[bytes, tuple[Places, int]] = field(default_factory=dict)
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
        self._pool, self._find = worker.pool, worker.index.find
        self._size = worker.capacity.block_size
        self._has_states = worker.blocks.has_states
        self._between = copy_interval(self._size) // self._size  # blocks between two states
        self._put_back = put_back
        self._held: dict[int, _Held] = {}  # by slot
        sizes = worker.capacity.num_blocks, worker.capacity.num_states or 0
        found = zip(store.parts, (self._find, self._find_state), sizes, strict=False)
        self._saves = [Saves(*each) for each in found]
        self._to_load: deque[_Copy] = deque()
        self._sent: deque[_Sent] = deque()
        self._is_down = False
        worker.index.on_add, self._pool.on_keep = self._add, self._add_state
        worker.resources.append(self)
        worker.may_await = True

    # --- sequences ------------------------------------------------------------------------------

    def num_loadable(self, sequence: Sequence, num_blocks: int) -> int:
        """A state is loaded to a copy, which need not be free."""
        has_copy = bool(self._pool.num_free_states or self._pool.keep_points)
        return self._num_found(sequence, num_blocks, loads_states=has_copy)

    def take(self, sequence: Sequence) -> None:
        allocation = sequence.allocated
        first = allocation.num_indexed
        num = self._num_found(sequence, first, loads_states=allocation.to_state is not None)
        end = first + num
        self._use(sequence, end)
        held = self._held[allocation.slot] = _Held(sequence, allocation)
        if not num:
            return
        loads = [*self._take_blocks(held, range(first, end)), *self._take_state(held, end)]
        for each in loads:
            each.places.pin(each.key)
        self._to_load += loads
        held.num_left = len(loads)
        allocation.num_computed = end * self._size
        if allocation.junction <= end:
            allocation.junction = 0  # the loaded part has it
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
                    each.places.unpin(each.key)
            self._to_load = deque(each for each in self._to_load if each.held is not held)
        self._use(held.sequence, held.allocation.num_indexed)

    def distrust(self, sequence: Sequence) -> None:
        for key in self._keys(sequence, sequence.allocated.num_indexed):
            self.location.forget(key)

    def _num_found(self, sequence: Sequence, first: int, *, loads_states: bool) -> int:
        """Counts the blocks behind the ``first`` ones with which the sequence may begin."""
        if sequence.num_worker_deaths > 1:
            return 0
        end = first
        while end < sequence.max_cached // self._size:
            key = sequence.block_hash(end, self._size)
            if self._find(key) is None and self.location.find(key) is None:
                break
            end += 1
        if self._has_states:
            ends = self._ends_of_states(end, first)
            hashes = ((each, sequence.block_hash(each - 1, self._size)) for each in ends)
            found = (each for each, key in hashes if self._has_state(key, loads_states))
            end = next(found, first)
        return end - first if end - first >= MIN_LOADED else 0

    def _ends_of_states(self, end: int, first: int = 0) -> range:
        """The numbers of blocks behind which a state can be: the largest one first."""
        return range(end // self._between * self._between, first, -self._between)

    def _has_state(self, block_hash: bytes, loads_states: bool) -> bool:
        if block_hash in self._pool.keep_points:
            return True
        return loads_states and self.location.find(state_key(block_hash)) is not None

    def _take_blocks(self, held: _Held, numbers: range) -> Iterator[_Copy]:
        """Shares the blocks in the cache; yields the loads of the other ones."""
        blocks = held.allocation.tables[0].blocks
        for number in numbers:
            key = held.sequence.block_hash(number, self._size)
            if (cached := self._find(key)) is None:
                yield self._copy(held, key, blocks[number])
            else:
                self._pool.share([cached])
                self._pool.free([blocks[number]])
                blocks[number] = cached

    def _take_state(self, held: _Held, end: int) -> Iterator[_Copy]:
        """Has the slot begin with the state behind ``end`` blocks; yields its load if the cache
        lacks it."""
        if not self._has_states:
            return
        allocation = held.allocation
        key = held.sequence.block_hash(end - 1, self._size)
        allocation.copied_after = end * self._size
        if (point := self._pool.keep_points.get(key)) is not None:
            self._pool.use(point)
            allocation.keep_points.append(point)
            allocation.from_state = point.state
            return
        allocation.from_state = allocation.to_state
        assert allocation.to_state is not None
        yield self._copy(held, state_key(key), allocation.to_state, allocation.slot)

    def _copy(self, held: _Held, key: bytes, number: int, slot: int | None = None) -> _Copy:
        found = self.location.find(key)
        assert found is not None
        store, places = found
        return _Copy(held, key, number, store, places, places.first + places.full[key], slot)

    def _use(self, sequence: Sequence, num_blocks: int) -> None:
        """Notes the use of its first blocks: the last one is overwritten first, since the ones
        before it are usable without it. Of states, the last two are used, as in the cache."""
        keys = [sequence.block_hash(each, self._size) for each in range(num_blocks)]
        states = self._state_keys(sequence, num_blocks)
        last = islice((each for each in states if self.location.find(each) is not None), 2)
        for key in (*reversed(keys), *reversed([*last])):
            if (found := self.location.find(key)) is not None:
                found[1].use(key)

    def _keys(self, sequence: Sequence, num_blocks: int) -> Iterator[bytes]:
        """Of its first blocks, and of the states behind them."""
        for number in range(num_blocks):
            yield sequence.block_hash(number, self._size)
        yield from self._state_keys(sequence, num_blocks)

    def _state_keys(self, sequence: Sequence, num_blocks: int) -> Iterator[bytes]:
        """Of states behind its first blocks, the last one first."""
        if self._has_states:
            for end in self._ends_of_states(num_blocks):
                yield state_key(sequence.block_hash(end - 1, self._size))

    # --- plans ----------------------------------------------------------------------------------

    def rows(self, step: int) -> list[PlanRow]:
        if not (
            self._to_load or any(self._saves) or any(each.forgets for each in self.store.parts)
        ):
            return []
        sent = _Sent(step)
        rows = [*self._forget(sent), *self._save(sent), *self._load(sent)]
        if rows:
            self._sent.append(sent)
        return rows

    def _forget(self, sent: _Sent) -> list[PlanRow]:
        if self._is_owner:
            forgets = [(part, place) for part in self.store.parts for place in part.forgets]
            sent.forgets = forgets[:MAX_FORGETS]
            for part, place in sent.forgets:
                del part.forgets[place]
        return [Forget(part.first + place) for part, place in sent.forgets]

    def _save(self, sent: _Sent) -> list[PlanRow]:
        rows: list[PlanRow] = []
        for saves in self._saves:
            for key, number, place in saves.take(self.location):
                sent.saves[key] = saves.places, place
                rows.append(Save(key, number, saves.places.first + place))
        return rows

    def _load(self, sent: _Sent) -> list[PlanRow]:
        num_bytes = 0
        while self._to_load and len(sent.loads) < MAX_COPIES:
            num_bytes += self._to_load[0].places.place_bytes
            if sent.loads and num_bytes > MAX_COPY_BYTES:
                break
            sent.loads.append(self._to_load.popleft())
        return [
            Load(each.key, each.number, each.store, each.place, each.slot) for each in sent.loads
        ]

    def _add(self, key: bytes, block: int) -> None:
        """The prefix cache has a new block."""
        if self._takes_more:
            self._saves[0].add(key, block)

    def _add_state(self, point: KeepPoint) -> None:
        if self._takes_more and point.state is not None:
            self._saves[1].add(state_key(point.block_hash), point.state)

    def _find_state(self, key: bytes) -> int | None:
        point = self._pool.keep_points.get(state_key(key))
        return None if point is None else point.state

    @property
    def _takes_more(self) -> bool:
        return self._is_owner and not self._is_down

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
            for each in self._saves:
                each.clear()
        self._note_saves(sent.saves, unsaved)
        self._note_loads(sent.loads, lost)

    def _note_saves(self, saves: dict[bytes, tuple[Places, int]], unsaved: set[bytes]) -> None:
        location = self.location
        for key, (places, place) in saves.items():
            is_dropped = key in location.dropped
            location.saving.discard(key)
            location.dropped.discard(key)
            if key in unsaved or is_dropped:
                places.give_back(place, is_full=is_dropped)
            else:
                places.put(key, place)

    def _note_loads(self, loads: list[_Copy], lost: set[bytes]) -> None:
        for each in loads:
            each.places.unpin(each.key)
            each.held.num_left -= 1
            if each.key in lost:
                self.location.forget(each.key)
        for held in dict.fromkeys(each.held for each in loads if each.key in lost):
            if held.sequence.allocation is held.allocation:
                self._put_back(held.sequence)
        for held in dict.fromkeys(each.held for each in loads):
            if held.sequence.allocation is held.allocation and not held.num_left:
                self._begin(held)

    def _begin(self, held: _Held) -> None:
        """All is there: the sequence may be computed."""
        allocation, num = held.allocation, held.allocation.num_computed // self._size
        allocation.is_held = False
        is_cached = allocation.num_indexed < num  # unless the cache was reset meanwhile
        self._worker.blocks.index_blocks(held.sequence)
        if is_cached and self._has_states and allocation.from_state == allocation.to_state:
            self._worker.blocks.keep_copy(held.sequence, num)

    def reset(self) -> None:
        """New sequences compute their whole prompt: they find no block that others load now."""
        for held in self._held.values():
            if held.num_left:
                held.allocation.num_indexed = held.allocation.num_computed // self._size

    def close(self) -> None:
        """The worker is lost, or plans for it end. No cycle keeps its sequences, with their
        images."""
        self._worker.index.on_add = self._pool.on_keep = None
        self._worker.resources.remove(self)
        self._saves.clear()
        store, location = self.store, self.location
        for sent in self._sent:
            if not sent.is_answered:
                location.saving -= sent.saves.keys()
                location.dropped -= sent.saves.keys()
                for each in sent.loads:
                    each.places.unpin(each.key)
                    location.forget(each.key)
            if self._is_owner:
                for part, place in sent.forgets:
                    part.forgets[place] = None
        for each in self._to_load:
            each.places.unpin(each.key)
        if self._is_owner:
            store.owner = None
