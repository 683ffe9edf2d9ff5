"""The scheduler's core with engines that come and go, without sockets, and the outputs."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from benchmarks.harness.scheduled import UNLIMITED_BYTES
from benchmarks.harness.sequences import generate_one
from services.scheduler.media.cell import EncodingRoom, note_encoded
from services.scheduler.results import Emission
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival, Sequence, Span
from services.tokenizer.detokenize import DecodeIds, Detokenizer
from services.worker.engine.protocol import StepOutput
from services.worker.media.addition import Media
from shared.wire.messages import Capacity, Grant, RunKind, SamplingParams, StepPlan, TokenRun
from shared.wire.token_arrays import Layout, TokenArrays
from tests.exactness.processes import SharedEngine

PIPELINE_DEPTH = 2
NUM_STEPS = 2  # of a plan that only decodes, if the engine takes several
STEP_S = 1e-3  # taken for the time of each step, so that plans depend on no clock
MAX_TURNS = 20_000
ENCODE_S = 60


class Engine(Protocol):
    """The part of an engine that a scheduler and these tests use."""

    capacity: Capacity

    @property
    def additions(self) -> Iterable[object]: ...

    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: list[np.ndarray],
    ) -> None: ...

    def reset(self) -> None: ...


class Engines(Protocol):
    """Engines of one model and the same settings."""

    @property
    def decode(self) -> DecodeIds: ...

    @property
    def adapters(self) -> tuple[str, ...]:
        """The digests of two adapters, or nothing."""
        ...

    def take(self) -> Engine: ...

    def give_back(self, engine: Engine) -> None:
        """Keeps it for another play."""

    def drop(self, engine: Engine) -> None:
        """Ends it, as a kill does; the next one is new."""


class Prompt(NamedTuple):
    """``spans`` of the ``ids`` stand for images."""

    ids: list[int]
    spans: tuple[Span, ...] = ()


class Request(NamedTuple):
    name: str
    prompt: Prompt
    params: SamplingParams
    priority: int
    adapter: str = ""  # a digest


@dataclass
class Scores:
    """Logprobs [n, 1 + k] of n tokens and of the k likeliest ones, these tokens [n, k], ranks [n].

    Each list has an array for each row of a result.
    """

    values: list[np.ndarray] = field(default_factory=list)
    top_ids: list[np.ndarray] = field(default_factory=list)
    ranks: list[np.ndarray] = field(default_factory=list)

    def add(self, run: TokenRun, part: TokenArrays) -> None:
        if run.num_tokens and run.num_values:
            self.values.append(part.values.reshape(run.num_tokens, run.num_values).copy())
            self.top_ids.append(part.top_ids.reshape(run.num_tokens, run.num_top_ids).copy())
            self.ranks.append(part.ranks.copy())

    @property
    def arrays(self) -> list[np.ndarray]:
        each = (self.values, self.top_ids, self.ranks)
        return [np.concatenate(rows) if rows else np.zeros(0) for rows in each]


@dataclass
class Output:
    """All that a client gets of one choice, and the number of drafts on the way."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    scores: Scores = field(default_factory=Scores)
    prompt_scores: Scores = field(default_factory=Scores)
    num_drafts: int = 0
    num_accepted: int = 0


class Reader:
    """Collects the output of a sequence in the scheduler."""

    def __init__(self, sequence: Sequence, decode: DecodeIds) -> None:
        self.sequence = sequence
        self.output = Output()
        self._text = Detokenizer(decode)

    @property
    def is_open(self) -> bool:
        return not self.output.finish

    @property
    def is_running(self) -> bool:
        """Whether it has a slot. An ended sequence had one."""
        return self.sequence.allocation is not None or not self.is_open

    def note(self, emission: Emission, part: TokenArrays) -> None:
        row, output = emission.row, self.output
        if row.run.kind == RunKind.PROMPT:
            output.prompt_scores.add(row.run, part)
        elif row.run.kind == RunKind.OUTPUT:
            ids = part.ids.tolist()
            output.ids += ids
            output.text += self._text.push(ids)
            output.scores.add(row.run, part)
            output.num_drafts += row.run.num_drafts
            output.num_accepted += row.run.num_accepted
        if row.finish or row.error:
            output.text += self._text.flush()
            output.finish = row.finish or f"error: {row.error}"


Encoded = tuple[str, int, int]  # request, attempt, and the number of ids


class Encodings:
    """The reports of an engine's encoder. They come with the result of a plan, so that plans
    depend on no clock."""

    def __init__(self, engine: Engine) -> None:
        self._found: Any = SimpleQueue()
        if isinstance(engine, SharedEngine):
            self._found = engine.encoded
        for each in engine.additions:
            if isinstance(each, Media):
                each.encoder.on_encoded = lambda *about: self._found.put(about)

    def of(self, plan: StepPlan) -> list[Encoded]:
        """Waits until the images of admitted sequences are encoded."""
        rows = [row for row in plan.admit if row.items and row.items[-1].end > row.num_cached]
        missing = {(row.request, row.attempt, row.prompt_len) for row in rows}
        found: list[Encoded] = []
        while missing:
            found.append(self._found.get(timeout=ENCODE_S))
            missing.discard(found[-1])
        return found


