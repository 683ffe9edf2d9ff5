"""The adapters of a scheduler's workers: lists go up, orders go down."""

import logging
from collections import defaultdict
from collections.abc import Sequence as Series
from collections.abc import Set

from services.scheduler.adapters.retirement import Retirement, conflicts, limit
from services.scheduler.adapters.room import AdapterRoom
from services.scheduler.extension import Cell, CellExtension
from services.scheduler.sequence import Arrival, Sequence
from shared.adapters.joined import digests, join, served
from shared.adapters.listeners import Listeners, send_all
from shared.errors import ADAPTER_LOST, RETRY_AFTER_S, RequestError, Unavailable
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import (
    Adapter,
    Adapters,
    ForgetAdapter,
    LoadAdapter,
    Message,
    UnloadAdapter,
)

log = logging.getLogger(__name__)

FORGET_S = 60.0
"""From the last request of a retired adapter until workers forget it: longer than a request whose
services were lost takes to come back (replay-s)."""


class CellAdapters(CellExtension):
    """A sequence runs on workers that have its adapter, with bounds on different ones at once."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._retirement = Retirement()
        self._tokenizers = Listeners()
        self._lists: dict[Peer, list[Adapter]] = {}  # of connected workers, without forgotten ones
        self._reported: dict[Peer, set[str]] = defaultdict(set)  # shared with their rooms
        self._marked: dict[Peer, list[Adapter]] = {}  # of attached workers
        self._used_s: dict[str, float] = {}  # when a sequence last had a retired adapter
        self._forgotten: dict[Peer, set[Adapter]] = defaultdict(set)  # which may be reported yet
        self._sent: dict[Peer, dict[str, str]] = defaultdict(dict)  # loads and their names
        self._conflicts: dict[tuple[str, str, str], None] = {}  # the ones in the log

    # --- links ----------------------------------------------------------------------------------

    def on_up(self, peer: Peer) -> None:
        if peer.hello.service == "tokenizer":
            self._tokenizers.add(peer)

    def on_down(self, peer: Peer) -> None:
        self._tokenizers.remove(peer)
        self._lists.pop(peer, None)
        self._reported.pop(peer, None)
        self._forgotten.pop(peer, None)

    def takes(self, peer: Peer, message: Message, arrays: Series[Array] = ()) -> bool:
        match message, peer.hello.service:
            case Adapters(adapters), "worker":
                self._note_list(peer, adapters)
            case LoadAdapter(), "tokenizer":
                self._retirement.load(message)
                self._update()
            case UnloadAdapter(), "tokenizer":
                self._retirement.unload(message, self._rows())
                self._update()
            case _:
                return False
        return True

    def _note_list(self, worker: Peer, adapters: list[Adapter]) -> None:
        """A forgotten row may be in a list that was on its way; the one of a new load differs."""
        forgotten = self._forgotten[worker]
        forgotten &= set(adapters)
        self._lists[worker] = [each for each in adapters if each not in forgotten]
        before, after = self._reported[worker], digests(self._lists[worker])
        has_changed = before != after
        before.clear()
        before |= after
        self._update()
        if has_changed and worker in self._cell.workers.values():
            self._cell.on_fits()

    def _rows(self) -> list[Adapter]:
        return [each for rows in self._lists.values() for each in rows]

    def _update(self) -> None:
        workers = self._cell.workers.values()
        lists = {each: self._lists[each] for each in workers if each in self._lists}
        self._marked = self._retirement.marked(lists)
        self._tokenizers.announce(join(self._marked.values()))
        self._order_loads()
        self._log_conflicts()

    def _order_loads(self) -> None:
        """Attached workers are to load the served adapters of the others, and by open orders."""
        names = served(self._tokenizers.adapters)
        loaded = {
            each.name: (LoadAdapter(each.load, each.name, each.path), each.digest)
            for rows in self._marked.values()
            for each in rows
            if each.load and each.digest and each.name in names
            if each.digest == names[each.name].digest
        }
        loads = {order.load for order, _ in loaded.values()}
        is_open = self._retirement.open_orders(self._rows())
        orders = [*loaded.values(), *((each, "") for each in is_open if each.load not in loads)]
        loads |= {each.load for each in is_open}
        for worker in self._cell.workers.values():
            rows = self._lists.get(worker, ())
            own = {(each.name, each.digest) for each in rows if each.digest}
            done = {each.load for each in rows}
            sent = {load: name for load, name in self._sent[worker].items() if load in loads}
            self._sent[worker] = sent
            for order, digest in orders:
                if order.load not in done | {*sent} and (order.name, digest) not in own:
                    sent[order.load] = order.name
                    send_all([worker], order)

    def _log_conflicts(self) -> None:
        for name, chosen, other in sorted(conflicts(self._marked.values())):
            pair = name, min(chosen, other), max(chosen, other)
            if pair not in self._conflicts:
                self._conflicts[pair] = None
                limit(self._conflicts)
                text = "workers have different adapters %s: new requests get %s, and never %s"
                log.warning(text, name, chosen, other)

    # --- workers --------------------------------------------------------------------------------

    def resource_of(self, worker: Peer) -> AdapterRoom:
        capacity = worker.hello.capacity
        assert capacity is not None
        waiting = self._cell.core.queues.waiting
        return AdapterRoom(self._reported[worker], capacity.max_adapters, waiting.__contains__)

    def on_attach(self, worker: Peer) -> None:
        self._update()
        for each in self._marked.get(worker, ()):
            self._used_s.pop(each.digest, None)  # requests may follow it

    def on_detach(self, worker: Peer) -> None:
        self._sent.pop(worker, None)
        self._update()

    def look(self, now_s: float) -> None:
        """Has workers forget adapters without requests."""
        retired = {
            worker: _retired(rows, self._loading(worker)) for worker, rows in self._marked.items()
        }
        if not any(retired.values()):
            self._used_s.clear()
            return
        in_use = {each.options.adapter for each in self._cell.core.sequences.values()}
        every = set().union(*retired.values())
        self._used_s = {
            each: now_s if each in in_use else self._used_s.get(each, now_s) for each in every
        }
        unused = {each for each, used_s in self._used_s.items() if now_s - used_s >= FORGET_S}
        for worker, found in retired.items():
            for digest in sorted(found & unused):
                self._forget(worker, digest)
        if unused:
            self._update()

    def _loading(self, worker: Peer) -> set[str]:
        """Names with an order that it has not answered: the bytes may be ones it has."""
        done = {each.load for each in self._lists[worker]}
        return {name for load, name in self._sent[worker].items() if load not in done}

    def _forget(self, worker: Peer, digest: str) -> None:
        rows = self._lists[worker]
        self._forgotten[worker].update(each for each in rows if each.digest == digest)
        self._lists[worker] = [each for each in rows if each.digest != digest]
        self._reported[worker].discard(digest)
        send_all([worker], ForgetAdapter(digest))

    # --- requests -------------------------------------------------------------------------------

    def check(self, arrival: Arrival) -> None:
        adapter = arrival.options.adapter
        if adapter and self._cell.workers and not self._has(adapter):
            raise _lost(adapter)

    def why_unservable(self, sequence: Sequence) -> RequestError | None:
        adapter = sequence.options.adapter
        return _lost(adapter) if adapter and not self._has(adapter) else None

    def _has(self, adapter: str) -> bool:
        return any(adapter in self._reported[each] for each in self._cell.workers.values())


def _retired(adapters: list[Adapter], loading: Set[str]) -> set[str]:
    """The adapters that are retired under each of their names, none of which is ``loading``."""
    kept = [each for each in adapters if not each.is_retired or each.name in loading]
    return digests(adapters) - digests(kept)


def _lost(adapter: str) -> Unavailable:
    return Unavailable(
        f"no connected worker has the adapter {adapter} of this request",
        code=ADAPTER_LOST,
        retry_after_s=RETRY_AFTER_S,
    )
