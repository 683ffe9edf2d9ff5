"""A simulated worker that pushes and takes blocks."""

from dataclasses import dataclass, field

from services.scheduler.scheduler import Planned
from shared.wire.messages import Discard, Push, StepPlan, StepResult, Take
from shared.wire.token_arrays import TokenArrays
from tests.services.scheduler.simulated_worker import SimulatedWorker

Content = list[int]


@dataclass
class MovingWorker(SimulatedWorker):
    """``pushed`` blocks are on their way, with the name of their target. The ones in ``inbox`` have
    come."""

    pushed: list[tuple[str, bytes, Content]] = field(default_factory=list)
    inbox: dict[bytes, Content] = field(default_factory=dict)
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
                case Take(key, block):
                    self.check_free(planned.plan, block)
                    self.kv[block] = self.inbox.pop(key)
                    self.num_taken += 1
                case Discard(key):
                    del self.inbox[key]
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
