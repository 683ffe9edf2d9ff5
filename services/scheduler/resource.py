"""The seam between the core and things, besides slots and blocks, that sequences share."""

from collections.abc import Iterable
from collections.abc import Sequence as Series

from services.scheduler.sequence import Sequence, WaitReason
from shared.wire.messages import PlanRow


class Resource:
    """A limited thing of one worker. A sequence holds a part of it as long as its slot, which stays
    taken until no plan in flight names it. ``reason``: of sequences that wait for it. The defaults
    are for a thing without limits."""

    reason: WaitReason

    @property
    def starved(self) -> Sequence | None:
        """The waiting sequence that it keeps a part for."""
        return None

    @property
    def spare(self) -> int:
        """The tokens of a plan that it keeps for items that one step must compute."""
        return 0

    def fits(self, sequence: Sequence) -> bool:
        """True if there is enough of it for ``sequence`` alone."""
        return True

    def has_room_for(self, sequence: Sequence, without: Iterable[Sequence] = ()) -> bool:
        """True if there is enough of it for ``sequence`` now, or would be without some running
        ones."""
        return True

    def is_kept_from(self, sequence: Sequence) -> bool:
        """True if its room is not for ``sequence``, but for others, or another worker takes it."""
        return False

    def pass_over(self, sequence: Sequence) -> None:
        """Notes that others are admitted before ``sequence`` for lack of it."""

    def num_loadable(self, sequence: Sequence, num_blocks: int) -> int:
        """Counts the blocks that it can load behind a cached prefix of ``num_blocks``."""
        return 0

    def take(self, sequence: Sequence) -> None:
        """``sequence`` gets a slot, and blocks that may be loaded: it ``is_held`` until then."""

    def begin(self, sequence: Sequence) -> None:
        """All resources of ``sequence`` are taken, and its first id to compute is known."""

    def free(self, slot: int) -> None:
        """The slot is free."""

    def distrust(self, sequence: Sequence) -> None:
        """The content of a sequence's blocks may be wrong."""

    def rows(self, step: int) -> Series[PlanRow]:
        """Returns its rows in the plan of ``step``, which is sent if it has any."""
        return ()

    def finish(self, step: int) -> None:
        """The result of ``step`` has come. Raises CodecError if it may not come yet."""

    def settle(self, step: int) -> None:
        """The result of ``step`` has been applied to its sequences."""
