"""What a sequence has only while it has a slot."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Allocation:
    """A slot and blocks of the worker ``worker_id``, and how far it is with the sequence.

    Plans in flight, the last of which is ``last_step``, bring up to ``num_pending`` ids, and
    ``num_due`` at least unless the sequence ends: one in each step. ``pending`` has for each of
    these plans its steps and the most that it brings. If they bring the most, ``num_computed`` ids
    have their KV in ``blocks`` once those plans have run. The first ``num_indexed`` blocks were
    offered to the worker's index. ``may_have_drafts``: a plan has sampled for the sequence.
    """

    worker_id: str
    slot: int
    blocks: list[int]
    num_indexed: int
    num_computed: int
    num_pending: int = 0
    num_due: int = 0
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    may_have_drafts: bool = False
    last_step: int = 0

    def expect(self, num_steps: int, num_tokens: int) -> None:
        """Notes that a plan samples up to ``num_tokens`` in ``num_steps``, and computes all but the
        last of them."""
        self.may_have_drafts = True
        self.pending.append((num_steps, num_tokens))
        self.num_due += num_steps
        self.num_pending += num_tokens
        self.num_computed += num_tokens - 1

    def receive(self, num_tokens: int) -> None:
        """Notes that the oldest of these plans has brought ``num_tokens``."""
        num_steps, num_expected = self.pending.popleft()
        self.num_due -= num_steps
        self.num_pending -= num_expected
        self.num_computed -= num_expected - num_tokens
