"""The store of a worker as its schedulers see it."""

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from services.worker.extension import WorkerCore, WorkerExtension
from services.worker.step_thread import call_soon
from services.worker.stores.addition import KVStore, is_answered, rows_of
from shared.errors import CodecError
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import STORES_MINOR, Copied, Forget, Inventory, Load, Save, StepPlan


class WorkerStores(WorkerExtension):
    """Checks the rows of plans, and tells their scheduler what is in the store and what was copied.
    It is the last extension: each checked plan is computed."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        found = [each for each in core.engine.additions if isinstance(each, KVStore)]
        self._store = found[0] if found else None
        self._part = self._store.part if self._store is not None else None
        self._senders: deque[Peer | None] = deque()  # of plans that copy blocks, in order
        if self._part is not None:
            self._part.on_copied = partial(call_soon, asyncio.get_running_loop(), self._report)

    def on_attach(self, home: Peer) -> None:
        """Earlier plans may still save blocks."""
        if self._part is not None and home.hello.minor >= STORES_MINOR:
            loop = asyncio.get_running_loop()
            self._core.step_thread.submit(self._take_inventory, loop, home)

    def _take_inventory(self, loop: asyncio.AbstractEventLoop, home: Peer) -> None:
        assert self._part is not None
        header = self._part.own.header
        sizes = header.num_places, header.place_bytes
        message = Inventory(header.id, self._part.location, *sizes)
        call_soon(loop, self._send_inventory, home, message, *self._part.inventory())

    def _send_inventory(self, home: Peer, message: Inventory, *arrays: Array) -> None:
        if self._core.home() is home:
            home.send(message, *arrays)

    def check(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        rows = rows_of(plan)
        for row in rows:
            self._check_row(row)
        if is_answered(rows):
            self._senders.append(self._core.home())

    def close(self) -> None:
        """After the last step."""
        if self._store is not None:
            self._core.step_thread.executor.submit(self._store.close)

    def _check_row(self, row: Forget | Save | Load) -> None:
        if self._part is None:
            raise CodecError("this worker has no KV store (kv-offloading-size)")
        num_places = self._part.own.header.num_places
        if not isinstance(row, Load) and row.place >= num_places:
            raise CodecError(f"place {row.place} of a store; it has {num_places}")
        num_blocks = self._core.engine.capacity.num_blocks
        if not isinstance(row, Forget) and row.block >= num_blocks:
            raise CodecError(f"block {row.block} for a store; the cache has {num_blocks}")

    def _report(self, copied: Copied) -> None:
        """Called for each plan that copies blocks, before its result is sent."""
        sender = self._senders.popleft()
        if sender is not None and sender is self._core.home():
            sender.send(copied)
