"""A real worker that records its results: ``python -m tests.mesh.recording_worker``.

Each step's rows and arrays go to a file in the folder that TEST_RECORDS names; no step begins while
that has a file ``hold``.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from services.worker.engine.host import HostEngine
from services.worker.engine.protocol import StepOutput
from services.worker.service import WorkerService
from services.worker.weights.progress import Progress
from shared.process.service import main
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import StepPlan, StepResult
from shared.wire.token_arrays import Layout, TokenArrays


class RecordingEngine(HostEngine):
    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        while (Path(os.environ["TEST_RECORDS"]) / "hold").exists():
            time.sleep(0.005)
        computed: Future[StepOutput] = Future()
        super().submit(plan, ids, computed, pixels)
        output.set_result(self._recorded(plan, *computed.result()))

    def _recorded(self, plan: StepPlan, result: StepResult, arrays: TokenArrays) -> StepOutput:
        layout = Layout(result.rows, arrays)
        parts: dict[str, Any] = {
            row.request.replace("/", ":"): layout.part(index, index + 1).values.reshape(
                row.run.num_tokens, row.run.num_values
            )
            for index, row in enumerate(result.rows)
        }
        folder = Path(os.environ["TEST_RECORDS"])
        np.savez(folder / f"{plan.step:06}.npz", **parts)
        return result, arrays


def build(config: WorkerConfig, progress: Progress) -> RecordingEngine:
    return RecordingEngine(config, progress)


if __name__ == "__main__":
    main("worker", WorkerConfig, lambda config: WorkerService(config, build))
