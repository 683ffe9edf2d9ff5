"""The base of engines that compute a whole step at once."""

from concurrent.futures import Future

import numpy as np

from services.worker.engine.protocol import StepOutput
from shared.messages import StepPlan


class StepEngine:
    """Implements ``submit`` by ``step``, which subclasses define."""

    def step(self, plan: StepPlan, ids: np.ndarray) -> StepOutput:
        raise NotImplementedError

    def submit(self, plan: StepPlan, ids: np.ndarray, output: Future[StepOutput]) -> None:
        output.set_result(self.step(plan, ids))
