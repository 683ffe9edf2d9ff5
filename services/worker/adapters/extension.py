"""The adapters of a worker as its schedulers see them."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.worker.adapters.addition import Adapters as Addition
from services.worker.adapters.store import row_of, with_problem
from services.worker.extension import WorkerCore, WorkerExtension
from shared.errors import CodecError
from shared.link.peer import Peer
from shared.process.cores import lower_priority
from shared.wire.codec import Array
from shared.wire.envelope import read_options
from shared.wire.messages import (
    ADAPTERS_MINOR,
    Adapter,
    Adapters,
    ForgetAdapter,
    LoadAdapter,
    Message,
    StepPlan,
)

OFF = "this worker serves no adapters (enable-lora)"
RANKS = "adapters of a worker with several ranks are loaded at its start only"


class WorkerAdapters(WorkerExtension):
    """Loads and forgets adapters by order, one after the other, on a thread of its own."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._thread = ThreadPoolExecutor(1, "adapters", lower_priority)
        found = [each for each in core.engine.additions if isinstance(each, Addition)]
        self._addition = found[0] if found else None
        self._refused: tuple[Adapter, ...] = ()  # if the worker serves no adapters
        self._forgotten: set[str] = set()  # digests that still have a row
        self._of_slots: dict[int, str] = {}

    @property
    def rows(self) -> list[Adapter]:
        rows = self._refused if self._addition is None else self._addition.store.rows
        return [row for row in rows if row.digest not in self._forgotten]

    def on_up(self, peer: Peer) -> None:
        if peer.hello.minor >= ADAPTERS_MINOR:
            peer.send(Adapters(self.rows))

    def takes(self, peer: Peer, message: Message, arrays: Sequence[Array] = ()) -> bool:
        match message:
            case LoadAdapter():
                self._load(message)
            case ForgetAdapter():
                self._forget(message)
            case _:
                return False
        return True

    def check(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        for slot in plan.release:
            self._of_slots.pop(slot, None)
        for row in plan.admit:
            if not (digest := read_options(row.options).adapter):
                continue
            if not any(each.digest == digest for each in self.rows):
                raise CodecError(f"slot {row.slot} has adapter {digest}, which is not loaded")
            self._of_slots[row.slot] = digest
        num, most = len({*self._of_slots.values()}), self._core.engine.capacity.max_adapters
        if num > most:
            raise CodecError(f"{num} adapters in slots; max-loras is {most}")

    def clear(self) -> None:
        self._of_slots.clear()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, order: LoadAdapter) -> None:
        if self._addition is None:
            self._refused = with_problem(self._refused, row_of(order), OFF)
            self._report()
        elif self._core.config.num_ranks > 1:
            self._run(self._addition.store.refuse, order, RANKS)
        else:
            self._run(self._addition.store.load, order)

    def _forget(self, order: ForgetAdapter) -> None:
        """The rows at once, the adapter in its turn after earlier orders, of which one may load the
        same bytes again."""
        if self._addition is None:
            return
        rows = [row for row in self._addition.store.rows if row.digest == order.digest]
        self._forgotten.add(order.digest)
        self._run(self._take_away, self._addition, rows, forgets=order.digest)

    def _take_away(self, addition: Addition, rows: list[Adapter]) -> None:
        """On the loading thread. Plans before the order may still admit a sequence with it."""
        for row in rows:
            if row in addition.store.rows:
                step_thread = self._core.step_thread.executor
                step_thread.submit(addition.table.remove, row.digest).result()
                addition.store.forget(row)

    def _run(self, call: Callable[..., None], *arguments: object, forgets: str = "") -> None:
        """Calls on the loading thread, then reports. An error ends the service."""

        def report(done: asyncio.Future[None]) -> None:
            if not done.cancelled():
                done.result()
                self._forgotten.discard(forgets)
                self._report()

        done = asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
        done.add_done_callback(report)

    def _report(self) -> None:
        for peer in self._core.peers():
            self.on_up(peer)
