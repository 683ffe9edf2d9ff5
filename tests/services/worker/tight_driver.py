"""A scheduler for tests with few blocks: it gives them back as soon as a window has passed them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
import torch

from benchmarks.harness.step_engine import run_step
from services.worker.engine.host import HostEngine
from shared.wire.kv_groups import most_blocks, num_passed
from shared.wire.messages import Admit, Decode, Drop, Extend, Prefill, RunKind, StepPlan
from shared.wire.token_arrays import Layout
from tests.services.worker.driver import Job


@dataclass
class Held:
    """A sequence in a slot. ``tables`` has the blocks of each group of layers."""

    job: Job
    tables: list[list[int]]
    num_passed: list[int]
    num_computed: int = 0
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = self.job.prompt + self.job.emitted

    @property
    def num_lacking(self) -> int:
        return len(self.ids) - self.num_computed


class TightDriver:
    """Has blocks for ``num_at_once`` sequences that are computed alone. Whatever a sequence gives
    back becomes NaN, as another owner might leave it. Every ``resume_every``-th plan takes a
    sequence out of its slot and admits it again, with what is in its blocks."""

    def __init__(
        self,
        engine: HostEngine,
        chunk_sizes: Sequence[int],
        *,
        num_at_once: int = 1,
        depth: int = 0,
        num_steps: int = 1,
        resume_every: int = 1000,
    ) -> None:
        self.engine = engine
        self.num_dropped = self.num_resumed = 0
        capacity = engine.capacity
        most = num_at_once * most_blocks(capacity, capacity.max_model_len)
        self._free = np.random.default_rng(0).permutation(capacity.num_blocks).tolist()[:most]
        self._num_at_once, self._depth, self._num_steps = num_at_once, depth, num_steps
        self._resume_every = resume_every
        self._chunk_sizes = cycle(chunk_sizes)
        self._held: dict[int, Held] = {}
        self._release: list[int] = []
        self._admit: list[tuple[Admit, list[int]]] = []
        self._num_plans = 0

    def run(self, jobs: list[Job]) -> None:
        num_free, waiting = len(self._free), list(reversed(jobs))
        while waiting or self._held:
            while waiting and len(self._held) < self._num_at_once:
                slot = next(slot for slot in range(9) if slot not in self._held)
                groups = self.engine.capacity.groups
                self._add(slot, Held(waiting.pop(), [[] for _ in groups], [0 for _ in groups]))
            self._step()
        assert len(self._free) == num_free

    def _step(self) -> None:
        self._num_plans += 1
        if self._num_plans % self._resume_every == 0:
            self._resume(next(iter(self._held)))
        drops, extends, prefill, decode = [], [], [], []
        num_steps = self._num_steps if self._decodes_only else 1
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
        admits = [row for row, _ in self._admit]
        ids = np.array([each for _, known in self._admit for each in known], np.int32)
        plan = StepPlan(
            *(self._num_plans, self._release, admits, extends, prefill, decode, self._depth),
            *(num_steps, drops),
        )
        self._release, self._admit = [], []
        result, arrays = run_step(self.engine, plan, ids)
        layout = Layout(result.rows, arrays)
        for index, row in enumerate(result.rows):
            if row.run.kind == RunKind.OUTPUT:
                held, part = self._held[row.slot], layout.part(index, index + 1)
                held.ids += part.ids.tolist()
                held.job.emitted += part.ids.tolist()
                held.job.logprobs += list(part.values.reshape(len(part.ids), -1))
                held.num_computed = len(held.ids) - 1
        for row in result.rows:
            if row.finish or row.error:
                self._held[row.slot].job.end = row
                self._leave(row.slot)

    @property
    def _decodes_only(self) -> bool:
        return all(each.num_lacking == 1 for each in self._held.values())

    def _add(self, slot: int, held: Held) -> None:
        job, num_ids = held.job, len(held.ids)
        kept = [list(table) for table in held.tables]
        for group, table in enumerate(kept):
            passed = held.num_passed[group]
            table[:passed] = [self.engine.capacity.num_blocks] * passed
        admit = Admit(
            *(slot, "r", 1, 0, job.choice, len(job.prompt), num_ids, held.num_computed),
            *(job.params, kept[0]),
            more_blocks=kept[1:],
        )
        self._admit.append((admit, list(held.ids)))
        self._held[slot] = held

    def _resume(self, slot: int) -> None:
        """Does nothing if its first blocks are not all there."""
        held, size = self._held[slot], self.engine.capacity.block_size
        num_kept = held.num_computed // size
        passed = [num_passed(group, num_kept * size, size) for group in self.engine.capacity.groups]
        if passed != held.num_passed or self._admit:
            return
        for table in held.tables:
            self._give_back(table[num_kept:])
            del table[num_kept:]
        held.num_computed = num_kept * size
        self._release.append(slot)
        self._add(slot, held)
        self.num_resumed += 1

    def _leave(self, slot: int) -> None:
        held = self._held.pop(slot)
        self._release.append(slot)
        for table, passed in zip(held.tables, held.num_passed, strict=True):
            self._give_back(table[passed:])

    def _drop(self, slot: int, held: Held) -> list[Drop]:
        drops, size = [], self.engine.capacity.block_size
        for index, group in enumerate(self.engine.capacity.groups):
            passed = num_passed(group, held.num_computed, size)
            if passed > held.num_passed[index]:
                drops.append(Drop(slot, index, passed))
                self._give_back(held.tables[index][held.num_passed[index] : passed])
                self.num_dropped += passed - held.num_passed[index]
                held.num_passed[index] = passed
        return drops

    def _grow(self, held: Held, end: int) -> tuple[list[int], list[list[int]]]:
        """New blocks for ids before ``end``, and of layers without a window for all known ids."""
        capacity, of_groups = self.engine.capacity, []
        for group, table in zip(capacity.groups, held.tables, strict=True):
            wanted = max(end, len(held.ids)) if group.window is None else end
            wanted = min(wanted, capacity.max_model_len)
            num = max(0, -(-wanted // capacity.block_size) - len(table))
            of_groups.append([self._free.pop() for _ in range(num)])
            table += of_groups[-1]
        return of_groups[0], of_groups[1:]

    def _give_back(self, blocks: list[int]) -> None:
        for layer in self.engine._kv_cache.layers:
            for tensor in layer:
                if tensor is not None and tensor.is_floating_point():
                    tensor[blocks] = torch.nan
        self._free = blocks + self._free
