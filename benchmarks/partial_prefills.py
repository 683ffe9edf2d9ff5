"""Effect of limits on partial prefills on short prompts that wait for long ones.

Simulates the scheduler's core on a virtual clock: a step takes a fixed time, plus a time per prompt
token. Short prompts of 200 tokens and long ones of 30,000 arrive at random, with a seed; each
generates 50 tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from statistics import mean, quantiles
from typing import Any

import numpy as np

from benchmarks.report import write
from services.scheduler.prefills import PrefillLimits
from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.sequence import Arrival
from shared.wire.messages import (
    WINDOW_BYTES,
    Capacity,
    Generate,
    Grant,
    NewSequence,
    ResultRow,
    SamplingParams,
    StepResult,
    TokenRun,
)
from shared.wire.token_arrays import TokenArrays

SHORT, LONG, MAX_TOKENS = 200, 30_000, 50
LIMITS = {
    "1 in the middle, at most 1 long": PrefillLimits(1, 1),
    "2, at most 1": PrefillLimits(2, 1),
    "2, at most 1, long from 100 on": PrefillLimits(2, 1, 100),
    "2, at most 1, long from 4096 on": PrefillLimits(2, 1, 4096),
    "2, at most 2": PrefillLimits(2, 2),
    "4, at most 1": PrefillLimits(4, 1),
    "4, at most 2": PrefillLimits(4, 2),
}


@dataclass(frozen=True)
class Machine:
    """Seconds per step and per prompt token; arrivals per second, and the duration."""

    budget: int
    step_s: float
    token_s: float
    shorts_per_s: float
    longs_per_s: float
    duration_s: float


MACHINES = {
    "like a CPU": Machine(512, 0.02, 0.0005, shorts_per_s=2.0, longs_per_s=1 / 60, duration_s=600),
    "like a GPU": Machine(8192, 0.01, 0.00003, shorts_per_s=40.0, longs_per_s=0.25, duration_s=60),
}


class Simulation:
    """``first_s``: times to the first token, by the length of the prompt."""

    def __init__(self, machine: Machine, limits: PrefillLimits) -> None:
        self._machine = machine
        self._core = Scheduler(100_000, 10, prefill_limits=limits)
        self._core.add_worker("w", Capacity(100_000, 16, 256, machine.budget, 32_768))
        self._arrived_s: dict[str, float] = {}
        self.first_s: dict[int, list[float]] = {SHORT: [], LONG: []}

    def run(self) -> None:
        arrivals = _arrivals(Random(0), self._machine)
        now_s, (next_s, length) = 0.0, next(arrivals)
        while next_s < float("inf") or self._core.sequences:
            while next_s <= now_s:
                self._add(length, next_s)
                next_s, length = next(arrivals, (float("inf"), 0))
            planned = self._core.plan("w")
            if planned is None:
                now_s = next_s
            else:
                now_s += self._seconds(planned)
                self._absorb(planned, now_s)

    def _add(self, length: int, now_s: float) -> None:
        name = str(len(self._arrived_s))
        self._arrived_s[name] = now_s
        params = SamplingParams(seed=0, max_tokens=MAX_TOKENS)
        ids = np.full(length, len(self._arrived_s), np.int32)
        generate = Generate(name, 1, params, [NewSequence(name)])
        self._core.add(
            Arrival(generate=generate, prompt=ids, emitted=ids[:0], route=0, now_s=now_s)
        )
        self._core.grant(Grant(name, 1, MAX_TOKENS, WINDOW_BYTES))

    def _seconds(self, planned: Planned) -> float:
        num_tokens = sum(row.num_tokens for row in planned.plan.prefill)
        return self._machine.step_s + self._machine.token_s * num_tokens

    def _absorb(self, planned: Planned, now_s: float) -> None:
        running = self._core.workers["w"].running
        prefilled = [row.slot for row in planned.plan.prefill]
        slots = prefilled + [row.slot for row in planned.plan.decode]
        rows = []
        for slot in slots:
            sequence = running[slot]
            if sequence.allocated.num_pending:
                is_last = len(sequence.emitted) + 1 == MAX_TOKENS
                rows.append(
                    ResultRow(slot, sequence.request, 1, TokenRun(1), "length" if is_last else None)
                )
                if not sequence.emitted:
                    waited_s = now_s - self._arrived_s[sequence.request]
                    self.first_s[len(sequence.prompt)].append(waited_s)
        ids = np.zeros(len(rows), np.int32)
        self._core.absorb("w", StepResult(planned.plan.step, rows), TokenArrays(ids))


def _arrivals(random: Random, machine: Machine) -> Iterator[tuple[float, int]]:
    now_s, rate = 0.0, machine.shorts_per_s + machine.longs_per_s
    while (now_s := now_s + random.expovariate(rate)) < machine.duration_s:
        yield now_s, LONG if random.random() < machine.longs_per_s / rate else SHORT


def measure() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for machine_name, machine in MACHINES.items():
        for name, limits in LIMITS.items():
            simulation = Simulation(machine, limits)
            simulation.run()
            short, long = (simulation.first_s[length] for length in (SHORT, LONG))
            results[f"{machine_name}: {name}"] = {
                "short prompts, median s to the first token": round(quantiles(short, n=2)[0], 3),
                "short prompts, 99 %": round(quantiles(short, n=100)[-1], 3),
                "long prompts, mean": round(mean(long), 2),
                "long prompts, most": round(max(long), 2),
            }
    return results


if __name__ == "__main__":
    write("partial_prefills", measure())
