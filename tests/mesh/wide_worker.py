"""A worker without a model with large steps: ``python -m tests.mesh.wide_worker``.

All its drafts are right. In the folder that TEST_STEPS names, no step begins while there is a
file ``hold``, and ``steps`` has for each its rows, its tokens and the bytes of its arrays.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.step_engine import StepEngine
from services.worker.engine.protocol import Engine, StepOutput
from services.worker.service import WorkerService
from services.worker.weights.progress import Progress
from shared.model_folder import read_model_info
from shared.model_location import locate_model
from shared.process.service import main
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Admit, Capacity, ResultRow, StepPlan, StepResult, TokenRun
from shared.wire.token_arrays import TokenArrays, join

NUM_DRAFTS = 5
VOCAB_SIZE = 8192


def arrays_of(choice: int, position: int, num: int | None) -> TokenArrays:
    """All buffers of the ``position``-th token of a choice with ``num`` requested logprobs;
    distinct for each token."""
    rng = np.random.default_rng((choice, position))
    ids = rng.integers(300, 5300, 1).astype(np.int32)
    if num is None:
        return TokenArrays(ids)
    top_ids = rng.choice(VOCAB_SIZE, num, replace=False).astype(np.int32)
    rank = rng.integers(1, VOCAB_SIZE, 1).astype(np.int32)
    return TokenArrays(ids, -rng.standard_exponential(1 + num, np.float32), top_ids, rank)


@dataclass(slots=True)
class Slot:
    admit: Admit
    num_lacking: int
    num_emitted: int = 0

    @property
    def num_left(self) -> int:
        return (self.admit.params.max_tokens or 0) - self.num_emitted

    def emit(self, num_drafts: int) -> tuple[ResultRow, TokenArrays]:
        admit, num = self.admit, min(1 + num_drafts, self.num_left)
        asked = admit.params.logprobs
        positions = range(self.num_emitted, self.num_emitted + num)
        self.num_emitted += num
        row = ResultRow(
            admit.slot,
            admit.request,
            admit.attempt,
            TokenRun(
                num,
                0 if asked is None else 1 + asked,
                asked or 0,
                num_drafts=num_drafts,
                num_accepted=num - 1,
            ),
            None if self.num_left else "length",
        )
        return row, join([arrays_of(admit.choice, position, asked) for position in positions])


class WideEngine(StepEngine):
    """A prompt's row emits one token, and every other row the most possible."""

    def __init__(self, config: WorkerConfig) -> None:
        self.model_info = read_model_info(locate_model(config.model).folder, [], None)
        self.capacity = Capacity(
            num_blocks=4096,
            block_size=16,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=64 * config.max_num_seqs,
            max_model_len=self.model_info.max_model_len,
            vocab_size=self.model_info.vocab_size,
            num_speculative_tokens=NUM_DRAFTS,
        )
        self._folder = Path(os.environ["TEST_STEPS"])
        self._slots: dict[int, Slot] = {}

    @property
    def num_running(self) -> int:
        return len(self._slots)

    def reset(self) -> None:
        self._slots = {}

    def step(self, plan: StepPlan, ids: np.ndarray) -> StepOutput:
        while (self._folder / "hold").exists():
            time.sleep(0.005)
        parts = self._compute(plan)
        arrays = join([each for _, each in parts]) if parts else TokenArrays()
        with (self._folder / "steps").open("a") as steps:
            print(len(parts), len(arrays.ids), arrays.num_bytes, file=steps)
        return StepResult(plan.step, [row for row, _ in parts]), arrays

    def _compute(self, plan: StepPlan) -> list[tuple[ResultRow, TokenArrays]]:
        for number in plan.release:
            del self._slots[number]
        for admit in plan.admit:
            num_emitted = admit.num_ids - admit.prompt_len
            num_lacking = admit.num_ids - admit.num_cached
            self._slots[admit.slot] = Slot(admit, num_lacking, num_emitted)
        depths = {row.slot: row.verify_depth for row in plan.decode}
        for row in plan.prefill:
            slot = self._slots[row.slot]
            slot.num_lacking -= row.num_tokens
            if slot.num_lacking == 0:
                depths[row.slot] = 0
        emitting = [self._slots[number] for number in depths if self._slots[number].num_left]
        emitting.sort(key=lambda slot: (slot.admit.route, slot.admit.slot))
        return [slot.emit(depths[slot.admit.slot]) for slot in emitting]


def build(config: WorkerConfig, progress: Progress) -> Engine:
    return WideEngine(config)


if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, build))
