"""Sequences of a cell move between its workers, and to other cells, with their KV blocks."""

import asyncio
import time
from collections.abc import Sequence as Series
from weakref import WeakKeyDictionary

from prometheus_client import Counter

from services.scheduler.allocation import Allocation
from services.scheduler.extension import Cell, CellExtension
from services.scheduler.moves.fetches import Fetches
from services.scheduler.moves.guests import Guest
from services.scheduler.moves.moves import Moves
from services.scheduler.moves.transfers import Transfers
from services.scheduler.queues import Queues
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.worker_state import WorkerState
from shared.errors import CodecError
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import Arrived, Inbox, Message, Settled

TURN_S = 0.05  # between looks at the sequences of a scheduler that leaves. Chosen


class CellMoves(CellExtension):
    """Knows the inboxes of the cell's workers, and of other cells'. With one inbox, nothing is
    done."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._moves = Moves(cell.core, self._hand_over_soon)
        self._fetches = Fetches(
            cell.core, self._moves.workers, self._plan_soon, lambda: time.monotonic()
        )
        self._recomputed = Recomputed()
        self._transfers: dict[Peer, Transfers] = {}
        self._guests: dict[Peer, Guest] = {}
        self._has_begun = False

    def takes(self, peer: Peer, message: Message, arrays: Series[Array] = ()) -> bool:
        if peer.hello.service != "worker":
            return False
        match message:
            case Inbox() if message.block_bytes < 1:
                raise CodecError(f"an Inbox of blocks with {message.block_bytes} bytes")
            case Inbox() if message.cell in ("", self._cell.config.instance):
                self._add(peer, message)
            case Inbox():
                self._add_guest(peer, message)
            case Arrived():
                if peer not in self._transfers:
                    raise CodecError("an Arrived without an Inbox")
                self._begin()
                self._transfers[peer].arrive(message)
            case Settled():
                if peer in self._guests:  # else it has changed its cell meanwhile
                    self._guests[peer].settle(message.keys)
            case _:
                return False
        return True

    def on_attach(self, worker: Peer) -> None:
        self._remove_guest(worker)

    def on_down(self, peer: Peer) -> None:
        self._remove_guest(peer)

    def on_detach(self, worker: Peer) -> None:
        if (transfers := self._transfers.pop(worker, None)) is not None:
            transfers.close()
            if transfers in self._moves.workers:
                self._moves.remove(transfers)
                self._fetches.remove(transfers)

    def reset_prefix_cache(self) -> None:
        self._moves.reset()
        self._fetches.reset()

    async def leave(self, within_s: float) -> None:
        end_s = time.monotonic() + within_s
        while self._moves.leave() and time.monotonic() < end_s:
            self._cell.others.hand_over(self._cell.core.queues)
            await asyncio.sleep(TURN_S)

    def look(self, now_s: float) -> None:
        if self._has_begun and any([self._fetches.look(), self._moves.look()]):
            self._cell.on_fits()

    def _add(self, peer: Peer, message: Inbox) -> None:
        worker_id = self._cell.id_of(peer)
        if worker_id is None or peer in self._transfers:
            raise CodecError("an Inbox of a worker that is not attached, or has sent one")
        worker = self._cell.core.workers[worker_id]
        if worker.blocks.has_states != (message.num_pieces > 0):
            raise CodecError(
                f"an Inbox of states with {message.num_pieces} pieces; the worker has"
                f" {worker.capacity.num_states} copies of states"
            )
        transfers = self._transfers[peer] = Transfers(
            peer,
            worker,
            message,
            on_plan=self._fetches.plan,
            on_settle=self._moves.settle,
            on_take=self._note_admission,
            on_distrust=self._moves.distrust,
            is_kept=self._is_kept,
        )
        if self._cell.config.enable_prefix_caching and transfers.may_move:
            self._moves.add(transfers)
            transfers.inbox.wants_guests = True
        if self._has_begun:
            self._join(transfers)
        elif len(self._transfers) > 1 or self._guests:
            self._begin()

    def _add_guest(self, peer: Peer, message: Inbox) -> None:
        if self._cell.id_of(peer) is not None:
            raise CodecError(f"an Inbox of a worker of this cell for cell {message.cell}")
        self._remove_guest(peer)
        if message.num_guests and self._cell.config.enable_prefix_caching:
            guest = self._guests[peer] = Guest(peer, message, self._cell.others.may_have)
            self._moves.guests.append(guest)
            if self._transfers:
                self._begin()

    def _remove_guest(self, peer: Peer) -> None:
        if (guest := self._guests.pop(peer, None)) is not None:
            self._moves.remove_guest(guest)

    def _is_kept(self, worker: Transfers, sequence: Sequence) -> bool:
        return self._moves.is_kept(worker, sequence) or self._fetches.is_kept(worker, sequence)

    def _plan_soon(self) -> None:
        """Once the plan that is being made is sent."""
        asyncio.get_running_loop().call_soon(self._cell.on_fits)

    def _hand_over_soon(self) -> None:
        """Once the tokens of the result that is being applied are on their way."""
        asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._moves.hand_over(self._cell.others)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._recomputed.begin(self._cell.core.queues)
            for each in self._transfers.values():
                self._join(each)

    def _note_admission(self, worker: WorkerState, sequence: Sequence) -> None:
        self._recomputed.note_admission(worker, sequence)
        self._moves.note_admission(sequence)
        self._fetches.note_admission(sequence)

    def _join(self, transfers: Transfers) -> None:
        """Its rows come before those of other resources. It may have admitted sequences before its
        inbox came."""
        transfers.worker.resources.insert(0, transfers)
        self._recomputed.join(transfers.worker)
        for sequence in transfers.worker.running.values():
            self._moves.note_admission(sequence)


RECOMPUTED = Counter(
    "shoal_recomputed_tokens",
    "Tokens of prompts that a worker had computed and that are computed again",
    ["why"],
)


class Recomputed:
    """Counts the tokens of prompts that are computed again, of sequences on workers that have
    joined."""

    def __init__(self) -> None:
        self._allocations: WeakKeyDictionary[Sequence, Allocation] = WeakKeyDictionary()
        self._returned: WeakKeyDictionary[Sequence, tuple[int, WaitReason]] = WeakKeyDictionary()

    def begin(self, queues: Queues) -> None:
        before = queues.on_return

        def on_return(sequence: Sequence, why: WaitReason) -> None:
            before(sequence, why)
            self._note_return(sequence, why)

        queues.on_return = on_return

    def _note_return(self, sequence: Sequence, why: WaitReason) -> None:
        if (allocation := self._allocations.pop(sequence, None)) is not None:
            num_computed = min(allocation.num_computed, len(sequence.prompt))
            self._returned[sequence] = num_computed, why

    def join(self, worker: WorkerState) -> None:
        for sequence in worker.running.values():
            self._allocations[sequence] = sequence.allocated

    def note_admission(self, worker: WorkerState, sequence: Sequence) -> None:
        """``sequence`` has its slot, and as yet the cached blocks alone."""
        allocation = self._allocations[sequence] = sequence.allocated
        if (returned := self._returned.pop(sequence, None)) is not None:
            num_before, why = returned
            num_blocks = allocation.num_indexed
            num_blocks += sum(each.num_loadable(sequence, num_blocks) for each in worker.resources)
            num = num_before - num_blocks * worker.capacity.block_size
            RECOMPUTED.labels(why.label).inc(max(0, num))
