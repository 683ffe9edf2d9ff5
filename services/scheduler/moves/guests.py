"""Workers of other cells, to which blocks move before their sequences are handed over. Pure."""

from collections.abc import Callable, Collection, Iterable

from services.scheduler.moves.delivery import Delivery
from services.scheduler.moves.inbox import Places
from services.scheduler.moves.move import Move
from services.scheduler.placement import Placement
from services.scheduler.sequence import Sequence
from shared.link.peer import Peer
from shared.wire.messages import Inbox, Part


class Guest:
    """The worker ``peer`` with the inbox ``message``. A sequence ``may_have`` a cell if it can be
    handed over to it. Settled blocks are in the other cell's prefix cache, as far as this scheduler
    knows, until no move needs them."""

    def __init__(
        self, peer: Peer, message: Inbox, may_have: Callable[[Sequence, str], bool]
    ) -> None:
        self.peer = peer
        self.name = peer.hello.instance
        self.message = message
        self.inbox = Places(message.num_guests)
        self.incoming: dict[Move, None] = {}
        self.num_meant = 0
        self._may_have = may_have
        self._settled: dict[bytes, bytes] = {}  # with the name of the keep point of a part

    @property
    def deliveries(self) -> Iterable[Move]:
        return self.incoming

    def has(self, key: bytes, part: Part | None = None) -> bool:
        return key in self._settled

    def settle(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            place = self.inbox.free(key)
            if place is not None and not place.is_stale and self.incoming:
                self._settled[key] = key if place.part is None else place.part.point

    def distrust(self, keys: Collection[bytes]) -> None:
        """The blocks may be wrong. The other cell may use them nevertheless."""
        self.inbox.spoil(keys)
        left = {key: name for key, name in self._settled.items() if name not in keys}
        self._settled = left

    def forget(self) -> None:
        """The other cell may evict blocks that no move needs."""
        if not self.incoming:
            self._settled.clear()

    def may_take(self, sequence: Sequence) -> bool:
        return self.peer.is_ready and self._may_have(sequence, self.message.cell)

    def has_place(self, move: Move, placement: Placement) -> bool:
        return self.may_take(move.sequence)

    def has_all(self, delivery: Delivery) -> bool:
        """Those that are distrusted meanwhile are pushed again."""
        for number in range(delivery.num_there):
            if not self.has(*delivery.unit(number)):
                delivery.rewind(number)
                return False
        return True
