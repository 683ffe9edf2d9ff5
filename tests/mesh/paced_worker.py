"""A worker without a model at a controlled speed: ``python -m tests.mesh.paced_worker``.

It checks every plan, and each token depends on all ids before it. In the folder that
TEST_PACE names, a step takes ``STEP_S`` while there is a file ``slow``, and none begins while
there is a file ``hold``.
"""

import os
import time
from pathlib import Path

import numpy as np

from benchmarks.harness.step_engine import StepEngine
from services.scheduler.scheduler import Planned
from services.worker.engine.protocol import Engine, StepOutput
from services.worker.service import WorkerService
from services.worker.weights.progress import Progress
from shared.model_folder import read_model_info
from shared.model_location import locate_model
from shared.process.service import main
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity, StepPlan
from tests.services.scheduler.simulated_worker import SimulatedWorker

STEP_S = 0.15
LOOK_S = 0.005


class PacedEngine(StepEngine):
    def __init__(self, config: WorkerConfig) -> None:
        folder = locate_model(config.model).folder
        self.model_info = read_model_info(folder, [], config.max_model_len)
        self.capacity = Capacity(
            num_blocks=8192,
            block_size=16,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=self.model_info.max_model_len,
            vocab_size=self.model_info.vocab_size,
        )
        self._folder = Path(os.environ["TEST_PACE"])
        self.reset()

    @property
    def num_running(self) -> int:
        return len(self._worker.slots)

    def reset(self) -> None:
        self._worker = SimulatedWorker(self.capacity)

    def step(self, plan: StepPlan, ids: np.ndarray) -> StepOutput:
        while (self._folder / "hold").exists():
            time.sleep(LOOK_S)
        until_s = time.monotonic() + STEP_S
        while (self._folder / "slow").exists() and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        return self._worker.step(Planned(plan, ids))


def build(config: WorkerConfig, progress: Progress) -> Engine:
    return PacedEngine(config)


if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, build))
