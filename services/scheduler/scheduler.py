"""The pure core: which sequence runs when and where. No clock, no sockets, no asyncio, no torch.

There are no phases. A sequence has ids it knows and ids whose KV is computed; a step gives it
tokens to catch up, which covers prompts in chunks, decoding, and recovery after preemption or a
worker's death alike. Decoding sequences come first, then prompts, oldest first, up to the worker's
token budget. When blocks run out the youngest sequence gives its own back and waits again with all
it has emitted.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from services.scheduler.limits import check_length, fits
from services.scheduler.sequence import Emission, Sequence
from services.scheduler.worker_state import PlanBuilder, WorkerState
from shared.errors import (
    RETRY_AFTER_S,
    InternalError,
    Overloaded,
    RequestError,
    Unavailable,
)
from shared.messages import Capacity, Generate, StepPlan, StepResult

MAX_WORKER_DEATHS = 2


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its buffer: the known ids of what it admits."""

    plan: StepPlan
    ids: np.ndarray


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sequence that was accepted and cannot go on."""

    sequence: Sequence
    error: RequestError


class Scheduler:
    """Owns blocks, slots and the line of waiting sequences; the verbs are add, cancel, plan,
    absorb."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.workers: dict[str, WorkerState] = {}
        self.waiting: list[Sequence] = []
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.num_preemptions = 0
        self._num_added = 0

    def add_worker(self, worker_id: str, capacity: Capacity) -> list[Refusal]:
        """Returns what waits and can run to its end on no worker that is there now."""
        self.workers[worker_id] = WorkerState(capacity)
        return self._take_out_hopeless()

    def remove_worker(self, worker_id: str) -> list[Refusal]:
        """Its sequences wait for another worker; returns those that may not or cannot.

        What the plan in flight computed may be what killed it, so a sequence may lose
        ``MAX_WORKER_DEATHS`` workers in that way and no more.
        """
        worker = self.workers.pop(worker_id)
        suspects = worker.slots_in_flight()
        refusals = []
        for slot, sequence in list(worker.running.items()):
            sequence.leave_worker()
            sequence.num_worker_deaths += slot in suspects
            if sequence.is_cancelled:
                del self.sequences[sequence.key]
            elif sequence.num_worker_deaths > MAX_WORKER_DEATHS:
                del self.sequences[sequence.key]
                text = f"{sequence.num_worker_deaths} workers died while they ran this request"
                refusals.append(Refusal(sequence, InternalError(text)))
            else:
                self._wait(sequence)
        return refusals + self._take_out_hopeless()

    def add(self, generate: Generate, prompt: np.ndarray, route: int) -> None:
        """Puts a sequence in the line, or raises the RequestError that refuses it."""
        self._check(generate, len(prompt))
        sequence = Sequence(
            generate.request,
            generate.attempt,
            generate.choice,
            route,
            self._num_added,
            prompt,
            generate.params,
        )
        self._num_added += 1
        self.sequences[sequence.key] = sequence
        self._wait(sequence)

    def cancel(self, key: tuple[str, int]) -> None:
        """Frees the sequence at once, or with the result of the plan that names it."""
        sequence = self.sequences.get(key)
        if sequence is None:
            return
        worker = self._worker_of(sequence)
        if worker is None:
            self.waiting.remove(sequence)
        elif worker.in_flight is not None:
            sequence.is_cancelled = True
            return
        else:
            worker.remove(sequence)
        del self.sequences[key]

    def cancel_route(self, route: int) -> None:
        for key in [key for key, sequence in self.sequences.items() if sequence.route == route]:
            self.cancel(key)

    def abandon_waiting(self) -> list[Sequence]:
        """Takes everybody out of the line, because no worker has come."""
        abandoned, self.waiting = self.waiting, []
        for sequence in abandoned:
            del self.sequences[sequence.key]
        return abandoned

    def plan(self, worker_id: str, admits: bool = True) -> Planned | None:
        """The next step of a worker, or None while one is in flight or there is nothing to do.

        A worker that leaves (``admits`` False) ends what it has and gets nothing new.
        """
        worker = self.workers[worker_id]
        if worker.in_flight is not None:
            return None
        num_preemptions = self.num_preemptions
        extensions = self._reserve(worker)
        builder = worker.begin_plan()
        self._continue_running(worker, builder, extensions)
        if admits and self.num_preemptions == num_preemptions:
            self._admit_waiting(worker, builder)
        if builder.is_empty:
            return None
        worker.in_flight = builder.plan
        return Planned(builder.plan, builder.ids)

    def absorb(self, worker_id: str, result: StepResult, ids: np.ndarray) -> list[Emission]:
        """What the plan in flight brought, in the order of the rows; other results are ignored.

        ``ids`` is the result's buffer. What ended is forgotten and its blocks are free.
        """
        worker = self.workers[worker_id]
        if worker.in_flight is None or result.step != worker.in_flight.step:
            return []
        worker.in_flight = None
        emissions = list(_emissions(worker, result))
        for emission in emissions:
            emission.sequence.emitted.extend(
                ids[emission.start : emission.start + emission.num_tokens].tolist()
            )
            if emission.ends:
                self._forget(worker, emission.sequence)
        for sequence in [each for each in worker.running.values() if each.is_cancelled]:
            self._forget(worker, sequence)
        return [emission for emission in emissions if not emission.sequence.is_cancelled]

    def _take_out_hopeless(self) -> list[Refusal]:
        """Another worker may have less room than the one they were accepted for."""
        if not self.workers:
            return []
        refusals = []
        for sequence in list(self.waiting):
            try:
                self._check_length(len(sequence.prompt), sequence.params.max_tokens)
            except RequestError as error:
                self.waiting.remove(sequence)
                del self.sequences[sequence.key]
                refusals.append(Refusal(sequence, error))
        return refusals

    def _check_length(self, prompt_len: int, max_tokens: int | None) -> None:
        capacities = [worker.capacity for worker in self.workers.values()]
        check_length(capacities, prompt_len, max_tokens)

    def _check(self, generate: Generate, prompt_len: int) -> None:
        if not self.workers:
            raise Unavailable(
                "no worker is connected", code="no_worker", retry_after_s=RETRY_AFTER_S
            )
        num_free_slots = sum(worker.num_free_slots for worker in self.workers.values())
        if len(self.waiting) >= self.max_waiting + num_free_slots:
            raise Overloaded(
                f"{len(self.waiting)} requests are waiting for a slot; the limit is max-waiting ="
                f" {self.max_waiting}",
                retry_after_s=RETRY_AFTER_S,
            )
        self._check_length(prompt_len, generate.params.max_tokens)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda each: each.order)

    def _worker_of(self, sequence: Sequence) -> WorkerState | None:
        if sequence.slot is None:
            return None
        return next(
            worker
            for worker in self.workers.values()
            if worker.running.get(sequence.slot) is sequence
        )

    def _forget(self, worker: WorkerState, sequence: Sequence) -> None:
        worker.remove(sequence)
        del self.sequences[sequence.key]

    def _reserve(self, worker: WorkerState) -> dict[int, list[int]]:
        """New blocks by slot for every running sequence; the youngest pay where they run out."""
        extensions = {}
        for slot, sequence in worker.by_order():
            while slot in worker.running:
                blocks = worker.pool.try_take(worker.num_blocks_lacking(sequence))
                if blocks is not None:
                    sequence.blocks.extend(blocks)
                    extensions[slot] = blocks
                    break
                self._preempt_youngest(worker)
        return extensions

    def _preempt_youngest(self, worker: WorkerState) -> None:
        youngest = max(worker.running.values(), key=lambda each: each.order)
        worker.remove(youngest)
        self._wait(youngest)
        self.num_preemptions += 1

    def _continue_running(
        self, worker: WorkerState, builder: PlanBuilder, extensions: dict[int, list[int]]
    ) -> None:
        for slot, blocks in extensions.items():
            if blocks:
                builder.extend(slot, blocks)
        decoding_first = sorted(worker.by_order(), key=lambda item: item[1].num_to_compute > 1)
        for slot, sequence in decoding_first:
            if builder.budget > 0:
                builder.compute(slot, sequence)

    def _admit_waiting(self, worker: WorkerState, builder: PlanBuilder) -> None:
        while self.waiting and builder.budget > 0 and worker.has_free_slot:
            sequence = self.waiting[0]
            if not fits(worker.capacity, len(sequence.prompt), sequence.params.max_tokens):
                return  # it waits for a worker with more room
            blocks = worker.pool.try_take(worker.num_blocks_lacking(sequence))
            if blocks is None:
                return
            del self.waiting[0]
            slot = worker.place(sequence, blocks)
            builder.admit(sequence, slot)
            builder.compute(slot, sequence)


def _emissions(worker: WorkerState, result: StepResult) -> Iterator[Emission]:
    start = 0
    for row in result.rows:
        sequence = worker.running.get(row.slot)
        if sequence is not None and sequence.key == (row.request, row.attempt):
            position = len(sequence.emitted)
            yield Emission(sequence, start, row.num_emitted, position, row.finish, row.error)
        start += row.num_emitted
