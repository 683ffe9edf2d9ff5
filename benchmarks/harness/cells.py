"""Cells in virtual time: scheduler cores that take the time that they compute, workers that take a
step's, no sockets."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np

from benchmarks.harness.sequences import generate_one
from cli.plan.simulated_worker import SimulatedWorker
from services.scheduler.emission import Emission
from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.tokens_message import StepEmissions, tokens_of
from shared.wire.codec import decode, encode
from shared.wire.messages import Accepted, Capacity, Generate, Grant, SamplingParams, StepResult
from shared.wire.token_arrays import Layout, TokenArrays

UNLIMITED = 1 << 60
MAX_WAITING = 1_000_000
PRIORITY_STEP_S = 10.0
PIPELINE_DEPTH = 2

Clock = Callable[[], float]
Happen = Callable[[float], None]


@dataclass(frozen=True)
class Job:
    """One sequence to be."""

    prompt_len: int
    max_tokens: int
    priority: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of a job. ``first_s``: when its first token left the scheduler."""

    job: Job
    arrived_s: float
    workers: list[str] = field(default_factory=list)  # that it was admitted to
    first_s: float | None = None
    num_tokens: int = 0
    num_ends: int = 0


@dataclass(frozen=True)
class StepSeconds:
    """A step takes ``step_s``, and more for each token of a prompt."""

    step_s: float
    prompt_token_s: float = 0.0

    def seconds(self, num_rows: int, num_cached: int, num_prompt_tokens: int) -> float:
        return self.step_s + num_prompt_tokens * self.prompt_token_s


class Timeline:
    """What happens when, in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Happen]] = []
        self._num_events = 0

    def at(self, at_s: float, happen: Happen) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, happen))

    def next(self) -> bool:
        """Returns False where nothing is left to happen."""
        if not self._events:
            return False
        self.now_s, _, happen = heapq.heappop(self._events)
        happen(self.now_s)
        return True


class Cell:
    """A scheduler's core, a server of one message after another, each for as long as ``clock`` says
    that its work took: codec, core and what goes to ``num_routes`` tokenizers.

    ``plan_s`` has the seconds of each plan that was made, ``busy_s`` those of all work for
    ``num_steps`` results. It is free at ``free_s``. ``on_end`` is called for each sequence that
    ends.
    """

    def __init__(
        self,
        timeline: Timeline,
        clock: Clock,
        num_routes: int,
        on_end: Callable[["Cell"], None],
    ) -> None:
        self.core = Scheduler(MAX_WAITING, PRIORITY_STEP_S, pipeline_depth=PIPELINE_DEPTH)
        self.workers: dict[str, SimulatedWorker] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.admitted: list[str] = []
        self.plan_s: list[float] = []
        self.busy_s = self.free_s = 0.0
        self.num_steps = 0
        self._timeline = timeline
        self._clock = clock
        self._num_routes = num_routes
        self._on_end = on_end
        self._is_planning_due = False
        self._start_s = self._began = 0.0

    def add_worker(self, name: str, capacity: Capacity, times: StepSeconds) -> None:
        self.workers[name] = SimulatedWorker(name, times)
        self.core.add_worker(name, capacity)

    def arrive(self, job: Job, now_s: float) -> None:
        """Each prompt has ids of its own."""
        name = f"{len(self.outcomes):032x}~{len(self.outcomes):08x}/0/0"
        ids = np.full(job.prompt_len, len(self.outcomes), np.int32)
        params = SamplingParams(seed=0, max_tokens=job.max_tokens, ignore_eos=True)
        generate = generate_one(name, params, priority=job.priority)
        frames = [bytes(frame) for frame in encode(generate, [ids, ids[:0]])]
        route = len(self.outcomes) % self._num_routes
        self.outcomes[name] = Outcome(job, now_s)
        self._begin(now_s)
        message, (prompt, emitted) = decode(frames)
        assert isinstance(message, Generate)
        self.core.add(message, prompt, emitted, route, now_s)
        encode(Accepted(name, 1), [prompt[:0]])
        self.core.grant(Grant(name, 1, UNLIMITED, UNLIMITED))
        self._end()
        self._plan_soon()

    def forget_costs(self) -> None:
        self.plan_s, self.busy_s, self.num_steps = [], 0.0, 0

    def _finish(self, worker: SimulatedWorker, now_s: float) -> None:
        """A step of ``worker`` has ended."""
        frames = [bytes(frame) for frame in encode(*worker.in_flight.popleft())]
        self._begin(now_s)
        result, arrays = decode(frames)
        assert isinstance(result, StepResult)
        buffers = TokenArrays(*arrays)
        layout = Layout(result.rows, buffers)
        emissions = self.core.absorb(worker.name, result, buffers)
        plans = self._plan_for(worker.name)
        forward(emissions, layout)
        self._end()
        self.num_steps += 1
        self._note(emissions)
        self._send(worker, plans)
        for ended in self.core.take_ended():
            self.outcomes[ended.sequence.request].num_ends += 1
            self._on_end(self)
        if self.core.may_change_other_plans:
            self._plan_soon()

    def _note(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            outcome = self.outcomes[emission.sequence.request]
            outcome.num_tokens += emission.row.run.num_tokens
            if outcome.first_s is None:
                outcome.first_s = self.free_s

    def _plan_soon(self) -> None:
        """Plans once for all that has arrived when what is under way is done."""
        if not self._is_planning_due:
            self._is_planning_due = True
            self._timeline.at(max(self.free_s, self._timeline.now_s), self._plan)

    def _plan(self, now_s: float) -> None:
        self._is_planning_due = False
        self._begin(now_s)
        plans = {name: self._plan_for(name) for name in self.core.workers_in_need}
        self._end()
        for name, of_worker in plans.items():
            self._send(self.workers[name], of_worker)

    def _plan_for(self, name: str) -> list[tuple[Planned, float]]:
        """The plans that the worker gets, and when each is sent."""
        plans, began = [], self._clock()
        while (planned := self.core.plan(name)) is not None:
            self.plan_s.append(self._clock() - began)
            encode(planned.plan, [planned.ids])
            began = self._clock()
            plans.append((planned, self._start_s + began - self._began))
        return plans

    def _send(self, worker: SimulatedWorker, plans: list[tuple[Planned, float]]) -> None:
        for planned, sent_s in plans:
            for row in planned.plan.admit:
                self.outcomes[row.request].workers.append(worker.name)
                self.admitted.append(row.request)
            self._timeline.at(worker.submit(planned, sent_s), partial(self._finish, worker))

    def _begin(self, now_s: float) -> None:
        self._start_s, self._began = max(now_s, self.free_s), self._clock()

    def _end(self) -> None:
        seconds = self._clock() - self._began
        self.free_s = self._start_s + seconds
        self.busy_s += seconds


def forward(emissions: list[Emission], layout: Layout) -> None:
    """The messages for all tokenizers, up to the socket."""
    for _, group in groupby(emissions, key=lambda each: each.sequence.route):
        tokens, parts = tokens_of([StepEmissions(list(group), layout)])
        encode(tokens, parts)
