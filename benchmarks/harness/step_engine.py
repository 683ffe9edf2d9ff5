"""Synchronous engines, and waiting for one step of any engine."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from services.worker.engine.protocol import Engine, StepOutput
from services.worker.startup.additions import Addition
from shared.wire.codec import Array
from shared.wire.messages import StepPlan


class StepEngine:
    """Implements ``submit`` by ``step``, which subclasses define."""

    additions: Sequence[Addition] = ()

    def step(self, plan: StepPlan, ids: np.ndarray) -> StepOutput:
        raise NotImplementedError

    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        output.set_result(self.step(plan, ids))


def run_step(
    engine: Engine, plan: StepPlan, ids: np.ndarray, pixels: Sequence[Array] = ()
) -> StepOutput:
    """Submits one step and waits for its output."""
    output: Future[StepOutput] = Future()
    engine.submit(plan, ids, output, pixels)
    return output.result()
