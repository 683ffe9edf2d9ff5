"""A scheduler for tests with few blocks: it gives them back as soon as a window has passed them."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.harness.scheduled import Run
from benchmarks.harness.step_engine import run_step
from services.worker.engine.protocol import Engine, StepOutput
from shared.wire.codec import Array
from shared.wire.kv_groups import most_blocks, num_passed
from shared.wire.messages import (
    Admit,
    Decode,
    Drop,
    Extend,
    Group,
    Prefill,
    RunKind,
    SamplingParams,
    StepPlan,
)
from shared.wire.token_arrays import Layout


class Poisoned:
    """A host's engine. Blocks that a plan takes from a sequence become NaN before it runs, as a new
    owner might leave them."""

    def __init__(self, engine: Any) -> None:
        self.capacity, self.model_info = engine.capacity, engine.model_info
        self.additions = engine.additions
        self._engine = engine

    @property
    def num_running(self) -> int:
        num: int = self._engine.num_running
        return num

    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        tables = self._engine._slots.block_tables
        taken = [tables[:, plan.release].ravel()]
        taken += [tables[each.group, each.slot, : each.num_blocks] for each in plan.drops]
        kept = [self.capacity.num_blocks]
        for row in plan.admit:
            for blocks in (row.blocks, *row.more_blocks):
                kept += blocks[: -(-row.num_cached // self.capacity.block_size)]
        poison(self._engine, np.setdiff1d(np.concatenate(taken), kept))
        self._engine.submit(plan, ids, output, pixels)

    def reset(self) -> None:
        self._engine.reset()


def poison(engine: Any, blocks: np.ndarray) -> None:
    """Codes have no NaN, and their scales have."""
    for layer in engine._kv_cache.layers:
        for tensor in layer:
            if tensor is not None and tensor.is_floating_point():
                tensor[torch.from_numpy(blocks)] = torch.nan


@dataclass
class Held:
    """A sequence in a slot. ``tables`` has the blocks of each group of layers."""

    index: int  # of its prompt
    params: SamplingParams
    prompt_len: int
    ids: list[int]
    tables: list[list[int]]
    num_passed: list[int]
    num_computed: int = 0
    num_settled: int = 0  # computed ids when blocks were last dropped

    @property
    def num_lacking(self) -> int:
        return len(self.ids) - self.num_computed


class TightDriver:
    """Has blocks for ``num_at_once`` sequences that are computed alone. Every ``resume_every``-th
    plan takes a sequence out of its slot and admits it again, with what is in its blocks; but only
    if the blocks of ``windows``, by default the engine's groups, are still there."""

    def __init__(
        self,
        engine: Engine,
        chunk_sizes: Sequence[int],
        *,
        num_at_once: int = 1,
        depth: int = 0,
        num_steps: int = 1,
        resume_every: int = 1000,
        windows: Sequence[Group] = (),
    ) -> None:
        self._engine, self._capacity = engine, engine.capacity
        most = num_at_once * most_blocks(self._capacity, self._capacity.max_model_len)
        free = np.random.default_rng(0).permutation(self._capacity.num_blocks)
        self._free: list[int] = free.tolist()[:most]
        self._num_at_once, self._depth, self._num_steps = num_at_once, depth, num_steps
        self._resume_every, self._windows = resume_every, windows or self._capacity.groups
        self._chunk_sizes = cycle(chunk_sizes)
        self._held: dict[int, Held] = {}
        self._release: list[int] = []
        self._admitted: list[int] = []
        self._num_plans = 0

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Run:
        """Like ``scheduled.run``."""
        done, num_free = Run.of(len(prompts)), len(self._free)
        waiting = list(enumerate(zip(prompts, params, strict=True)))
        while waiting or self._held:
            while waiting and len(self._held) < self._num_at_once:
                index, (prompt, own) = waiting.pop(0)
                slot = next(slot for slot in range(9) if slot not in self._held)
                tables: list[list[int]] = [[] for _ in self._capacity.groups]
                held = Held(index, own, len(prompt), list(prompt), tables, [0] * len(tables))
                self._held[slot] = held
                self._admitted.append(slot)
            self._step(done)
        assert len(self._free) == num_free
        self._engine.reset()
        return done

    def _step(self, done: Run) -> None:
        self._num_plans += 1
        if self._num_plans % self._resume_every == 0:
            self._resume(next(iter(self._held)))
        plan, ids = self._plan()
        done.note_plan(plan)
        result, arrays = run_step(self._engine, plan, ids)
        layout = Layout(result.rows, arrays)
        for index, row in enumerate(result.rows):
            held, part = self._held[row.slot], layout.part(index, index + 1)
            if row.run.kind == RunKind.OUTPUT:
                held.ids += part.ids.tolist()
                held.num_computed = len(held.ids) - 1
            done.note(msgspec.structs.replace(row, request=str(held.index)), part)
        for row in result.rows:
            if row.finish or row.error:
                self._leave(row.slot)

    def _plan(self) -> tuple[StepPlan, np.ndarray]:
        admits = [self._admit(slot) for slot in self._admitted]
        ids = [each for slot in self._admitted for each in self._held[slot].ids]
        is_long = all(each.num_lacking == 1 for each in self._held.values())
        num_steps = self._num_steps if is_long else 1
        drops, extends, prefill, decode = [], [], [], []
        for slot, held in self._held.items():
            num = min(held.num_lacking, next(self._chunk_sizes))
            drops += self._drop(slot, held)
            end = held.num_computed + num + self._depth + num_steps - 1
            extends.append(Extend(slot, *self._grow(held, end)))
            if held.num_lacking == 1:
                decode.append(Decode(slot, self._depth))
            else:
                prefill.append(Prefill(slot, num))
                held.num_computed += num
        plan = StepPlan(
            *(self._num_plans, self._release, admits, extends, prefill, decode, self._depth),
            num_steps,
            [*drops],
        )
        self._release, self._admitted = [], []
        return plan, np.array(ids, np.int32)

    def _admit(self, slot: int) -> Admit:
        held, null_block = self._held[slot], self._capacity.num_blocks
        kept = [
            [null_block] * passed + table[passed:]
            for table, passed in zip(held.tables, held.num_passed, strict=True)
        ]
        return Admit(
            *(slot, "r", 1, 0, 0, held.prompt_len, len(held.ids), held.num_computed),
            *(held.params, kept[0]),
            more_blocks=kept[1:],
        )

    def _resume(self, slot: int) -> None:
        """Does nothing if a window's blocks at the end of the last whole block are gone."""
        held, size = self._held[slot], self._capacity.block_size
        num_kept = held.num_computed // size
        ends = num_kept * size, held.num_settled
        passed, dropped = ([num_passed(each, end, size) for each in self._windows] for end in ends)
        if passed != dropped or slot in self._admitted:
            return
        for table in held.tables:
            self._free = table[num_kept:] + self._free
            del table[num_kept:]
        held.num_computed = num_kept * size
        self._release.append(slot)
        self._admitted.append(slot)

    def _leave(self, slot: int) -> None:
        held = self._held.pop(slot)
        self._release.append(slot)
        for table, passed in zip(held.tables, held.num_passed, strict=True):
            self._free = table[passed:] + self._free

    def _drop(self, slot: int, held: Held) -> list[Drop]:
        drops, held.num_settled = [], held.num_computed
        for index, group in enumerate(self._capacity.groups):
            before = held.num_passed[index]
            passed = num_passed(group, held.num_computed, self._capacity.block_size)
            if passed > before:
                drops.append(Drop(slot, index, passed))
                self._free = held.tables[index][before:passed] + self._free
                held.num_passed[index] = passed
        return drops

    def _grow(self, held: Held, end: int) -> tuple[list[int], list[list[int]]]:
        """New blocks for ids before ``end``, and of layers without a window for all known ids."""
        capacity, of_groups = self._capacity, []
        for group, table in zip(capacity.groups, held.tables, strict=True):
            wanted = max(end, len(held.ids)) if group.window is None else end
            wanted = min(wanted, capacity.max_model_len)
            num = max(0, -(-wanted // capacity.block_size) - len(table))
            of_groups.append([self._free.pop() for _ in range(num)])
            table += of_groups[-1]
        return of_groups[0], of_groups[1:]


def run_tightly(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    chunk_sizes: Sequence[int],
    **options: Any,
) -> Run:
    return TightDriver(engine, chunk_sizes, **options).run(prompts, params)
