"""The engine under the scheduler's own core, without sockets: outputs and their logprobs."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.harness.engines import AnyEngine
from benchmarks.harness.sequences import add_one
from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.worker_state import PROBATION_STEPS
from services.worker.engine.protocol import StepOutput
from services.worker.plan_check import PlanCheck
from shared.wire.messages import Grant, ResultRow, RunKind, SamplingParams, StepPlan
from shared.wire.token_arrays import Layout, TokenArrays

UNLIMITED_BYTES = 1 << 40


@dataclass
class Run:
    """Results by request; rows in order of arrival. ``num_hits`` sequences started from the prefix
    cache, ``num_resumed`` of them after preemption; ``num_readmitted`` were admitted again at all.
    ``num_long_plans`` had several steps, and plans had ``num_drops`` rows that give blocks back."""

    texts: list[list[int]]
    logprobs: list[list[np.ndarray]]  # values of each token
    verified: list[list[tuple[int, int]]]  # of each row: drafts and accepted drafts
    drafts: list[list[tuple[ResultRow, TokenArrays]]]
    ends: list[str]
    num_hits: int = 0
    num_resumed: int = 0
    num_readmitted: int = 0
    num_long_plans: int = 0
    num_drops: int = 0
    pooled: dict[int, np.ndarray] = field(default_factory=dict)  # vectors of pooled prompts
    scored: dict[int, list[np.ndarray]] = field(default_factory=dict)  # logprobs of prompts

    @classmethod
    def of(cls, num: int) -> "Run":
        columns: list[Any] = [[[] for _ in range(num)] for _ in range(4)]
        texts, logprobs, verified, drafts = columns
        return cls(texts, logprobs, verified, drafts, ends=[""] * num)

    @property
    def num_accepted(self) -> int:
        return sum(accepted for rows in self.verified for _, accepted in rows)

    def note_plan(self, plan: StepPlan) -> None:
        self.num_long_plans += plan.num_steps > 1
        self.num_drops += len(plan.rows)
        for row in plan.admit:
            self.num_readmitted += row.num_ids > row.prompt_len
            self.num_hits += row.num_cached > 0
            self.num_resumed += row.num_cached > 0 and row.num_ids > row.prompt_len

    def note(self, row: ResultRow, part: TokenArrays) -> None:
        index = int(row.request)
        if row.run.kind == RunKind.DRAFTS:
            self.drafts[index].append((row, part))
        elif row.run.kind == RunKind.POOLED:
            self.pooled[index] = part.values.copy()
        elif row.run.kind == RunKind.PROMPT:
            self.scored.setdefault(index, []).append(part.values.copy())
        elif row.run.kind == RunKind.OUTPUT:
            self.texts[index] += part.ids.tolist()
            self.logprobs[index] += list(
                part.values.reshape(row.run.num_tokens, row.run.num_values)
            )
            self.verified[index].append((row.run.num_drafts, row.run.num_accepted))
        if row.finish or row.error:
            self.ends[index] = row.finish or "error"


def run(
    engine: AnyEngine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams] | SamplingParams,
    *,
    caches_prefixes: bool = False,
    pipeline_depth: int = 2,
    max_open: int = 1000,
    depths: Iterable[int] = (),
    num_steps: int = 3,
    adapters: Sequence[str] = (),
) -> Run:
    """Runs all ``prompts``, at most ``max_open`` at a time. ``depths`` are the draft depths of
    successive plans, by default chosen by the engine. Decode-only plans have ``num_steps`` steps if
    the engine supports it. ``adapters`` are the digests of the prompts' adapters. Each plan is
    checked as a worker checks it."""
    core = Scheduler(1000, 10, caches_prefixes, pipeline_depth)
    most = min(num_steps, engine.capacity.max_num_steps)
    core.add_worker("w", replace(engine.capacity, max_num_steps=most), PROBATION_STEPS)
    each_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    done, waiting = Run.of(len(prompts)), deque(enumerate(prompts))
    in_flight: deque[Future[StepOutput]] = deque()
    check = PlanCheck(engine.capacity, engine.capacity.vocab_size)
    each_depth = iter(depths)
    while waiting or core.sequences:
        while waiting and len(core.sequences) < max_open:
            index, prompt = waiting.popleft()
            adapter = adapters[index] if adapters else ""
            add_one(core, str(index), prompt, each_params[index], float(index), adapter=adapter)
            core.grant(Grant(str(index), 1, engine.capacity.max_model_len, UNLIMITED_BYTES))
        while (planned := _plan(core, each_depth)) is not None:
            check.check(planned.plan, planned.ids)
            done.note_plan(planned.plan)
            in_flight.append(Future())
            engine.submit(planned.plan, planned.ids, in_flight[-1])
        result, arrays = in_flight.popleft().result()
        layout = Layout(result.rows, arrays)
        for each in core.absorb("w", result, arrays):
            done.note(each.row, layout.part(each.index, each.index + 1))
    for output in in_flight:
        output.result()
    engine.reset()
    return done


def _plan(core: Scheduler, depths: Iterator[int]) -> Planned | None:
    worker = core.workers["w"]
    worker.step_s = 0.0  # so that plans have their full length at any speed
    depth = worker.draft_depth
    depth.now = min(next(depths, depth.now), worker.capacity.num_speculative_tokens)
    return core.plan("w")
