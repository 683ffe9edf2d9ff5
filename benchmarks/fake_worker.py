"""A worker with instant steps, for ``front.py``: ``python -m benchmarks.fake_worker``."""

from dataclasses import dataclass

import numpy as np

from benchmarks.harness.step_engine import StepEngine
from services.worker.engine.protocol import Engine, StepOutput
from services.worker.service import WorkerService
from services.worker.weights.progress import Progress
from shared.model_folder import read_model_info
from shared.model_location import locate_model
from shared.process.service import main
from shared.settings.worker import WorkerConfig
from shared.wire.messages import (
    Admit,
    Capacity,
    FinishReason,
    ResultRow,
    StepPlan,
    StepResult,
    TokenRun,
)
from shared.wire.token_arrays import TokenArrays

FIRST_ID = 300  # the first of the plain words in the embedded model's vocabulary
NUM_IDS = 5000


@dataclass(slots=True)
class Slot:
    admit: Admit
    num_lacking: int
    num_emitted: int = 0

    def row(self) -> ResultRow:
        admit = self.admit
        is_over = self.num_emitted == admit.params.max_tokens
        finish: FinishReason | None = "length" if is_over else None
        return ResultRow(admit.slot, admit.request, admit.attempt, TokenRun(1), finish)


class InstantEngine(StepEngine):
    """Every sequence without tokens left to compute emits an arbitrary id."""

    def __init__(self, config: WorkerConfig) -> None:
        self.model_info = read_model_info(locate_model(config.model).folder, [], None)
        max_len = self.model_info.max_model_len
        self.capacity = Capacity(
            1 << 20, 16, config.max_num_seqs, 8192, max_len, self.model_info.vocab_size
        )
        self._slots: dict[int, Slot] = {}

    @property
    def num_running(self) -> int:
        return len(self._slots)

    def reset(self) -> None:
        self._slots = {}

    def step(self, plan: StepPlan, ids: np.ndarray) -> StepOutput:
        for number in plan.release:
            self._slots.pop(number, None)
        for admit in plan.admit:
            self._slots[admit.slot] = Slot(admit, admit.num_ids)
        emitting = []
        for number, num in [(row.slot, 1) for row in plan.decode] + [
            (row.slot, row.num_tokens) for row in plan.prefill
        ]:
            slot = self._slots[number]
            slot.num_lacking -= num
            if slot.num_lacking == 0:
                slot.num_lacking, slot.num_emitted = 1, slot.num_emitted + 1
                emitting.append(slot)
        emitting.sort(key=lambda slot: (slot.admit.route, slot.admit.slot))
        written = [FIRST_ID + 7 * slot.num_emitted % NUM_IDS for slot in emitting]
        result = StepResult(plan.step, [slot.row() for slot in emitting])
        return result, TokenArrays(np.array(written, np.int32))


def build(config: WorkerConfig, progress: Progress) -> Engine:
    return InstantEngine(config)


if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, build))
