"""The engine and the scheduler's pure core in one loop: no sockets, one plan in flight."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from services.scheduler.scheduler import Planned, Scheduler
from services.worker.engine import Engine
from services.worker.metrics import MEMORY
from shared.config import WorkerConfig
from shared.errors import ConfigError, RequestError
from shared.messages import Generate, Grant, SamplingParams, StepResult

WORKER = "engine"
UNLIMITED_BYTES = 1 << 60
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Job:
    ids: np.ndarray  # [prompt_len] int32
    max_tokens: int


@dataclass(frozen=True)
class Step:
    """``num_prompt_tokens`` were computed of prompts, and ``num_decoded`` tokens drawn.
    ``engine_s`` is the step itself, ``scheduling_s`` what surrounds it."""

    num_prompt_tokens: int
    num_decoded: int
    engine_s: float
    scheduling_s: float


class EngineLoop:
    """Raises ConfigError where settings and machine do not go together, or jobs and engine."""

    def __init__(self, config: WorkerConfig) -> None:
        self._engine = Engine(config, lambda text, fraction: None)
        self.capacity = self._engine.capacity
        self.model = self._engine.model_info
        self._core = Scheduler(0, priority_step_s=0.0, caches_prefixes=False)
        self._core.add_worker(WORKER, self.capacity)
        self._num_added = 0

    @property
    def num_preemptions(self) -> int:
        return self._core.num_preemptions

    @property
    def weights_bytes(self) -> int:
        """As the worker tells it to those who watch it."""
        (samples,) = (metric.samples for metric in MEMORY.collect())
        return int(next(each.value for each in samples if each.labels["kind"] == "weights"))

    def warm_up(self, jobs: Sequence[Job], logprobs: int | None) -> None:
        """As many rows at once as ``jobs``, for few steps."""
        self.run([Job(each.ids, WARM_UP_TOKENS) for each in jobs], len(jobs), logprobs)

    def run(self, jobs: Sequence[Job], concurrency: int, logprobs: int | None) -> list[Step]:
        """All ``jobs``, of which so many are open at once; greedy, and as long as asked for."""
        left, steps = deque(jobs), []
        while left or self._core.sequences:
            started_s = perf_counter()
            while left and len(self._core.sequences) < concurrency:
                self._add(left.popleft(), logprobs)
            planned = self._core.plan(WORKER)
            assert planned is not None
            planned_s = perf_counter()
            result, arrays = self._engine.step(planned.plan, planned.ids)
            computed_s = perf_counter()
            self._core.absorb(WORKER, result, arrays)
            self._check_ends()
            engine_s = computed_s - planned_s
            steps.append(_step(planned, result, engine_s, perf_counter() - started_s - engine_s))
        return steps

    def _add(self, job: Job, logprobs: int | None) -> None:
        self._num_added += 1
        params = SamplingParams(
            0, temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, logprobs=logprobs
        )
        generate = Generate(str(self._num_added), 1, 0, len(job.ids), params)
        try:
            self._core.add(generate, job.ids, 0, perf_counter())
        except RequestError as error:
            raise ConfigError(error.message) from None
        self._core.grant(Grant(generate.request, 1, job.max_tokens, UNLIMITED_BYTES))

    def _check_ends(self) -> None:
        """A step that fails takes less time than one that does not."""
        for ended in self._core.take_ended():
            if ended.reason != "length":
                raise RuntimeError(f"a sequence ended with {ended.reason}")


def _step(planned: Planned, result: StepResult, engine_s: float, scheduling_s: float) -> Step:
    num_prompt_tokens = sum(row.num_tokens for row in planned.plan.prefill)
    num_decoded = sum(row.num_tokens for row in result.rows)
    return Step(num_prompt_tokens, num_decoded, engine_s, scheduling_s)
