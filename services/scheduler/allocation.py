"""What a sequence has only while a worker has it."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Allocation:
    """A slot and blocks of the worker ``worker_id``, and how far it is with the sequence.

    Plans in flight bring up to ``num_pending`` more ids than are known, one for each of ``pending``
    at least, if they do not end the sequence; if they bring all, ``num_computed`` of its ids have
    their KV in ``blocks`` once those plans have run, the last of which is ``last_step``. The first
    ``num_indexed`` blocks were offered to the worker's index. ``may_have_drafts``: a plan has
    sampled for it.
    """

    worker_id: str
    slot: int
    blocks: list[int]
    num_indexed: int
    num_computed: int
    num_pending: int = 0
    pending: deque[int] = field(default_factory=deque)
    may_have_drafts: bool = False
    last_step: int = 0

    def expect(self, num_tokens: int) -> None:
        """A plan samples up to so many, and computes what is between them."""
        self.may_have_drafts = True
        self.pending.append(num_tokens)
        self.num_pending += num_tokens
        self.num_computed += num_tokens - 1

    def receive(self, num_tokens: int) -> None:
        """The oldest plan that samples for it has brought so many."""
        num_expected = self.pending.popleft()
        self.num_pending -= num_expected
        self.num_computed -= num_expected - num_tokens
