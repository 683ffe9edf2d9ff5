"""An engine without a model, for everything that is not about the model."""

import time

import numpy as np

from services.scheduler.scheduler import Planned
from shared.messages import Capacity, ModelInfo, ResultRow, StepPlan, StepResult
from shared.token_arrays import TokenArrays
from tests.services.scheduler.simulated_worker import SimulatedWorker


class FakeEngine:
    """Writes the ids of ``text`` over and over, one a step; checks every plan it gets."""

    def __init__(
        self, model_info: ModelInfo, capacity: Capacity, ids: list[int], step_s: float
    ) -> None:
        self.model_info = model_info
        self.capacity = capacity
        self.step_s = step_s
        self._ids = ids
        self._worker = SimulatedWorker(capacity)

    @property
    def num_running(self) -> int:
        return len(self._worker.slots)

    def reset(self) -> None:
        self._worker = SimulatedWorker(self.capacity)

    def step(self, plan: StepPlan, ids: np.ndarray) -> tuple[StepResult, TokenArrays]:
        time.sleep(self.step_s)
        result, emitted = self._worker.step(Planned(plan, ids))
        written = [self._next(row) for row in result.rows]
        assert len(written) == len(emitted.ids)
        return result, TokenArrays(np.array(written, np.int32))

    def _next(self, row: ResultRow) -> int:
        slot = self._worker.slots[row.slot]
        return self._ids[(len(slot.ids) - slot.admit.prompt_len - 1) % len(self._ids)]
