"""The slot and blocks of a sequence on its worker, and its progress there."""

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.block_pool import KeepPoint
from services.scheduler.eviction import Standing

# A chunk's first id, its end and the latest end → its end.
Cut = Callable[[int, int, int], int]


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of a sequence in a group of layers, after ``num_passed`` behind the window."""

    blocks: list[int]
    num_passed: int = 0

    @property
    def num_blocks(self) -> int:
        """Counts the blocks of the whole sequence."""
        return self.num_passed + len(self.blocks)

    def padded(self, null_block: int) -> list[int]:
        return [null_block] * self.num_passed + self.blocks


@dataclass(slots=True, eq=False)
class Allocation:
    """A slot and blocks of worker ``worker_id``, and its progress with the sequence.

    Plans in flight, up to step ``last_step``, sample up to ``num_pending`` ids, and at least
    ``num_due`` unless the sequence ends: one per step. ``pending`` has the steps and the most ids
    of each of these plans. If they sample the most, ``num_computed`` ids have their KV in the
    blocks after these plans. There is a table for each group of layers, with blocks for
    ``num_places`` ids at least. The first ``num_indexed`` blocks were offered to the worker's
    index. Its ``keep_points`` are its beginning and its own ones. One is due at block ``junction``,
    the end of the part in common with an earlier prompt; 0: none. The ``standing`` of its blocks
    and the time that it asked for, ``retention_s``, decide about their eviction.
    ``may_have_drafts``: a plan has sampled for the sequence.

    Its state begins as the copy ``from_state``. Copies of it behind more than ``copied_after`` ids
    go to ``to_state``, each over the one before; None: there are none. A keep point is due at block
    ``due``, or none at 0. Chunks of the prompt end where its ``cuts`` say. ``num_last`` counts the
    ids of its last output row: 0 if it failed or its token is computed again. Only its first
    ``num_ready`` ids may be computed yet, and none while it ``is_held``: until blocks of them are
    loaded, or until it leaves.
    """

    worker_id: str
    slot: int
    tables: list[BlockTable]
    num_indexed: int
    num_computed: int
    num_places: int = 0
    junction: int = 0
    standing: Standing = Standing.USUAL
    retention_s: int = 0
    keep_points: list[KeepPoint] = field(default_factory=list)
    num_pending: int = 0
    num_due: int = 0
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    may_have_drafts: bool = False
    last_step: int = 0
    from_state: int | None = None
    to_state: int | None = None
    copied_after: int = 0
    due: int = 0
    cuts: list[Cut] = field(default_factory=list)
    num_last: int | None = None
    num_ready: int = sys.maxsize
    is_held: bool = False

    @property
    def blocks(self) -> list[int]:
        """The blocks of all tables."""
        return [block for table in self.tables for block in table.blocks]

    def expect(self, num_steps: int, num_tokens: int) -> None:
        """Notes a plan that samples up to ``num_tokens`` in ``num_steps`` and computes all but the
        last of them."""
        self.may_have_drafts = True
        self.pending.append((num_steps, num_tokens))
        self.num_due += num_steps
        self.num_pending += num_tokens
        self.num_computed += num_tokens - 1

    def num_copied(self, interval: int, num_known: int, has_ended: bool) -> int | None:
        """Counts the ids in the last copy of its state, after the plans in flight; None without a
        copy, or if results decide which copy is the last."""
        if self.to_state is None or self.num_last == 0:
            return None
        if self.num_due and not has_ended:  # the next step computes all known ids
            least, most = num_known, max(num_known, self.num_computed)
        else:  # the state lacks the drafts accepted in the last step
            least = most = min(self.num_computed, num_known - (self.num_last or 0))
        num = least // interval * interval
        return num if num == most // interval * interval and num > self.copied_after else None

    def up_to_cut(self, num_tokens: int, most: int) -> int:
        """Returns the tokens of the next chunk, by its cuts ``most`` instead of ``num_tokens``."""
        first, end = self.num_computed, self.num_computed + num_tokens
        for cut in self.cuts:
            end = cut(first, end, first + most)
        return end - first

    def receive(self, num_tokens: int) -> None:
        """Notes that the oldest of these plans sampled ``num_tokens``."""
        num_steps, num_expected = self.pending.popleft()
        self.num_due -= num_steps
        self.num_pending -= num_expected
        self.num_computed -= num_expected - num_tokens
