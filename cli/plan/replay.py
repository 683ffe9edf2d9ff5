"""Plays requests through the scheduler's core, with simulated workers."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cli.plan.requests import Request
from cli.plan.simulated_worker import SimulatedWorker
from cli.plan.speed import MeshTimes, StepTimes
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival
from shared.errors import RequestError
from shared.wire.messages import (
    Capacity,
    Generate,
    Grant,
    NewSequence,
    SamplingParams,
)

UNLIMITED = 1 << 60
MAX_WAITING = 1_000_000
PIPELINE_DEPTH = 2
MIN_S = 1e-9  # the least duration of an event


@dataclass(slots=True)
class Outcome:
    """Seconds from the arrival to the first and to the last token, 0 until then; ``error`` if no
    worker can take the request."""

    request: Request
    arrived_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """None with a single token."""
        more = self.num_tokens - 1
        return (self.last_s - self.first_s) / more if more > 0 else None


@dataclass(frozen=True)
class Played:
    outcomes: list[Outcome]
    num_preemptions: int

    @property
    def duration_s(self) -> float:
        first_s = min(each.arrived_s for each in self.outcomes)
        return max(max(each.last_s for each in self.outcomes) - first_s, MIN_S)

    @property
    def output_tokens_per_s(self) -> float:
        return sum(each.num_tokens for each in self.outcomes) / self.duration_s

    @property
    def num_open(self) -> float:
        """Mean over time."""
        open_s = sum(each.last_s - each.arrived_s for each in self.outcomes)
        return open_s / self.duration_s


class Replay:
    """Plays ``requests`` at their times, or without times ``concurrency`` at once."""

    def __init__(
        self, capacity: Capacity, times: StepTimes, mesh: MeshTimes, num_workers: int
    ) -> None:
        self._core = Scheduler(
            MAX_WAITING, 0.0, caches_prefixes=False, pipeline_depth=PIPELINE_DEPTH
        )
        self._workers = {f"{i}": SimulatedWorker(f"{i}", times, mesh) for i in range(num_workers)}
        for name in self._workers:
            self._core.add_worker(name, capacity)
        self._outcomes: dict[str, Outcome] = {}
        self._events: list[tuple[float, int, str]] = []  # time, number, worker or ""
        self._num_events = 0

    def run(self, requests: Sequence[Request], concurrency: int = 0) -> Played:
        waiting = list(reversed(requests))
        if concurrency:
            self._refill(waiting, concurrency, 0.0)
        else:
            origin_s = requests[0].arrived_s or 0.0
            for each in requests:
                self._note((each.arrived_s or 0.0) - origin_s, "")
        self._plan(0.0)
        while self._events:
            now_s, _, name = heapq.heappop(self._events)
            if not name:
                self._arrive(waiting.pop(), now_s)
            else:
                self._finish(self._workers[name], now_s)
                self._refill(waiting, concurrency, now_s)
            self._plan(now_s)
        return Played(list(self._outcomes.values()), self._core.planner.preemption.num)

    def _refill(self, waiting: list[Request], concurrency: int, now_s: float) -> None:
        while waiting and len(self._core.sequences) < concurrency:
            self._arrive(waiting.pop(), now_s)

    def _note(self, at_s: float, name: str) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, name))

    def _arrive(self, request: Request, now_s: float) -> None:
        name = str(len(self._outcomes))
        outcome = self._outcomes[name] = Outcome(request, now_s, now_s, now_s)
        params = SamplingParams(
            seed=0, temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True
        )
        generate = Generate(name, 1, params, [NewSequence(name)])
        ids = np.zeros(request.num_prompt_tokens, np.int32)
        try:
            self._core.add(
                Arrival(generate=generate, prompt=ids, emitted=ids[:0], route=0, now_s=now_s)
            )
        except RequestError as error:
            outcome.error = error.message
            return
        self._core.grant(Grant(name, 1, UNLIMITED, UNLIMITED))

    def _plan(self, now_s: float) -> None:
        for name in self._core.workers_in_need:
            while (planned := self._core.plan(name)) is not None:
                self._note(self._workers[name].submit(planned, now_s), name)

    def _finish(self, worker: SimulatedWorker, now_s: float) -> None:
        result, arrays = worker.in_flight.popleft()
        self._core.absorb(worker.name, result, arrays)
        for row in result.rows:
            outcome = self._outcomes[row.request]
            outcome.num_tokens += 1
            outcome.last_s = now_s
            if outcome.num_tokens == 1:
                outcome.first_s = now_s
        self._core.take_ended()
