"""A simulated worker that pushes and takes blocks."""

from collections import deque
from dataclasses import dataclass, field

from services.scheduler.scheduler import Planned
from shared.wire.messages import Discard, Push, StepPlan, StepResult, Take
from shared.wire.token_arrays import TokenArrays
from tests.services.scheduler.simulated_worker import SimulatedWorker

Content = list[int]


class Inboxed:
    """The blocks in an inbox. A checked plan has the ones that it takes."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, list[Content]] = {}
        self._taken: deque[Content] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def put(self, key: bytes, content: Content) -> None:
        self._blocks.setdefault(key, []).append(content)

    def check(self, plan: StepPlan) -> None:
        for row in plan.rows:
            if isinstance(row, Take):
                self._taken.append(self._pop(row.key))
            elif isinstance(row, Discard):
                self._pop(row.key)

    def next_taken(self) -> Content:
        return self._taken.popleft()

    def _pop(self, key: bytes) -> Content:
        blocks = self._blocks[key]
        if len(blocks) == 1:
            del self._blocks[key]
        return blocks.pop()


@dataclass
class MovingWorker(SimulatedWorker):
    """``pushed`` blocks are on their way, with the name of their target. Plans for it are checked
    by its ``inbox``."""

    pushed: list[tuple[str, bytes, Content]] = field(default_factory=list)
    inbox: Inboxed = field(default_factory=Inboxed)
    num_pushed: int = 0
    num_taken: int = 0
    num_discarded: int = 0

    def step(self, planned: Planned) -> tuple[StepResult, TokenArrays]:
        for row in planned.plan.rows:
            match row:
                case Push(key, block, worker):
                    content = self.kv[block]
                    assert len(content) == self.capacity.block_size, "a part of a block"
                    self.pushed.append((worker, key, list(content)))
                    self.num_pushed += 1
                case Take(_, block):
                    self.check_free(planned.plan, block)
                    self.kv[block] = self.inbox.next_taken()
                    self.num_taken += 1
                case Discard():
                    self.num_discarded += 1
        return super().step(planned)

    def check_free(self, plan: StepPlan, block: int) -> None:
        """No slot reads or writes the block."""
        tables = [
            table
            for number, slot in self.slots.items()
            if number not in plan.release
            for table in slot.tables
        ]
        assert not any(block in table for table in tables), "a block with an owner is overwritten"
