"""The phase of a guided output: before, in or after its reasoning, or at its end."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shared.wire.messages import Guide


class Phase(Enum):
    UNDECIDED = 0  # the first token decides
    REASONING = 1
    ANSWER = 2
    ENDED = 3  # an end id was emitted; more follow if it was ignored


class Gate(NamedTuple):
    """The phase of the next token, and the number of reasoning tokens before it."""

    phase: Phase
    num_reasoned: int = 0


@dataclass(frozen=True, slots=True)
class GateRules:
    """The phase transitions of a sequence. ``forced_ids`` follow ``budget`` tokens of reasoning;
    the last of them ends it, or the first one among ``close_ids``."""

    is_open: bool
    open_ids: frozenset[int]
    close_ids: frozenset[int]
    end_ids: frozenset[int]
    budget: int | None
    forced_ids: tuple[int, ...]

    @classmethod
    def of(cls, guide: Guide, end_ids: frozenset[int]) -> "GateRules":
        close_ids = frozenset(guide.close_ids)
        open_ids = frozenset(guide.open_ids) if close_ids else frozenset[int]()
        is_open = guide.is_open and bool(close_ids)
        return cls(is_open, open_ids, close_ids, end_ids, guide.budget, tuple(guide.forced_ids))

    @property
    def first(self) -> Gate:
        if self.is_open:
            return self._reasoning(0)
        return Gate(Phase.UNDECIDED if self.open_ids else Phase.ANSWER)

    def after(self, gate: Gate, token_id: int) -> Gate:
        """The gate after ``token_id``, which was sampled at ``gate``."""
        if gate.phase is Phase.REASONING:
            if token_id in self.close_ids:
                return Gate(Phase.ANSWER)
            return self._reasoning(gate.num_reasoned + 1)
        if gate.phase is Phase.UNDECIDED and token_id in self.open_ids:
            return self._reasoning(0)
        if gate.phase is Phase.ENDED or token_id in self.end_ids:
            return Gate(Phase.ENDED)
        return Gate(Phase.ANSWER)

    def forced_ids_from(self, gate: Gate) -> list[int]:
        """The ids to force once the budget is spent, else none."""
        if gate.phase is not Phase.REASONING or self.budget is None:
            return []
        num_beyond = gate.num_reasoned - self.budget
        return list(self.forced_ids[num_beyond:]) if num_beyond >= 0 else []

    def _reasoning(self, num_reasoned: int) -> Gate:
        if self.budget is not None and num_reasoned >= self.budget + len(self.forced_ids):
            return Gate(Phase.ANSWER)
        return Gate(Phase.REASONING, num_reasoned)
