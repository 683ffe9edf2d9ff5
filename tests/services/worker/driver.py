"""A scheduler for tests: drives an engine by plans and collects its output."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import scheduled
from benchmarks.harness.engines import AnyEngine, make_engine
from benchmarks.harness.step_engine import run_step
from services.worker.models import CausalLM
from services.worker.slots.table import SlotTable
from shared.wire.messages import (
    Admit,
    Decode,
    Prefill,
    ResultRow,
    RunKind,
    SamplingParams,
    StepPlan,
)
from shared.wire.token_arrays import Layout, TokenArrays
from tests.services.worker.prompts import random_prompts

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=12)


def model_of(engine: AnyEngine) -> CausalLM:
    """The object that computes the steps."""
    return engine._segments.model if hasattr(engine, "_segments") else engine._model


def table_of(engine: AnyEngine) -> SlotTable:
    return engine._table if hasattr(engine, "_segments") else engine._slots


def assert_drafts_change_no_text(
    folder: Path, kernels: str, num_drafts: int = 2, ngram: bool = False, **settings: Any
) -> None:
    """At a high temperature even drafts of a random MTP head are often accepted."""
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=12) for seed in range(8)]
    texts = []
    for method in ("none", "mtp", *(["ngram"] if ngram else [])):
        speculation = {"method": method, "num_speculative_tokens": num_drafts, "adaptive": False}
        engine = make_engine(folder, kernels, speculative_config=speculation, **settings)
        found = scheduled.run(engine, random_prompts(8), params)
        assert (found.num_accepted > 0) == (method == "mtp")
        texts.append(found.texts)
    assert all(each == texts[0] for each in texts)


@dataclass
class Job:
    """A prompt and the parameters of its output. ``emitted`` may hold known output.

    ``logprobs`` receives the requested logprobs of each emitted token, and ``prompt_parts`` those
    of the prompt, with ``num_prompt_scored`` tokens known already.
    """

    prompt: list[int]
    params: SamplingParams = GREEDY
    choice: int = 0
    emitted: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    end: ResultRow | None = None
    num_prompt_scored: int = 0
    prompt_parts: list[tuple[ResultRow, TokenArrays]] = field(default_factory=list)


class Driver:
    """All ids of a job get blocks at admission, in each group of layers, in an order drawn by
    ``seed``. Decode-only plans ask for ``num_steps``."""

    def __init__(
        self,
        engine: AnyEngine,
        chunk_sizes: Sequence[int] = (1000,),
        seed: int = 0,
        num_steps: int = 1,
    ) -> None:
        self.engine = engine
        self._plan_steps = num_steps
        self._chunk_sizes = cycle(chunk_sizes)
        self._rng = np.random.default_rng(seed)
        self._num_steps = 0

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """The outputs of ``jobs``, all at once, each prompt in chunks of the next sizes."""
        capacity = self.engine.capacity
        slots = self._rng.permutation(capacity.max_num_seqs)[: len(jobs)].tolist()
        tables = self._tables(len(jobs))
        admits = [
            self._admit(slot, job, of_groups)
            for slot, job, of_groups in zip(slots, jobs, tables, strict=True)
        ]
        known = [np.array(job.prompt + job.emitted, np.int32) for job in jobs]
        lacking = {slot: len(ids) for slot, ids in zip(slots, known, strict=True)}
        by_slot = dict(zip(slots, jobs, strict=True))
        self._step(by_slot, lacking, admits, np.concatenate(known))
        while any(job.end is None for job in jobs):
            self._step(by_slot, lacking, [], np.zeros(0, np.int32))
        return [job.emitted for job in jobs]

    def _tables(self, num: int) -> list[list[list[int]]]:
        """Blocks of each job and group, for the job's full length."""
        capacity = self.engine.capacity
        shape = num, len(capacity.groups), -(-capacity.max_model_len // capacity.block_size)
        blocks = self._rng.permutation(capacity.num_blocks)
        return blocks[: np.prod(shape)].reshape(shape).tolist()

    def _admit(self, slot: int, job: Job, tables: list[list[int]]) -> Admit:
        num_ids = len(job.prompt) + len(job.emitted)
        route = slot % 3
        return Admit(
            slot, f"r{slot}", 1, route, job.choice, len(job.prompt), num_ids, 0, job.params,
            tables[0], job.num_prompt_scored, more_blocks=tables[1:],
        )  # fmt: skip

    def _step(
        self, jobs: dict[int, Job], lacking: dict[int, int], admits: list[Admit], ids: np.ndarray
    ) -> None:
        decode, prefill = [], []
        for slot in [slot for slot in jobs if jobs[slot].end is None]:
            num_tokens = 1 if lacking[slot] == 1 else self._chunk(jobs[slot], lacking[slot])
            if lacking[slot] == 1:
                decode.append(Decode(slot))
            else:
                prefill.append(Prefill(slot, num_tokens))
            lacking[slot] -= num_tokens
        self._num_steps += 1
        num_steps = 1 if prefill else self._plan_steps
        plan = StepPlan(self._num_steps, [], admits, [], prefill, decode, 0, num_steps)
        result, arrays = run_step(self.engine, plan, ids)
        self._absorb(result.rows, arrays, jobs, lacking)

    def _chunk(self, job: Job, num_lacking: int) -> int:
        return min(num_lacking, next(self._chunk_sizes))

    def _absorb(
        self,
        rows: list[ResultRow],
        arrays: TokenArrays,
        jobs: dict[int, Job],
        lacking: dict[int, int],
    ) -> None:
        order = [(row.slot % 3, row.slot) for row in rows]
        assert order == sorted(order), "rows are ordered by route"
        layout = Layout(rows, arrays)
        for index, row in enumerate(rows):
            job, part = jobs[row.slot], layout.part(index, index + 1)
            if row.run.kind == RunKind.PROMPT:
                job.prompt_parts.append((row, part))
            else:
                job.emitted += part.ids.tolist()
                job.logprobs += [part.values] * row.run.num_tokens
                lacking[row.slot] = 1  # if it emitted nothing, its last id is computed again
            if row.finish or row.error:
                job.end = row
