"""A worker without a model that dies in its first step: ``python -m tests.mesh.dying_worker``."""

import os

import numpy as np

from services.worker.engine.protocol import Engine, StepOutput
from services.worker.service import WorkerService
from services.worker.weights.progress import Progress
from shared.process.service import main
from shared.settings.worker import WorkerConfig
from shared.wire.messages import StepPlan
from tests.mesh.wide_worker import WideEngine


class DyingEngine(WideEngine):
    def step(self, plan: StepPlan, ids: np.ndarray) -> StepOutput:
        os._exit(9)


def build(config: WorkerConfig, progress: Progress) -> Engine:
    return DyingEngine(config)


if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, build))
