"""The blocks that one worker pushes to others, and takes from them. Pure.

The worker runs plans in order, and their rows before the step. A block that is pushed is therefore
complete and not yet overwritten, and needs no owner. A block that is taken is in the prefix cache
from the plan on that takes it.
"""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.allocation import Allocation
from services.scheduler.moves.inbox import InboxPlaces, Place
from services.scheduler.resource import Resource
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.worker_state import WorkerState
from shared.link.peer import Peer
from shared.wire.messages import EVERY_LAYER, Inbox, PlanRow, Push

Why = Literal["leaving", "role"]

NEAR_TOKENS = 32
"""The most tokens computed again after a move with small blocks. Chosen."""
MAX_REWINDS = 3  # a target that evicts blocks of a move again and again is too full for it


@dataclass(slots=True, eq=False)
class Move:
    """A running sequence on its way from ``source`` to ``target``. Its first ``num_there`` blocks
    are in the target's prefix cache, and its first ``num_pushed`` ones are or were on their way. It
    had ``num_blocks`` at the beginning. ``is_stuck``: a block is missing at the source.
    ``num_looks`` counts the looks since all is there and the target has no room. While it
    ``is_switching``, no plan computes it."""

    sequence: Sequence
    source: "Transfers"
    target: "Transfers"
    why: Why
    allocation: Allocation = field(init=False)
    num_blocks: int = field(init=False)
    num_there: int = 0
    num_pushed: int = 0
    num_rewinds: int = 0
    num_looks: int = 0
    is_stuck: bool = False
    is_switching: bool = False

    def __post_init__(self) -> None:
        self.allocation = self.sequence.allocated
        self.num_blocks = len(self.allocation.blocks)

    @property
    def is_over(self) -> bool:
        """True if the sequence has ended, or has left its worker otherwise."""
        return self.sequence.allocation is not self.allocation

    def key(self, number: int) -> bytes:
        return self.sequence.block_hash(number, self.source.block_size)

    @property
    def num_wanted(self) -> int:
        """Counts the full blocks that the target could use."""
        size = self.source.block_size
        return min(self.allocation.num_indexed, self.sequence.max_cached // size)

    @property
    def is_near(self) -> bool:
        """True if the target lacks at most a block and the tokens behind it."""
        size = self.source.block_size
        num_computed = min(self.allocation.num_computed, self.sequence.num_known)
        return num_computed - self.num_there * size <= max(2 * size - 1, NEAR_TOKENS)

    @property
    def is_in_flight(self) -> bool:
        """True if a plan in flight computes the sequence."""
        in_flight = self.source.worker.in_flight
        return bool(in_flight) and self.allocation.last_step >= in_flight[0].step

    def follow(self) -> None:
        """Counts the blocks at the target. Those it has evicted are pushed again."""
        find, num_wanted = self.target.worker.index.find, self.num_wanted
        while self.num_there < num_wanted and find(self.key(self.num_there)) is not None:
            self.num_there += 1
        self.num_pushed = max(self.num_pushed, self.num_there)
        if self.num_pushed > self.num_there:
            place = self.target.inbox.find(self.key(self.num_there))
            if place is None:
                self.rewind(self.num_there)

    def rewind(self, num_there: int) -> None:
        self.num_there = self.num_pushed = num_there
        self.num_rewinds += 1
        self.is_stuck |= self.num_rewinds > MAX_REWINDS

    def push(self, most: int) -> list[tuple[Push, Place]]:
        """Returns up to ``most`` rows for the next blocks that the target lacks."""
        rows: list[tuple[Push, Place]] = []
        inbox, num_wanted = self.target.inbox, self.num_wanted
        while self.num_pushed < num_wanted and len(rows) < most:
            key = self.key(self.num_pushed)
            if inbox.worker.index.find(key) is None:
                if (place := inbox.find(key)) is not None:
                    if place.is_stale or place.is_sent:
                        break  # the inbox loses it first
                    place.is_wanted = True
                else:
                    block = self.source.worker.index.find(key)
                    self.is_stuck |= block is None
                    if block is None or inbox.is_full:
                        break
                    rows.append((Push(key, block, self.target.name), inbox.reserve(key)))
            self.num_pushed += 1
        return rows

    def mark(self, is_wanted: bool) -> None:
        """Marks the places of its blocks. Unwanted are also those that the target has computed."""
        for number in range(self.num_there if is_wanted else 0, self.num_pushed):
            if (place := self.target.inbox.find(self.key(number))) is not None:
                place.is_wanted = is_wanted

    @property
    def is_overdue(self) -> bool:
        """True if one of its blocks is overdue."""
        inbox = self.target.inbox
        places = (inbox.find(self.key(each)) for each in range(self.num_there, self.num_pushed))
        return any(place is not None and inbox.is_overdue(place) for place in places)


class Transfers(Resource):
    """Of the attached worker ``peer`` with the inbox ``message``. ``moves`` are those that it is
    the source of, by sequence, and ``incoming`` those to it. Of the worker's free blocks,
    ``num_meant`` are for the latter, and for sequences that are ``due``: switched, and not admitted
    yet. It has ``met`` the workers that it can push to; some are ``avoided`` for a number of looks,
    as are moves of sequences ``tried`` before. ``on_settle``, ``on_take``, ``on_distrust`` and
    ``is_kept`` belong to the cell."""

    reason = WaitReason.PLACEMENT

    def __init__(
        self,
        peer: Peer,
        worker: WorkerState,
        message: Inbox,
        on_settle: "Callable[[Transfers], None]",
        on_take: Callable[[WorkerState, Sequence], None],
        is_kept: "Callable[[Transfers, Sequence], bool]",
        on_distrust: "Callable[[Transfers, Iterable[bytes]], None]",
    ) -> None:
        self.peer = peer
        self.name = peer.hello.instance
        self.worker = worker
        self.message = message
        self.inbox = InboxPlaces(worker, message.num_blocks, message.block_bytes)
        self.block_size = worker.capacity.block_size
        self.moves: dict[Sequence, Move] = {}
        self.incoming: dict[Move, None] = {}
        self.due: dict[Sequence, int] = {}  # the blocks meant for each
        self.num_meant = 0
        self.met: set[Transfers] = set()
        self.avoided: dict[Transfers, int] = {}
        self.tried: dict[Sequence, int] = {}
        self._on_distrust = on_distrust
        self._on_settle = on_settle
        self._on_take = on_take
        self._is_kept = is_kept
        self._pushed: deque[tuple[int, list[Place]]] = deque()  # without a result, by step

    @property
    def is_plain(self) -> bool:
        """True if its blocks are all that another worker needs of a sequence."""
        capacity = self.worker.capacity
        return (
            capacity.groups == EVERY_LAYER
            and capacity.num_states is None
            and capacity.num_stages == 1
        )

    def reaches(self, other: "Transfers") -> bool:
        """True if its blocks are of use to ``other``, and come there."""
        own, their = self.message, other.message
        is_near = own.location == their.location or bool(their.address)
        has_same_blocks = own.layout == their.layout and self.block_size == other.block_size
        return other is not self and has_same_blocks and is_near

    @property
    def _num_out(self) -> int:
        """Counts the blocks on their way out: as many as memory is planned for."""
        return sum(each.num_pushed - each.num_there for each in self.moves.values())

    @property
    def has_idle_rows(self) -> bool:
        """True if blocks wait in the inbox for its next plan, and none is under way."""
        return self.inbox.has_arrived and not self.worker.in_flight

    def is_kept_from(self, sequence: Sequence) -> bool:
        return self._is_kept(self, sequence)

    def take(self, sequence: Sequence) -> None:
        self._on_take(self.worker, sequence)

    def distrust(self, sequence: Sequence) -> None:
        num = sequence.allocated.num_indexed
        self._on_distrust(self, [sequence.block_hash(each, self.block_size) for each in range(num)])

    def rows(self, step: int) -> Series[PlanRow]:
        if not self.moves and not self.inbox:
            return ()
        pushes: list[tuple[Push, Place]] = []
        most = min(self.inbox.max_copies, self.inbox.num_places - self._num_out)
        for move in self.moves.values():
            pushes += move.push(most - len(pushes))
        if pushes:
            self._pushed.append((step, [place for _, place in pushes]))
        return [*(row for row, _ in pushes), *self.inbox.rows(step)]

    def finish(self, step: int) -> None:
        self.inbox.finish(step)
        if self._pushed and self._pushed[0][0] == step:
            self._leave(self._pushed.popleft()[1])

    def settle(self, step: int) -> None:
        self._on_settle(self)

    def close(self) -> None:
        """No plan follows. No cycle keeps the worker's sequences, with their images."""
        if self in self.worker.resources:
            self.worker.resources.remove(self)
        for _, places in self._pushed:
            self._leave(places)

    def _leave(self, places: Iterable[Place]) -> None:
        for place in places:
            place.has_left = True
