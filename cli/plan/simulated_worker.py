"""A simulated worker: takes the time of its plans and computes nothing."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from cli.plan.speed import ON_CORES_OF_ITS_OWN, MeshTimes, StepTimes
from services.scheduler.scheduler import Planned
from shared.wire.messages import FinishReason, ResultRow, StepPlan, StepResult, TokenRun
from shared.wire.token_arrays import TokenArrays


@dataclass(slots=True)
class _Slot:
    request: str
    attempt: int
    route: int
    num_ids: int
    num_computed: int
    end: int  # the final number of ids
    has_finished: bool = False


@dataclass
class SimulatedWorker:
    """Follows its plans like an engine, with constant ids; idle from ``free_s``."""

    name: str
    times: StepTimes
    mesh: MeshTimes = ON_CORES_OF_ITS_OWN
    slots: dict[int, _Slot] = field(default_factory=dict)
    in_flight: deque[tuple[StepResult, TokenArrays]] = field(default_factory=deque)
    free_s: float = 0.0

    def submit(self, planned: Planned, now_s: float) -> float:
        """Returns the end of the plan's last step."""
        plan = planned.plan
        for slot in plan.release:
            del self.slots[slot]
        for admit in plan.admit:
            end = admit.prompt_len + (admit.params.max_tokens or 1)
            self.slots[admit.slot] = _Slot(
                *(admit.request, admit.attempt, admit.route, admit.num_ids, admit.num_cached, end)
            )
        rows, num_steps, steps_s = self._compute(plan)
        rows.sort(key=lambda row: (self.slots[row.slot].route, row.slot))
        self.free_s = max(self.free_s, now_s) + steps_s + self.mesh.seconds(len(rows))
        result = StepResult(plan.step, rows, step_s=steps_s, num_steps=num_steps)
        self.in_flight.append((result, TokenArrays(np.zeros(len(rows), np.int32))))
        return self.free_s

    def _compute(self, plan: StepPlan) -> tuple[list[ResultRow], int, float]:
        """Returns the rows of all steps, the number of steps, and their seconds."""
        chunks = [(each.slot, each.num_tokens) for each in plan.prefill]
        num_prompt = sum(num_tokens for _, num_tokens in chunks)
        rows: list[ResultRow] = []
        steps_s = 0.0
        for num_steps in range(1, plan.num_steps + 1):
            decoding = [each.slot for each in plan.decode if not self.slots[each.slot].has_finished]
            if num_steps > 1 and not decoding:
                return rows, num_steps - 1, steps_s
            num_cached = sum(self.slots[slot].num_computed for slot in decoding)
            steps_s += self.times.seconds(len(decoding), num_cached, num_prompt)
            advanced = [
                self._advance(*each) for each in [*chunks, *((slot, 1) for slot in decoding)]
            ]
            rows += [row for row in advanced if row is not None]
        return rows, plan.num_steps, steps_s

    def _advance(self, index: int, num: int) -> ResultRow | None:
        """The row of a slot if it has computed all known ids."""
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
