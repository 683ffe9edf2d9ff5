"""The blocks that one worker pushes to others, and takes from them. Pure.

The worker runs plans in order, and their rows before the step. A block that is pushed is therefore
complete and not yet overwritten, and needs no owner. A block that is taken is in the prefix cache
from the plan on that takes it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Series
from itertools import chain

from services.scheduler.copy_times.times import CopyOrCompute, CopyTimes
from services.scheduler.moves.delivery import Delivery
from services.scheduler.moves.inbox import InboxPlaces, Place
from services.scheduler.moves.move import Move, MoveTarget
from services.scheduler.moves.pins import Pins
from services.scheduler.moves.points import ComingPoints, PointShape
from services.scheduler.placement import Placement
from services.scheduler.resource import Resource
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.worker_state import WorkerState
from shared.errors import CodecError
from shared.link.peer import Peer
from shared.wire.messages import Arrived, Inbox, Meet, Part, PlanRow, Push


class Transfers(Resource):
    """Of the attached worker ``peer`` with the inbox ``message``. ``moves`` are those that it is
    the source of, by sequence, and ``incoming`` those to it. Of the worker's free blocks,
    ``num_meant`` are for the latter, and for sequences that are ``due``: switched, and not admitted
    yet. ``fetches`` are those to it, with ``fetch_times`` by source, and ``served`` those from it;
    their blocks are ``pins``. It has ``met`` the workers that it can push to. ``on_plan``,
    ``on_settle``, ``on_take``, ``on_distrust`` and ``is_kept`` belong to the cell."""

    reason = WaitReason.PLACEMENT

    def __init__(
        self,
        peer: Peer,
        worker: WorkerState,
        message: Inbox,
        on_plan: "Callable[[Transfers], None]",
        on_settle: "Callable[[Transfers], None]",
        on_take: Callable[[WorkerState, Sequence], None],
        is_kept: "Callable[[Transfers, Sequence], bool]",
        on_distrust: "Callable[[Transfers, Iterable[bytes]], None]",
    ) -> None:
        self.peer = peer
        self.name = peer.hello.instance
        self.worker = worker
        self.message = message
        self.shape = PointShape(worker.capacity, message.num_pieces)
        self.points = ComingPoints(worker, self.shape)
        self.inbox = InboxPlaces(worker, message, self.points)
        self.moves: dict[Sequence, Move] = {}
        self.incoming: dict[Move, None] = {}
        self.due: dict[Sequence, int] = {}  # the blocks meant for each
        self.num_meant = 0
        self.fetches: dict[Delivery, None] = {}
        self.served: dict[Delivery, None] = {}
        self.pins = Pins(worker)
        self.choice = CopyOrCompute(worker)
        self.fetch_times: dict[Transfers, CopyTimes] = {}
        self.met: set[MoveTarget] = set()
        self.avoided: dict[MoveTarget, int] = {}
        self.tried: dict[Sequence, int] = {}
        self._on_distrust = on_distrust
        self._on_plan = on_plan
        self._on_settle = on_settle
        self._on_take = on_take
        self._is_kept = is_kept
        self._pushed: deque[tuple[int, list[Place]]] = deque()  # without a result, by step

    @property
    def may_move(self) -> bool:
        """True if another worker can go on from its blocks and copies of states."""
        return self.worker.capacity.num_stages == 1 and self.worker.capacity.num_states != 0

    def arrive(self, message: Arrived) -> None:
        """Raises CodecError."""
        keys, parts = message.keys, message.parts
        if len(parts) not in (0, len(keys)):
            raise CodecError(f"an Arrived of {len(keys)} keys with {len(parts)} parts")
        for key, part in zip(keys, parts, strict=False):
            self.shape.check(key, part)
        self.inbox.arrive(keys, message.are_guests, parts)

    def reaches(self, other: MoveTarget) -> bool:
        """True if its blocks are of use to ``other``, and come there."""
        own, their = self.message, other.message
        is_near = own.location == their.location or bool(their.address)
        return other is not self and own.layout == their.layout and is_near

    def may_reach(self, other: MoveTarget) -> bool:
        """True if nothing of late speaks against it either."""
        return self.reaches(other) and other not in self.avoided

    @property
    def _num_out(self) -> int:
        """Counts the blocks on their way out: as many as memory is planned for."""
        return sum(each.num_pushed - each.num_there for each in self._outgoing)

    @property
    def _outgoing(self) -> Iterator[Delivery]:
        return chain(self.moves.values(), self.served)

    @property
    def deliveries(self) -> Iterable[Delivery]:
        return [*self.incoming, *self.fetches]

    @property
    def has_idle_rows(self) -> bool:
        """True if blocks wait for its next plan, and none is under way."""
        if self.worker.in_flight:
            return False
        lacking = any(each.num_pushed < each.num_wanted for each in self._outgoing)
        return self.inbox.has_arrived or lacking

    def has(self, key: bytes, part: Part | None) -> bool:
        return self.inbox.has(key, part)

    def has_place(self, move: Move, placement: Placement) -> bool:
        """Sequences that are due come first."""
        num_due = sum(self.due.values())
        return (
            self.worker.num_free_slots > len(self.due)
            and self.worker.pool.num_free >= num_due + len(move.allocation.blocks)
            and placement.has_room(self.worker, move.sequence)
        )

    def has_all(self, delivery: Delivery) -> bool:
        """The first blocks become the last to be evicted."""
        hit, pool = self.worker.blocks.find_hit(delivery.sequence), self.worker.pool
        if hit.num_blocks < delivery.end:
            delivery.rewind(min(hit.num_whole, delivery.num_whole))
            return False
        pool.share(hit.tables[0])
        pool.free(hit.tables[0])
        if hit.point is not None:
            pool.use(hit.point)
        return True

    def introduce(self, target: MoveTarget, *, are_guests: bool = False) -> None:
        """Before the first push to ``target``."""
        if target not in self.met:
            self.met.add(target)
            is_here = self.message.location == target.message.location
            address = "" if is_here else target.message.address
            self.peer.send(Meet(target.name, address, are_guests))

    def times_from(self, source: "Transfers") -> CopyTimes:
        return self.fetch_times.setdefault(source, CopyTimes())

    def is_kept_from(self, sequence: Sequence) -> bool:
        return self._is_kept(self, sequence)

    def take(self, sequence: Sequence) -> None:
        self._on_take(self.worker, sequence)

    def distrust(self, sequence: Sequence) -> None:
        num, size = sequence.allocated.num_indexed, self.shape.block_size
        self._on_distrust(self, [sequence.block_hash(each, size) for each in range(num)])

    def rows(self, step: int) -> Series[PlanRow]:
        pushes: list[tuple[Push, Place]] = []
        most = min(self.inbox.max_copies, self.inbox.num_places - self._num_out)
        for each in self._outgoing:
            pushes += each.push(most - len(pushes))
        if pushes:
            self._pushed.append((step, [place for _, place in pushes]))
        rows = [*(row for row, _ in pushes), *self.inbox.rows(step)]
        self._on_plan(self)
        return rows

    def finish(self, step: int) -> None:
        self.inbox.finish(step)
        if self._pushed and self._pushed[0][0] == step:
            self._leave(self._pushed.popleft()[1])

    def settle(self, step: int) -> None:
        self.pins.yield_to_running()
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
