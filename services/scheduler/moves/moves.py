"""Who moves where, and when. Pure.

The blocks of a sequence follow it while it runs. Once its target has nearly all of them, no further
plan computes it. After the results of its plans in flight it returns to the queue, and the target
admits it with its blocks in the prefix cache. Until then it stays, if anything fails.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from prometheus_client import Counter

from services.scheduler.extension import OtherCells
from services.scheduler.moves.guests import Guest
from services.scheduler.moves.inbox import FORGET_S, TRANSFER_S
from services.scheduler.moves.move import Move, MoveTarget, Why
from services.scheduler.moves.roles import Roles
from services.scheduler.moves.transfers import Transfers
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.worker_state import LOOK_S
from shared.wire.messages import GUESTS_MINOR, State

MAX_MOVES: dict[Why, int] = {"leaving": 4, "role": 16}
"""The most at a time from one worker: each is there sooner if few share its time. Chosen."""
AVOID_LOOKS = int(FORGET_S / LOOK_S)  # of a worker that a block did not reach in time
RETRY_LOOKS = int(TRANSFER_S / LOOK_S)  # of a sequence whose move was given up

Key = TypeVar("Key")

MOVES = Counter("shoal_moves", "Moves of running sequences to other workers", ["why", "outcome"])


class Due(NamedTuple):
    """A sequence that ``target`` is to admit next, or any worker after ``num_looks``."""

    target: Transfers
    num_looks: int


class Moves:
    """The moves between ``workers``, of which each has an inbox, and from them to ``guests``:
    workers of other cells, for sequences that no other worker here can have. ``on_ready`` is called
    when some of them can be handed over."""

    def __init__(self, core: Scheduler, on_ready: Callable[[], None]) -> None:
        self.workers: list[Transfers] = []
        self.guests: list[Guest] = []
        self._on_ready = on_ready
        self._ready: dict[Move, None] = {}
        self._is_leaving = False
        self._roles = Roles(core, self.workers)
        self._core, self._placement = core, core.placement
        self._due: dict[Sequence, Due] = {}

    @property
    def _targets(self) -> list[MoveTarget]:
        return [*self.workers, *self.guests]

    def add(self, transfers: Transfers) -> None:
        self.workers.append(transfers)
        self._roles.note_workers()

    def remove(self, transfers: Transfers) -> None:
        """The worker is lost."""
        self.workers.remove(transfers)
        self._roles.note_workers()
        for move in [*transfers.moves.values(), *transfers.incoming]:
            self._close(move, "lost")
        for sequence in [*transfers.due]:
            self.note_admission(sequence)
        self._forget(transfers)

    def remove_guest(self, guest: Guest) -> None:
        """The worker is lost, or belongs to another cell."""
        self.guests.remove(guest)
        for move in [*guest.incoming]:
            self._close(move, "lost")
        self._forget(guest)

    def _forget(self, target: MoveTarget) -> None:
        for each in self.workers:
            each.met.discard(target)
            each.avoided.pop(target, None)

    def leave(self) -> bool:
        """Moves all sequences to other cells. Must be called again, until it returns False: the
        ones that are left cannot move."""
        self._is_leaving = True
        for each in self.workers:
            self._begin(each)
        return any(each.moves for each in self.workers)

    def is_kept(self, worker: Transfers, sequence: Sequence) -> bool:
        """True if another worker has the blocks of ``sequence``, or its role, and takes it now."""
        if (due := self._due.get(sequence)) is None:
            return self._roles.is_kept(worker, sequence)
        return due.target is not worker and self._placement.has_room(due.target.worker, sequence)

    def note_admission(self, sequence: Sequence) -> None:
        """A worker has admitted ``sequence``, or it is over."""
        if (due := self._due.pop(sequence, None)) is not None:
            due.target.num_meant -= due.target.due.pop(sequence)

    def settle(self, transfers: Transfers) -> None:
        """A result of the worker has been applied."""
        for move in [*transfers.moves.values(), *transfers.incoming]:
            self._advance(move)
        self._begin(transfers)

    def look(self) -> bool:
        """Called every ``LOOK_S``. Returns True if workers without plans may get some."""
        num_before = len(self._core.queues)
        self._look_at_due()
        for each in self.workers:
            _count_down(each.avoided)
            _count_down(each.tried)
        for target in self._targets:
            if target.inbox.look():
                self._give_up_overdue(target)
        for each in self.workers:
            for move in [*each.moves.values()]:
                move.num_looks += 1
                self._advance(move)
            self._begin(each)
        has_returned = len(self._core.queues) > num_before
        return has_returned or any(each.has_idle_rows for each in self.workers)

    def _look_at_due(self) -> None:
        for sequence, due in [*self._due.items()]:
            if due.num_looks and self._core.sequences.get(sequence.key) is sequence:
                self._due[sequence] = due._replace(num_looks=due.num_looks - 1)
            else:
                self.note_admission(sequence)

    def reset(self) -> None:
        """No block that was computed before may be found by new sequences."""
        for target in self._targets:
            target.inbox.spoil()
            for move in [*target.incoming]:
                self._close(move, "given_up")

    def distrust(self, source: Transfers, keys: Iterable[bytes]) -> None:
        """The blocks ``keys`` of ``source``, and copies of them elsewhere, may be wrong."""
        keys = {*keys}
        for guest in self.guests:
            guest.distrust(keys)
        for each in self.workers:
            each.inbox.spoil(keys)
            if each is not source:
                blocks = map(each.worker.index.find, keys)
                each.worker.pool.uncache([block for block in blocks if block is not None])
                for key in keys:
                    each.points.forget(key)

    # --- one move -------------------------------------------------------------------------------

    def _advance(self, move: Move) -> None:
        if not move.is_over:
            move.follow()
        if move.is_over:
            self._close(move, "ended")
        elif move.is_stuck:
            self._give_up(move)
        elif move.is_switching or self._may_switch(move):
            self._hold(move)
        elif not move.sequence.has_credit:
            self._give_up(move)

    def _hold(self, move: Move) -> None:
        """Until nothing is under way any more; then the sequence switches."""
        if not move.target.has_place(move, self._placement):
            move.hold(False)
            return
        move.hold(True)
        if move.is_in_flight:
            return
        if move.is_ready:
            self._switch(move)
        elif move.is_stuck or move.num_looks >= RETRY_LOOKS:
            self._give_up(move)

    def _may_switch(self, move: Move) -> bool:
        """True if nearly all is at the target, which can take the sequence now."""
        sequence = move.sequence
        is_due = move.why == "leaving" or move.allocation.num_computed >= len(sequence.prompt)
        if not is_due or not move.is_near or not _is_movable(sequence):
            move.num_looks = 0
            return False
        if not move.target.has_place(move, self._placement):
            if move.num_looks >= RETRY_LOOKS:
                self._give_up(move)
            return False
        return move.target.has_all(move)

    def _switch(self, move: Move) -> None:
        sequence, target = move.sequence, move.target
        if not isinstance(target, Transfers):
            self._ready[move] = None
            self._on_ready()
            return
        move.source.worker.remove(sequence)
        self._close(move, "done")
        self._due[sequence] = Due(target, RETRY_LOOKS)
        target.due[sequence] = move.num_blocks
        target.num_meant += move.num_blocks
        self._core.queues.put_back(sequence, WaitReason.MOVED)

    def hand_over(self, others: OtherCells) -> None:
        """Ends the moves to other cells that are ready."""
        ready = [each for each in self._ready if each.is_switching and not each.is_over]
        self._ready = {}
        others.hand_over([move.sequence for move in ready])
        for move in ready:
            if move.is_over:
                self._close(move, "done")
            else:
                self._give_up(move)

    def _give_up(self, move: Move) -> None:
        move.source.tried[move.sequence] = RETRY_LOOKS
        self._close(move, "given_up")

    def _give_up_overdue(self, target: MoveTarget) -> None:
        for move in [*target.incoming]:
            if move.is_overdue:
                move.source.avoided[target] = AVOID_LOOKS
                self._give_up(move)

    def _close(self, move: Move, outcome: str) -> None:
        source, target = move.source, move.target
        if source.moves.pop(move.sequence, None) is None:
            return
        del target.incoming[move]
        target.num_meant -= move.num_blocks
        if move.is_switching:
            move.hold(False)
        move.mark_left()
        if isinstance(target, Guest):
            target.forget()
        MOVES.labels(move.why, outcome).inc()

    # --- new moves ------------------------------------------------------------------------------

    def _begin(self, source: Transfers) -> None:
        """Begins moves of the oldest sequences."""
        why: Why | None = "leaving" if self._is_leaving else _why(source)
        if source not in self.workers or why is None:
            return
        num_left = MAX_MOVES[why] - len(source.moves)
        near = [] if self._is_leaving else self.workers
        targets = [each for each in near if self._is_target(source, each, why)]
        guests = [] if targets or why == "role" else self._guests_for(source)
        if num_left <= 0 or not (targets or guests):
            return
        new = (
            each
            for each in source.worker.running.values()
            if each not in source.moves and each not in source.tried and _is_movable(each)
        )
        for sequence in sorted(new, key=lambda each: each.order):
            target = self._choose(targets, sequence) or _choose_guest(guests, sequence)
            if target is None:
                continue
            move = Move(sequence, source, target, why)
            source.moves[sequence], target.incoming[move] = move, None
            target.num_meant += move.num_blocks
            source.introduce(target, are_guests=isinstance(target, Guest))
            self._advance(move)
            num_left -= 1
            if not num_left:
                break

    def _guests_for(self, source: Transfers) -> list[Guest]:
        knows_guests = source.peer.hello.minor >= GUESTS_MINOR
        return [*filter(source.may_reach, self.guests)] if knows_guests else []

    def _is_target(self, source: Transfers, target: Transfers, why: Why) -> bool:
        if why == "role" and target.message.role == "prefill":
            return False
        return source.may_reach(target) and target.worker.admits

    def _choose(self, targets: list[Transfers], sequence: Sequence) -> Transfers | None:
        """Returns the target that is best by its role, and then has the most free blocks."""
        num_blocks = len(sequence.allocated.blocks)
        rooms = [
            (-_RANKS[each.message.role], _num_free(each), each)
            for each in targets
            if len(each.incoming) + len(each.due) < each.worker.num_free_slots
            and _num_free(each) >= num_blocks
            and self._placement.has_room(each.worker, sequence)
        ]
        return max(rooms, key=lambda each: each[:2])[2] if rooms else None


_RANKS = {"decode": 0, "both": 1, "prefill": 2}


def _choose_guest(guests: list[Guest], sequence: Sequence) -> Guest | None:
    """Returns the one with the fewest incoming moves."""
    able = [each for each in guests if each.may_take(sequence)]
    return min(able, key=lambda each: len(each.incoming), default=None)


def _why(source: Transfers) -> Why | None:
    if source.peer.status.state == State.DRAINING:
        return "leaving"
    return "role" if source.message.role == "prefill" else None


def _is_movable(sequence: Sequence) -> bool:
    """True if the blocks of a running sequence are of use to others."""
    return (
        sequence.has_credit
        and not sequence.is_isolated
        and not sequence.awaits_data
        and sequence.max_cached > 0
    )


def _num_free(target: Transfers) -> int:
    """Counts the blocks that are free and not meant for other moves."""
    return target.worker.pool.num_free - target.num_meant


def _count_down(counts: dict[Key, int]) -> None:
    for key in [*counts]:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
