"""The seam between the core and things, besides slots and blocks, that sequences share."""

from collections.abc import Iterable
from typing import Protocol

from services.scheduler.sequence import Sequence, WaitReason


class Resource(Protocol):
    """A limited thing of one worker. A sequence holds a part of it as long as its slot, which stays
    taken until no plan in flight names it."""

    @property
    def reason(self) -> WaitReason:
        """Of sequences that wait for it."""

    @property
    def starved(self) -> Sequence | None:
        """The waiting sequence that it keeps a part for."""

    def fits(self, sequence: Sequence) -> bool:
        """True if there is enough of it for ``sequence`` alone."""

    def has_room_for(self, sequence: Sequence, without: Iterable[Sequence] = ()) -> bool:
        """True if there is enough of it for ``sequence`` now, or would be without some running
        ones."""

    def is_kept_from(self, sequence: Sequence) -> bool:
        """True if the room for ``sequence`` is kept for an earlier one that waits too long."""

    def pass_over(self, sequence: Sequence) -> None:
        """Notes that others are admitted before ``sequence`` for lack of it."""

    def take(self, sequence: Sequence) -> None:
        """``sequence`` gets a slot."""

    def free(self, slot: int) -> None:
        """The slot is free."""
