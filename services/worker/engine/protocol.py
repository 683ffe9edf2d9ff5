"""What the worker asks of an engine, whichever device it computes on."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from services.worker.weights.progress import Progress
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity, ModelInfo, StepPlan, StepResult
from shared.wire.token_arrays import TokenArrays

StepOutput = tuple[StepResult, TokenArrays]


class Engine(Protocol):
    """A model with its KV cache and the slots of its sequences. One thread builds it and calls
    it."""

    model_info: ModelInfo
    capacity: Capacity

    @property
    def num_running(self) -> int:
        """Sequences that are admitted and have not ended, as far as results have come."""

    def submit(self, plan: StepPlan, ids: np.ndarray, output: Future[StepOutput]) -> None:
        """Runs the step of a plan, or its several steps, of which there are no more than
        ``capacity`` says; ``ids`` [sum of num_ids] int32 are the known ids of the admitted rows.

        ``output`` gets the rows that emitted or ended and their buffers, on any thread, during the
        call or after it, in the order of calls; an error before that may be raised here instead.
        """

    def reset(self) -> None:
        """Forgets all sequences, once their steps have run."""


BuildEngine = Callable[[WorkerConfig, Progress], Engine]
