"""The interface of all engines, used by the worker."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from services.worker.startup.additions import Addition
from services.worker.weights.progress import Progress
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import Capacity, ModelInfo, StepPlan, StepResult
from shared.wire.token_arrays import TokenArrays

StepOutput = tuple[StepResult, TokenArrays]


class Engine(Protocol):
    """A model with its KV cache and slots, and its optional parts. One thread builds it and calls
    it."""

    model_info: ModelInfo
    capacity: Capacity
    additions: Sequence[Addition]

    @property
    def num_running(self) -> int:
        """Number of admitted sequences without an end in the results so far."""

    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        """Runs the steps of a plan, at most ``capacity.max_num_steps``. ``ids`` [sum of num_ids]
        int32 are the known ids of the admitted rows, ``pixels`` the plan's further buffers.

        ``output`` gets the rows that emitted or ended, with their buffers. It is set on any thread,
        during the call or later, in the order of calls. An error may be raised here instead.
        """

    def reset(self) -> None:
        """Waits for steps in flight and forgets all sequences."""


BuildEngine = Callable[[WorkerConfig, Progress], Engine]


class EngineModule(Protocol):
    build: BuildEngine