class InFlight(NamedTuple):
    output: Future[StepOutput]
    encoded: list[Encoded]


class Mesh:
    """A scheduler, with one worker at the start. Its open sequences are forgotten at the end."""

    def __init__(self, engines: Engines, num_seqs: int, caches_prefixes: bool) -> None:
        self._core = Scheduler(1000, 10.0, caches_prefixes, PIPELINE_DEPTH)
        self._engines = engines
        self._num_seqs = num_seqs
        self._workers: dict[str, Engine] = {}
        self._encodings: dict[str, Encodings] = {}
        self._in_flight: dict[str, deque[InFlight]] = {}
        self._readers: dict[str, Reader] = {}
        self._num_started = 0

    def __enter__(self) -> "Mesh":
        self.start_worker()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, engine in self._workers.items():
            for each in self._in_flight[name]:
                each.output.result()
            self._engines.give_back(engine)

    @property
    def num_free_slots(self) -> int:
        return sum(worker.num_free_slots for worker in self._core.workers.values())

    def start_worker(self) -> None:
        engine, name = self._engines.take(), f"worker/{self._num_started}"
        self._num_started += 1
        capacity = replace(
            engine.capacity,
            max_num_seqs=self._num_seqs,
            max_num_steps=min(NUM_STEPS, engine.capacity.max_num_steps),
        )
        self._workers[name], self._in_flight[name] = engine, deque()
        self._encodings[name] = Encodings(engine)
        self._core.add_worker(name, capacity, resources=[EncodingRoom(capacity)])

    def lose_worker(self) -> None:
        """The only worker dies with plans in flight."""
        self._submit()
        ((name, engine),) = self._workers.items()
        assert self._in_flight[name]
        self._engines.drop(engine)
        del self._workers[name], self._in_flight[name]
        refused = self._core.remove_worker(name, now_s=0.0)
        assert not refused

    def release_worker(self, name: str) -> None:
        """The worker leaves at once: all of its sequences go when its plans have run."""
        for _ in range(2):
            self._core.release_worker(name)

    def send(self, request: Request) -> Reader:
        name, prompt, params, priority, adapter = request
        now_s = float(len(self._readers)) / 100
        generate = generate_one(name, params, priority=priority, adapter=adapter)
        generate = replace(generate, items=[each.item for each in prompt.spans])
        pixels = {each.item.digest: each.pixels for each in prompt.spans}
        ids = np.array(prompt.ids, np.int32)
        self._core.add(Arrival(generate, ids, ids[:0], 0, now_s, [*pixels.values()]))
        self._core.grant(Grant(name, 1, len(ids) + 1000, UNLIMITED_BYTES))
        reader = self._readers[name] = Reader(self._core.sequences[name, 1], self._engines.decode)
        return reader

    def run_until(self, is_met: Callable[[], bool]) -> None:
        """Computes steps until the condition is met."""
        for _ in range(MAX_TURNS):
            if is_met():
                return
            self._submit()
            self._absorb()
        raise AssertionError(f"nothing came of {MAX_TURNS} turns")

    def _submit(self) -> None:
        for name, engine in self._workers.items():
            self._core.workers[name].step_s = STEP_S
            while (planned := self._core.plan(name)) is not None:
                output: Future[StepOutput] = Future()
                engine.submit(planned.plan, planned.ids, output, planned.pixels)
                encoded = self._encodings[name].of(planned.plan)
                self._in_flight[name].append(InFlight(output, encoded))

    def _absorb(self) -> None:
        """The oldest result of each worker."""
        for name, in_flight in self._in_flight.items():
            if in_flight:
                output, encoded = in_flight.popleft()
                self._note_encoded(name, encoded)
                result, arrays = output.result()
                result = replace(result, step_s=STEP_S * result.num_steps)
                layout = Layout(result.rows, arrays)
                self._note(self._core.absorb(name, result, arrays), layout)

    def _note_encoded(self, name: str, encoded: list[Encoded]) -> None:
        for request, attempt, num_ids in encoded:
            sequence = self._core.sequences.get((request, attempt))
            allocation = sequence and sequence.allocation
            if sequence and allocation and allocation.worker_id == name:
                note_encoded(sequence, num_ids)

    def _note(self, emissions: list[Emission], layout: Layout) -> None:
        for each in emissions:
            part = layout.part(each.index, each.index + 1)
            self._readers[each.row.request].note(each, part)
