"""The store of a worker as its schedulers see it."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from services.worker.extension import WorkerCore, WorkerExtension
from services.worker.step_thread import call_soon
from services.worker.stores.addition import KVStore
from services.worker.stores.disk_link import (
    DiskLink,
    check_place,
    inventory_message,
    is_of_disk,
)
from services.worker.stores.files import inventory_of
from services.worker.stores.part import Row, StorePart, is_answered, rows_of
from shared.errors import CodecError
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.kv_groups import has_windows
from shared.wire.messages import (
    FIRST_STATE,
    STORED_STATES_MINOR,
    STORED_WINDOWS_MINOR,
    STORES_MINOR,
    Copied,
    Forget,
    Load,
    Save,
    Spill,
    StepPlan,
)


class WorkerStores(WorkerExtension):
    """Checks the rows of plans, and tells their scheduler what is in the store and what was copied.
    It is the last extension: each checked plan is computed."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        found = [each for each in core.engine.additions if isinstance(each, KVStore)]
        self._store = found[0] if found else None
        self._part = self._store.part if self._store is not None else None
        self._senders: deque[Peer | None] = deque()  # of plans with rows; None: no answer
        self._awaited: dict[int, int] = {}  # copies of states that may be loaded, by slot
        self._disk: DiskLink | None = None
        loop = asyncio.get_running_loop()
        if self._part is not None:
            self._part.on_copied = partial(call_soon, loop, self._report)
            if self._part.disk is not None:
                self._disk = DiskLink(self._part.disk, core.home, loop)
                self._part.on_spilled = partial(call_soon, loop, self._disk.spill)

    async def run(self) -> None:
        if self._disk is not None:
            await self._disk.watch()

    def on_attach(self, home: Peer) -> None:
        """At once, unless plans of a former scheduler are still to change the store."""
        if self._part is None:
            return
        if home.hello.minor < self._least_minor(self._part):
            return
        if not self._senders:
            self._send_inventory(self._part, home)
            return
        loop = asyncio.get_running_loop()
        after = call_soon, loop, self._send_inventory, self._part, home
        self._core.step_thread.submit(*after)

    def _least_minor(self, part: StorePart) -> int:
        """Older schedulers refuse the inventory."""
        if has_windows(self._core.engine.capacity):
            return STORED_WINDOWS_MINOR
        return STORED_STATES_MINOR if part.own.header.num_states else STORES_MINOR

    def _send_inventory(self, part: StorePart, home: Peer) -> None:
        if self._core.home() is not home:
            return
        home.send(inventory_message(part.own.header, part.location), *inventory_of(part.own))
        if self._disk is not None:
            self._disk.greet(home)

    def check(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        self._forget_awaited(plan.release)
        rows = rows_of(plan) if plan.rows else ()
        for row in rows:
            self._check_row(row)
        if rows:
            self._senders.append(self._core.home() if is_answered(rows) else None)
            if self._disk is not None:
                self._disk.begin(plan.step, rows)
        for admit in plan.admit:
            if admit.from_state is not None and admit.from_state == admit.to_state:
                self._awaited[admit.slot] = admit.from_state
        self._forget_awaited(row.slot for row in plan.prefill)
        self._forget_awaited(row.slot for row in plan.decode)

    def clear(self) -> None:
        self._awaited.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """After the last step."""
        if self._store is not None:
            self._core.step_thread.executor.submit(self._store.close)

    def _check_row(self, row: Row) -> None:
        if self._part is None:
            raise CodecError("this worker has no KV store (kv-offloading-size)")
        capacity = self._core.engine.capacity
        if self._disk is not None:
            self._disk.check(row)
        elif is_of_disk(row):
            raise CodecError("this worker has no KV store on a disk (kv-disk-size)")
        if isinstance(row, Save | Spill) or (isinstance(row, Forget) and not row.is_on_disk):
            check_place(self._part.own.header, row.place)
        if not isinstance(row, Save | Load):
            return
        is_state = row.place >= FIRST_STATE
        if isinstance(row, Load) and row.slot is not None:
            self._check_awaited(row.slot, row.block)
        elif isinstance(row, Save) and is_state:
            num_states = capacity.num_states or 0
            if row.block >= num_states:
                raise CodecError(f"state {row.block} for a store; there are {num_states}")
        elif row.block >= capacity.num_blocks:
            raise CodecError(f"block {row.block} for a store; the cache has {capacity.num_blocks}")

    def _check_awaited(self, slot: int, copy: int) -> None:
        """A state is loaded for a slot that was admitted with its copy, and has no token yet."""
        awaited = self._awaited.get(slot)
        if awaited != copy:
            wanted = "none" if awaited is None else f"state {awaited}"
            raise CodecError(f"state {copy} from a store for slot {slot}, which awaits {wanted}")

    def _forget_awaited(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._awaited.pop(slot, None)

    def _report(self, copied: Copied) -> None:
        """Called for each plan with rows, before its result is sent."""
        sender = self._senders.popleft()
        if sender is not None and sender is self._core.home():
            sender.send(copied)
