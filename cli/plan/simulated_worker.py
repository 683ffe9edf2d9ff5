"""A worker that computes nothing and takes the time of a step."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from cli.plan.speed import StepTimes
from services.scheduler.scheduler import Planned
from shared.messages import FinishReason, ResultRow, StepResult, TokenRun
from shared.token_arrays import TokenArrays


@dataclass(slots=True)
class _Slot:
    request: str
    attempt: int
    route: int
    num_ids: int
    num_computed: int
    end: int  # of its ids
    has_finished: bool = False


@dataclass
class SimulatedWorker:
    """Follows its plans as an engine does, with ids that are all alike; is idle from ``free_s``."""

    name: str
    times: StepTimes
    slots: dict[int, _Slot] = field(default_factory=dict)
    in_flight: deque[tuple[StepResult, TokenArrays]] = field(default_factory=deque)
    free_s: float = 0.0

    def submit(self, planned: Planned, now_s: float) -> float:
        """Returns when the step ends."""
        plan = planned.plan
        for slot in plan.release:
            del self.slots[slot]
        for admit in plan.admit:
            end = admit.prompt_len + (admit.params.max_tokens or 1)
            self.slots[admit.slot] = _Slot(
                *(admit.request, admit.attempt, admit.route, admit.num_ids, admit.num_cached, end)
            )
        num_cached = sum(self.slots[row.slot].num_computed for row in plan.decode)
        num_prompt = sum(row.num_tokens for row in plan.prefill)
        rows = [
            row
            for each in plan.prefill
            if (row := self._advance(each.slot, each.num_tokens)) is not None
        ]
        rows += [row for each in plan.decode if (row := self._advance(each.slot, 1)) is not None]
        rows.sort(key=lambda row: (self.slots[row.slot].route, row.slot))
        step_s = self.times.seconds(len(plan.decode), num_cached, num_prompt)
        self.free_s = max(self.free_s, now_s) + step_s
        arrays = TokenArrays(np.zeros(len(rows), np.int32))
        self.in_flight.append((StepResult(plan.step, rows, step_s=step_s), arrays))
        return self.free_s

    def _advance(self, index: int, num: int) -> ResultRow | None:
        """The row of a slot that has computed all that it knows."""
        slot = self.slots[index]
        if slot.has_finished:
            return None
        slot.num_computed += num
        if slot.num_computed < slot.num_ids:
            return None
        slot.num_ids += 1
        finish: FinishReason | None = "length" if slot.num_ids >= slot.end else None
        slot.has_finished = finish is not None
        return ResultRow(index, slot.request, slot.attempt, TokenRun(1), finish)
