"""Hook for the schedulers of other cells, which may take prompts over."""

from collections.abc import Callable, Iterable, Mapping

from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Sequence
from services.scheduler.tokens_message import Forwarding


class OtherCells:
    """Knows no other cells: every prompt stays here."""

    def __init__(
        self,
        core: Scheduler,
        routes: Mapping[int, Forwarding],
        instance: str,
        on_change: Callable[[], None],
    ) -> None:
        """``routes`` lead to tokenizers. ``instance`` is the name of this scheduler.
        ``on_change`` must be called after a handover."""

    def may_have(self, sequence: Sequence, cell: str = "") -> bool:
        """True if the scheduler ``cell``, or any other, may have ``sequence``."""
        return False

    def hand_over(self, sequences: Iterable[Sequence]) -> None:
        """Hands over the prompts of ``sequences`` that another cell may have, with all their
        choices."""

    def move_waiting(self, now_s: float) -> None:
        """Hands over prompts that could start elsewhere now; called every ``LOOK_S``."""

    async def hand_over_all(self, within_s: float) -> None:
        """Hands over all sequences. Returns once no sequence is left that another cell may
        have."""
