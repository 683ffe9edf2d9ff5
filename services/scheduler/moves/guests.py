"""Workers of other cells, to which blocks move before their sequences are handed over. Pure."""

from collections.abc import Callable, Iterable

from services.scheduler.moves.inbox import Places
from services.scheduler.moves.move import Move
from services.scheduler.placement import Placement
from services.scheduler.sequence import Sequence
from shared.link.peer import Peer
from shared.wire.messages import Inbox


class Guest:
    """The worker ``peer`` with the inbox ``message``. Its cell takes a sequence if it
    ``may_have`` it. Blocks that a plan there has taken are in the cell's prefix cache, as far as
    this scheduler knows, until no move needs them."""

    def __init__(self, peer: Peer, message: Inbox, may_have: Callable[[Sequence], bool]) -> None:
        assert peer.hello.capacity is not None
        self.peer = peer
        self.name = peer.hello.instance
        self.message = message
        self.block_size = peer.hello.capacity.block_size
        self.inbox = Places(message.num_guests)
        self.incoming: dict[Move, None] = {}
        self.num_meant = 0
        self._may_have = may_have
        self._settled: set[bytes] = set()

    def has(self, key: bytes) -> bool:
        return key in self._settled

    def settle(self, keys: Iterable[bytes]) -> None:
        """Plans there have taken the blocks, or its cell had them before."""
        for key in keys:
            self.inbox.free(key)
            if self.incoming:
                self._settled.add(key)

    def forget(self) -> None:
        """Its cell may evict blocks that no move needs."""
        if not self.incoming:
            self._settled.clear()

    def may_take(self, sequence: Sequence) -> bool:
        return self.peer.is_ready and self._may_have(sequence)

    def has_place(self, move: Move, placement: Placement) -> bool:
        return self.may_take(move.sequence)

    def has_all(self, move: Move) -> bool:
        return True
