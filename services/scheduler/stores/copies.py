"""Loads and saves of one worker. Pure.

**Saves.** A block that is new in the prefix cache is saved by a row of the next plan, unless a
store of the location has it; so are the state and the blocks of windows of a new keep point. The
worker runs plans in order, and rows before the step, so that they are complete and not yet
overwritten. Other workers find them once the plan has run.

**Loads.** A hit goes on in stores behind the cached prefix, as far as each block is in a store or
in the cache; with states it ends where the state is in one of both, and with windows where stores
have the last blocks. It ends sooner if computing is quicker (``choice.py``). The sequence gets its
slot and its blocks, rows of later plans load them (``loads.py``), and it is computed once all are
there. If one is lost, it is forgotten, and the sequence returns to the queue for a shorter hit. A
place is pinned until it is read; a place on a disk is fetched before (``disk.py``). A state is
loaded to the copy of its sequence; it stays there, and blocks of windows stay in theirs, as a keep
point.

**Suspects.** A lost worker may have died of the bytes that it loaded. These are forgotten, and a
sequence that has lost two workers loads nothing.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import Counter

from services.scheduler.block_pool import KeepPoint
from services.scheduler.resource import Resource
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.stores.choice import LoadChoice
from services.scheduler.stores.disk import Copy, DiskCopies, Held
from services.scheduler.stores.hits import StoreHits
from services.scheduler.stores.index import Location, Places, Reach, Store, group_key, state_key
from services.scheduler.stores.loads import Loads
from services.scheduler.stores.saves import MAX_COPIES, MAX_COPY_BYTES, Saves
from services.scheduler.worker_state import WorkerState
from shared.errors import CodecError
from shared.wire.messages import Copied, Fetched, Forget, Load, PlanRow, Save, Spilled

MAX_FORGETS = 4096  # rows of a plan

HIT_TOKENS = Counter("shoal_kv_store_hit_tokens", "Tokens of hits that went on in stores")
RECOVERED_TOKENS = Counter(
    "shoal_kv_store_recovered_tokens",
    "The part of the tokens found in stores by sequences that had run before",
)


@dataclass(slots=True)
class _Sent:
    """The rows of a plan without a result."""

    step: int
    forgets: list[tuple[Places, list[int]]] = field(default_factory=list)
    saves: dict[bytes, tuple[Places, int]] = field(default_factory=dict)
    loads: list[Copy] = field(default_factory=list)
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
        self.reach = Reach(location)
        self.store = store
        self.disk: DiskCopies | None = None
        store.owner = self
        self._worker = worker
        self._pool = worker.pool
        self._size = worker.capacity.block_size
        self._has_states = worker.blocks.has_states
        self._hits = StoreHits(worker, self.reach)
        self._choice = LoadChoice(worker, self.reach, self._hits)
        self._loads = Loads(worker, self.reach, self._hits)
        self._put_back = put_back
        self._held: dict[int, Held] = {}  # by slot
        sizes = worker.capacity.num_blocks, worker.capacity.num_states or 0
        pairs = zip(store.parts, sizes, strict=False)
        self._saves = [Saves(part, self._pool, worker.index, size) for part, size in pairs]
        self._to_load: deque[Copy] = deque()
        self._sent: deque[_Sent] = deque()
        self._is_down = False
        worker.index.on_add, worker.blocks.on_keep = self._add, self._add_point
        worker.resources.append(self)
        worker.may_await = True

    def add_disk(self, location: Location, store: Store) -> None:
        self.disk = self._choice.disk = DiskCopies(location, store, self.store)
        self.reach.disk = location

    # --- sequences ------------------------------------------------------------------------------

    def num_loadable(self, sequence: Sequence, num_blocks: int) -> int:
        """A state is loaded to a copy, which must be free or in the cache."""
        has_copy = bool(self._pool.num_free_states or self._pool.keep_points)
        end = self._choice.find_end(sequence, num_blocks, loads_states=has_copy)
        return end - num_blocks

    def take(self, sequence: Sequence) -> None:
        allocation = sequence.allocated
        first = allocation.num_indexed
        held = self._held[allocation.slot] = Held(sequence, allocation)
        loads_states = allocation.to_state is not None
        end = self._choice.choose(sequence, first, loads_states=loads_states)
        if not self._loads.has_room(held, end):
            end = first
        self._loads.use(sequence, end, [end])
        if end == first:
            return
        loads = self._loads.take(held, first, end)
        self._to_load += (each for each in loads if not each.is_on_disk)
        if self.disk is not None:
            self.disk.to_fetch += (each for each in loads if each.is_on_disk)
        held.num_left = len(loads)
        allocation.num_computed = end * self._size
        if allocation.junction <= end:
            allocation.junction = 0  # the loaded part has it
        allocation.is_held = True
        HIT_TOKENS.inc((end - first) * self._size)
        if sequence.has_run:
            RECOVERED_TOKENS.inc((end - first) * self._size)

    def free(self, slot: int) -> None:
        held = self._held.pop(slot, None)
        if held is None:
            return
        if held.num_left:
            self._give_up(held)
        ends = [each.num_blocks for each in held.allocation.keep_points[-2:]]
        self._loads.use(held.sequence, held.allocation.num_indexed, ends)

    def distrust(self, sequence: Sequence) -> None:
        for key in self._hits.all_keys(sequence, sequence.allocated.num_indexed):
            self.reach.forget(key)

    def _give_up(self, held: Held) -> None:
        """Nobody waits for its copies any more."""
        queues = [self._to_load] if self.disk is None else [self._to_load, self.disk.to_fetch]
        for queue in queues:
            for each in [each for each in queue if each.held is held]:
                queue.remove(each)
                each.places.unpin(each.key)
                if self.disk is not None and each.is_on_disk and queue is self._to_load:
                    self.disk.unfetch(each)

    # --- plans ----------------------------------------------------------------------------------

    def rows(self, step: int) -> list[PlanRow]:
        disk = self.disk
        parts = [part for store in self._own for part in store.parts]
        has_forgets = any(each.forgets for each in parts)
        has_rows = disk is not None and disk.has_rows
        if not (self._to_load or any(self._saves) or has_forgets or has_rows):
            return []
        sent = _Sent(step)
        forgets, saves, loads = self._forget(sent), self._save(sent), self._load(sent)
        rows = [*forgets, *saves, *loads]
        if disk is not None:
            rows = [*forgets, *disk.spills(step), *saves, *loads, *disk.fetches(step)]
        if rows:
            self._sent.append(sent)
        return rows

    def _forget(self, sent: _Sent) -> list[PlanRow]:
        rows: list[PlanRow] = []
        for store in self._own:
            for part in store.parts:
                places = part.send_forgets(sent.step, MAX_FORGETS - len(rows))
                is_on_disk = store is not self.store
                if self.disk is not None and is_on_disk:
                    self.disk.clearing.append((sent.step, part, places))
                else:
                    sent.forgets.append((part, places))
                rows += (Forget(part.first + place, is_on_disk) for place in places)
        return rows

    def _save(self, sent: _Sent) -> list[PlanRow]:
        rows: list[PlanRow] = []
        for saves in self._saves:
            for key, number, place in saves.take(self.reach.memory):
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
        if self.disk is not None:
            self.disk.note_load([each for each in sent.loads if each.is_on_disk])
        return [
            Load(each.key, each.number, each.store, each.place, each.slot, each.is_on_disk)
            for each in sent.loads
        ]

    def _add(self, key: bytes, block: int) -> None:
        """The prefix cache has a new block."""
        if self._takes_more:
            self._saves[0].add(key, block)

    def _add_point(self, sequence: Sequence, point: KeepPoint) -> None:
        if not self._takes_more:
            return
        for (group, _), blocks in zip(self._hits.windows, point.tables, strict=True):
            for number, block in enumerate(blocks, point.num_blocks - len(blocks)):
                key = group_key(sequence.block_hash(number, self._size), group)
                self._saves[0].add(key, block, point)
        if point.state is not None:
            self._saves[1].add(state_key(point.block_hash), point.state, point)

    @property
    def _takes_more(self) -> bool:
        return self._is_owner and not self._is_down

    @property
    def _is_owner(self) -> bool:
        return self.store.owner is self

    @property
    def _own(self) -> list[Store]:
        """The stores that it still owns."""
        found = [self.store] if self._is_owner else []
        if self.disk is not None and self.disk.store.owner is self.disk:
            found.append(self.disk.store)
        return found

    # --- answers --------------------------------------------------------------------------------

    def finish(self, step: int) -> None:
        if self._sent and self._sent[0].step == step:
            sent = self._sent.popleft()
            for part, places in sent.forgets:
                part.note_cleared(places, step)
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
        self.reach.memory.note_saves(sent.saves, unsaved)
        if not lost:
            self._choice.memory.note(_num_bytes(sent.loads), copied.load_s)
        self._note_loads(sent.loads, lost)

    def note_spilled(self, spilled: Spilled) -> None:
        """Raises CodecError if no plan has such an answer."""
        if self.disk is None:
            raise CodecError("a Spilled without an Inventory of a disk")
        self.disk.note_spilled(spilled)

    def note_fetched(self, fetched: Fetched) -> None:
        """Raises CodecError if no plan has such an answer."""
        if self.disk is None:
            raise CodecError("a Fetched without an Inventory of a disk")
        copies, missing = self.disk.note_fetched(fetched)
        if not missing:
            self._choice.on_disk.note(_num_bytes(copies), fetched.fetch_s)
        for each in copies:
            if self._held.get(each.held.allocation.slot) is each.held:
                self._to_load.append(each)
            else:
                each.places.unpin(each.key)
                self.disk.unfetch(each)
        self._note_loads(missing, {each.key for each in missing})

    def _note_loads(self, loads: list[Copy], lost: set[bytes]) -> None:
        for each in loads:
            each.places.unpin(each.key)
            each.held.num_left -= 1
            if each.key in lost:
                self.reach.lose(each.key, is_on_disk=each.is_on_disk)
        for held in dict.fromkeys(each.held for each in loads if each.key in lost):
            if held.sequence.allocation is held.allocation:
                self._put_back(held.sequence)
        for held in dict.fromkeys(each.held for each in loads):
            if held.sequence.allocation is held.allocation and not held.num_left:
                self._begin(held)

    def _begin(self, held: Held) -> None:
        """All is there: the sequence may be computed."""
        allocation, num = held.allocation, held.allocation.num_computed // self._size
        allocation.is_held = False
        if held.is_stale:
            allocation.num_indexed = num
            return
        blocks = self._worker.blocks
        blocks.index_blocks(held.sequence)
        if not self._has_states:
            if blocks.has_windows:
                blocks.keep(held.sequence, num)
        elif allocation.from_state == allocation.to_state:
            blocks.keep_copy(held.sequence, num)

    def reset(self) -> None:
        """New sequences compute their whole prompt: they find no block that others load now."""
        for held in self._held.values():
            held.is_stale = bool(held.num_left)

    def close(self) -> None:
        """The worker is lost, or plans for it end. No cycle keeps its sequences, with their
        images."""
        self._worker.index.on_add = self._worker.blocks.on_keep = None
        self._worker.resources.remove(self)
        self._saves.clear()
        for sent in self._sent:
            if not sent.is_answered:
                for key in sent.saves:
                    self.reach.memory.end_save(key)
                for each in sent.loads:
                    each.places.unpin(each.key)
                    self.reach.forget(each.key)
        for each in self._to_load:
            each.places.unpin(each.key)
        if self._is_owner:
            self.store.owner = None
        if self.disk is not None:
            self.disk.close()


def _num_bytes(copies: list[Copy]) -> int:
    return sum(each.places.place_bytes for each in copies)
