"""The engine and the scheduler's pure core in one loop, without sockets. On asynchronous devices
two plans are in flight, else one. Times are per plan, which is one step unless several are
requested."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import perf_counter

import msgspec
import numpy as np

from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.sequence import Arrival
from services.worker.engine.build import build_engine
from services.worker.engine.protocol import Engine, StepOutput
from services.worker.metrics import MEMORY
from services.worker.weights.progress import Progress
from shared.errors import ConfigError, RequestError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Generate, Grant, NewSequence, SamplingParams, StepResult

WORKER = "engine"
UNLIMITED_BYTES = 1 << 60
WARM_UP_TOKENS = 4

Build = Callable[[WorkerConfig, Progress], Engine]


@dataclass(frozen=True)
class Job:
    ids: np.ndarray  # [prompt_len] int32
    max_tokens: int  # 0: the prompt is only scored
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0


@dataclass(frozen=True)
class Step:
    """A step computed ``num_prompt_tokens`` and sampled ``num_decoded`` tokens. ``engine_s`` is its
    own time, ``scheduling_s`` the time around it. On the device it took ``device_s``, after
    ``idle_s`` without work. For a plan of several steps, all fields are sums over ``num_steps``."""

    num_prompt_tokens: int
    num_decoded: int
    engine_s: float
    scheduling_s: float
    num_rows: int = 0
    num_steps: int = 1
    device_s: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True)
class _InFlight:
    planned: Planned
    planned_s: float
    output: Future[StepOutput]


class EngineLoop:
    """Prompts come first. Raises ConfigError if settings, machine or jobs do not fit the engine.
    ``takes_several_steps`` gives plans the lengths of a server's."""

    def __init__(
        self,
        config: WorkerConfig,
        build: Build = build_engine,
        *,
        takes_several_steps: bool = False,
    ) -> None:
        if config.num_ranks > 1:
            raise ConfigError(
                f"{config.ranks_setting}: {config.num_ranks}: a worker starts its ranks;"
                " this measures an engine without one: use shoal serve and bench serve"
            )
        self._engine = build(config, lambda text, fraction: None)
        self.capacity = self._engine.capacity
        self.model = self._engine.model_info
        depth = 2 if getattr(self._engine, "runs_ahead", False) else 1
        self._core = Scheduler(0, 0.0, caches_prefixes=False, pipeline_depth=depth, stream_rate=0.0)
        longest = self.capacity.max_num_steps if takes_several_steps else 1
        self._core.add_worker(WORKER, msgspec.structs.replace(self.capacity, max_num_steps=longest))
        self._num_added = 0

    @property
    def num_preemptions(self) -> int:
        return self._core.planner.preemption.num

    @property
    def is_idle(self) -> bool:
        """True if the last run ended normally."""
        return not self._core.sequences

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights, as in the worker's memory metric."""
        (samples,) = (metric.samples for metric in MEMORY.collect())
        return int(next(each.value for each in samples if each.labels["kind"] == "weights"))

    @property
    def copies_s(self) -> float:
        """Seconds each step copies offloaded weights."""
        return getattr(self._engine, "copies_s", 0.0)

    def speculate(self, depth: int, acceptance: float) -> None:
        """Sets a fixed draft depth for later runs, on the engine for GPUs. Raises ValueError if
        ``draft-acceptance`` is not set."""
        if not hasattr(self._engine, "accept_drafts"):
            raise ValueError("only the engine for GPUs accepts drafts unverified")
        self._engine.accept_drafts(acceptance)
        self._core.workers[WORKER].draft_depth.now = depth

    def warm_up(self, jobs: Sequence[Job], logprobs: int | None) -> None:
        """Runs a few steps with as many rows at once as ``jobs``."""
        few = [replace(each, max_tokens=WARM_UP_TOKENS) for each in jobs]
        self.run(few, len(jobs), logprobs)

    def run(self, jobs: Sequence[Job], concurrency: int, logprobs: int | None) -> list[Step]:
        """Runs all ``jobs``, ``concurrency`` at a time; greedy, to their full length."""
        return [step for step, _ in self.outputs(jobs, concurrency, logprobs)]

    def outputs(
        self, jobs: Sequence[Job], concurrency: int, logprobs: int | None
    ) -> Iterator[tuple[Step, StepOutput]]:
        """The same, yielding each step with its output."""
        left = deque(jobs)
        in_flight: deque[_InFlight] = deque()
        computed_s = 0.0
        while left or self._core.sequences:
            started_s = perf_counter()
            while left and len(self._core.sequences) < concurrency:
                self._add(left.popleft(), logprobs)
            while (planned := self._core.plan(WORKER)) is not None:
                in_flight.append(_InFlight(planned, perf_counter(), self._submit(planned)))
            oldest = in_flight.popleft()
            begun_s = max(oldest.planned_s, computed_s)
            result, arrays = oldest.output.result()
            computed_s = perf_counter()
            self._core.absorb(WORKER, result, arrays)
            self._check_ends()
            engine_s = computed_s - begun_s
            scheduling_s = max(0.0, perf_counter() - started_s - engine_s)
            yield _step(oldest.planned, result, engine_s, scheduling_s), (result, arrays)
        for each in in_flight:  # planned before all sequences had ended
            self._core.absorb(WORKER, *each.output.result())

    def _submit(self, planned: Planned) -> Future[StepOutput]:
        output: Future[StepOutput] = Future()
        self._engine.submit(planned.plan, planned.ids, output)
        return output

    def _add(self, job: Job, logprobs: int | None) -> None:
        self._num_added += 1
        params = SamplingParams(
            seed=self._num_added,
            temperature=0.0,
            max_tokens=job.max_tokens,
            ignore_eos=True,
            logprobs=logprobs,
            prompt_logprobs=job.prompt_logprobs,
            presence_penalty=job.presence_penalty,
        )
        name = str(self._num_added)
        generate = Generate(name, 1, params, [NewSequence(name)])
        try:
            self._core.add(
                Arrival(
                    generate=generate,
                    prompt=job.ids,
                    emitted=job.ids[:0],
                    route=0,
                    now_s=perf_counter(),
                )
            )
        except RequestError as error:
            raise ConfigError(error.message) from None
        self._core.grant(Grant(name, 1, job.max_tokens, UNLIMITED_BYTES))

    def _check_ends(self) -> None:
        """Raises an error if a sequence failed, since failed steps take less time."""
        for ended in self._core.take_ended():
            if ended.reason != "length":
                raise RuntimeError(f"a sequence ended with {ended.reason}")


def _step(planned: Planned, result: StepResult, engine_s: float, scheduling_s: float) -> Step:
    num_prompt_tokens = sum(row.num_tokens for row in planned.plan.prefill)
    num_decoded = sum(row.run.num_tokens for row in result.rows)
    return Step(
        num_prompt_tokens,
        num_decoded,
        engine_s,
        scheduling_s,
        num_rows=len(planned.plan.decode) + len(planned.plan.prefill),
        num_steps=result.num_steps,
        device_s=result.step_s,
        idle_s=result.idle_s,
    )
