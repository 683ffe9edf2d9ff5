"""The scheduler's cost per running sequence and step.

Measures the service's work without sockets: planning and encoding, decoding and absorbing results,
and the messages for four tokenizers, while all sequences decode and 10,000 wait.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from benchmarks.report import spread, write
from services.scheduler.results import Emission
from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.sequence import Arrival
from services.scheduler.tokens_message import StepEmissions, tokens_of
from shared.wire.codec import decode, encode
from shared.wire.messages import (
    WINDOW_BYTES,
    Capacity,
    Generate,
    Grant,
    NewSequence,
    ResultRow,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenRun,
)
from shared.wire.token_arrays import Layout, TokenArrays

NUMS_RUNNING = (32, 256, 2000)
NUM_WAITING = 10_000
NUM_ROUTES = 4
PROMPT_LEN = 64
MAX_TOKENS = 3000
WORKER = "worker"

Result = TypeVar("Result")


class Stopwatch:
    """Sums the seconds of named pieces of work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def time(self, name: str, work: Callable[[], Result]) -> Result:
        started_s = time.perf_counter()
        result = work()
        self.seconds[name] += time.perf_counter() - started_s
        return result


class Bench:
    """A core with ``num_running`` sequences decoding on one worker, and others waiting."""

    def __init__(self, num_running: int) -> None:
        self._num_running = num_running
        self._core = Scheduler(max_waiting=2 * NUM_WAITING, priority_step_s=10)
        num_blocks = num_running * (PROMPT_LEN + MAX_TOKENS) // 16 + num_running
        capacity = Capacity(num_blocks, 16, num_running, num_running * PROMPT_LEN, 4096)
        self._core.add_worker(WORKER, capacity)
        for number in range(num_running + NUM_WAITING):
            self._add(number)
        self.step(Stopwatch())

    def _add(self, number: int) -> None:
        name = f"{number:032x}~{number:08x}/0/0"
        params = SamplingParams(seed=number, max_tokens=MAX_TOKENS)
        generate = Generate(name, 1, params, [NewSequence(name)])
        ids = np.arange(PROMPT_LEN, dtype=np.int32)
        self._core.add(
            Arrival(
                generate=generate,
                prompt=ids,
                emitted=ids[:0],
                route=number % NUM_ROUTES,
                now_s=float(number),
            )
        )
        self._core.grant(Grant(name, 1, MAX_TOKENS, WINDOW_BYTES))

    def step(self, watch: Stopwatch) -> None:
        planned = watch.time("plan", lambda: self._core.plan(WORKER))
        assert planned is not None
        watch.time("encode plan", lambda: encode(planned.plan, [planned.ids]))
        frames = [bytes(frame) for frame in self._result(planned)]
        result, arrays = watch.time("decode result", lambda: decode(frames))
        assert isinstance(result, StepResult)
        buffers = TokenArrays(*arrays)
        layout = watch.time("layout", lambda: Layout(result.rows, buffers))
        emissions = watch.time("absorb", lambda: self._core.absorb(WORKER, result, buffers))
        watch.time("forward", lambda: _forward(emissions, layout))

    def _result(self, planned: Planned) -> list[Any]:
        running = self._core.workers[WORKER].running
        slots = sorted(_slots(planned.plan), key=lambda slot: (running[slot].route, slot))
        rows = [ResultRow(slot, running[slot].request, 1, TokenRun(1)) for slot in slots]
        return encode(
            StepResult(planned.plan.step, rows), TokenArrays(np.ones(len(rows), np.int32))
        )


def _forward(emissions: list[Emission], layout: Layout) -> None:
    """The messages for all tokenizers, up to the socket."""
    for _, group in groupby(emissions, key=lambda each: each.sequence.route):
        tokens, parts = tokens_of([StepEmissions(list(group), layout)])
        encode(tokens, parts)


def _slots(plan: StepPlan) -> Iterator[int]:
    yield from (row.slot for row in plan.prefill)
    yield from (row.slot for row in plan.decode)


def measure(num_rounds: int) -> dict[str, Any]:
    benches = {num: Bench(num) for num in NUMS_RUNNING}
    runs: dict[int, list[dict[str, float]]] = defaultdict(list)
    for _ in range(num_rounds):
        for num, bench in benches.items():
            watch, num_steps = Stopwatch(), max(10, 4000 // num)
            for _ in range(num_steps):
                bench.step(watch)
            scale = 1e6 / num_steps / num
            pieces = {name: seconds * scale for name, seconds in watch.seconds.items()}
            runs[num].append({**pieces, "all": sum(pieces.values())})
    return {
        f"{num} running, us per sequence and step": {
            name: spread([run[name] for run in rounds]) for name in rounds[0]
        }
        for num, rounds in runs.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    write("scheduler", measure(parser.parse_args().rounds))
