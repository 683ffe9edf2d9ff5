"""A simulated worker that pushes and takes blocks."""

from collections import deque
from dataclasses import dataclass, field

from services.scheduler.scheduler import Planned
from shared.wire.messages import Discard, Part, Push, StepPlan, StepResult, Take
from shared.wire.token_arrays import TokenArrays
from tests.services.scheduler.simulated_worker import SimulatedWorker, State

Content = list[int] | tuple[State, int]  # of a block, or a piece of a state
Pushed = tuple[str, bytes, Content, Part | None]


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

    pushed: list[Pushed] = field(default_factory=list)
    inbox: Inboxed = field(default_factory=Inboxed)
    num_pushed: int = 0
    num_taken: int = 0
    num_discarded: int = 0
    num_pieces: int = 0
    num_parts_taken: int = 0
    pieces: dict[int, set[tuple[State, int]]] = field(default_factory=dict)  # by copy of a state

    def step(self, planned: Planned) -> tuple[StepResult, TokenArrays]:
        for row in planned.plan.rows:
            match row:
                case Push(key, block, worker, part):
                    self.pushed.append((worker, key, self._copy(block, part), part))
                    self.num_pushed += 1
                case Take(_, block, part):
                    self._fill(planned.plan, block, part, self.inbox.next_taken())
                    self.num_taken += 1
                    self.num_parts_taken += part is not None
                case Discard():
                    self.num_discarded += 1
        return super().step(planned)

    def _copy(self, block: int, part: Part | None) -> Content:
        if part is not None and part.group is None:
            state = self.states[block]
            assert state[0] == part.num_blocks * self.capacity.block_size, "another state"
            return state, part.number
        content = self.kv[block]
        assert len(content) == self.capacity.block_size, "a part of a block"
        return list(content)

    def _fill(self, plan: StepPlan, block: int, part: Part | None, content: Content) -> None:
        """A state is there once all of its pieces are."""
        if isinstance(content, list):
            self.check_free(plan, block)
            self.kv[block] = content
            return
        assert part is not None
        copied_to = {number: slot.copies_to for number, slot in self.slots.items()}
        copied_to |= {keep.slot: keep.to_state for keep in plan.keeps}
        writers = copied_to.keys() - {*plan.release}
        assert all(copied_to[number] != block for number in writers), "a copy with an owner"
        state, number = content
        assert (state[0], number) == (part.num_blocks * self.capacity.block_size, part.number)
        found = {each for each in self.pieces.get(block, ()) if each[0] == state}
        self.pieces[block] = found | {content}
        self.states.pop(block, None)
        if len(self.pieces[block]) == self.num_pieces:
            self.states[block] = state

    def check_free(self, plan: StepPlan, block: int) -> None:
        """No slot reads or writes the block."""
        dropped = {(drop.slot, drop.group): drop.num_blocks for drop in plan.drops}
        tables = [
            table[dropped.get((number, group), 0) :]
            for number, slot in self.slots.items()
            if number not in plan.release
            for group, table in enumerate(slot.tables)
        ]
        assert not any(block in table for table in tables), "a block with an owner is overwritten"
