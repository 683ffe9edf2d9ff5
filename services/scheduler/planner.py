"""Decides what a worker computes in its next step. Pure.

There are no phases. A sequence has ids it knows and ids whose KV is computed; a step gives it
tokens to catch up, which covers prompts in chunks, decoding, and recovery after preemption or a
worker's death alike. Decoding sequences come first, then prompts, in order but for long ones
(``prefills.py``), up to the worker's token budget. When blocks run out one sequence gives its own
back and waits again with all it has emitted.

**Credit.** A sequence without credit is not computed. When another one needs its slot or its
blocks it is preempted first.

**Speculation.** A plan has the drafts verified that the plan before it had made, so a sequence gets
at least one id and at most one more than it has drafts. Blocks are reserved for all that may come;
the result sets right what is expected.

**Running ahead.** A plan may be made before the result of the last one is there: a sequence that
samples is expected to know at least one id more then, whichever it is. If it ends instead, the
worker passes over it. While plans are in flight, no sequence with credit is preempted or handed
over, and none is computed alone: these plans run first.

**Isolation.** An isolated sequence is computed alone, in turns with all others.

**Prefixes.** An admitted sequence begins behind those of its ids whose KV its worker has.
"""

from collections.abc import Mapping
from functools import partial

from services.scheduler.placement import is_best_worker, may_run_on
from services.scheduler.plan_builder import PlanBuilder
from services.scheduler.prefills import PrefillLimits, Prefills
from services.scheduler.queues import Queues, WaitingQueue
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState


class Planner:
    """Makes plans for ``workers``, and moves sequences between them and ``queues`` as it does.

    Up to ``pipeline_depth`` plans of a worker are in flight at once.
    """

    def __init__(
        self,
        workers: Mapping[str, WorkerState],
        queues: Queues,
        pipeline_depth: int,
        prefill_limits: PrefillLimits,
    ) -> None:
        self.num_preemptions = 0
        self._workers = workers
        self._queues = queues
        self._pipeline_depth = pipeline_depth
        self._prefill_limits = prefill_limits

    def next_plan(self, worker: WorkerState, num_absorbed: int) -> PlanBuilder | None:
        """Returns None while enough plans are in flight or where there is nothing to do.

        ``num_absorbed`` counts the results of all workers.
        """
        if worker.in_flight and not self._may_run_ahead(worker):
            return None
        builder = self._plan_in_turn(worker, num_absorbed)
        return None if builder.is_empty else builder

    def _may_run_ahead(self, worker: WorkerState) -> bool:
        return (
            self._is_in_need(worker)
            and not worker.is_leaving
            and self._first_isolated(worker) is None
            and not worker.is_short_of_blocks
        )

    def _is_in_need(self, worker: WorkerState) -> bool:
        """Whether a worker with plans in flight shall have another one. Where steps are short it
        has twice as many, as long as none of them computes prompts: those that come wait for what
        is in flight."""
        num, depth = len(worker.in_flight), self._pipeline_depth
        if num < depth or depth == 1:
            return num < depth
        has_prefill = any(plan.prefill for plan in worker.in_flight)
        return worker.has_short_steps and num < 2 * depth and not has_prefill

    def _plan_in_turn(self, worker: WorkerState, num_absorbed: int) -> PlanBuilder:
        """Isolated sequences and all others take turns."""
        isolated = self._first_isolated(worker)
        if isolated is None or worker.ran_isolated:
            worker.ran_isolated = False
            builder = self._plan_batch(worker, num_absorbed)
            if isolated is None or not builder.is_empty:
                return builder
        worker.ran_isolated = True
        return self._plan_isolated(worker, isolated)

    def _first_isolated(self, worker: WorkerState) -> Sequence | None:
        for sequence in worker.running.values():
            if sequence.is_isolated and sequence.has_credit:
                return sequence
        return self._first_for(worker, self._queues.isolated)

    def _first_for(self, worker: WorkerState, queue: WaitingQueue) -> Sequence | None:
        if not worker.admits:
            return None
        return queue.first_where(partial(self._may_run_on, worker))

    def _may_run_on(self, worker: WorkerState, sequence: Sequence) -> bool:
        return may_run_on(worker, self._workers.values(), sequence)

    def _plan_batch(self, worker: WorkerState, num_absorbed: int) -> PlanBuilder:
        """Computes all that are not isolated, and admits more if none lacks blocks."""
        num_preemptions = self.num_preemptions
        extensions = self._reserve(worker)
        is_short_of_blocks = self.num_preemptions > num_preemptions
        if not is_short_of_blocks:
            self._make_room(worker)
        builder = worker.begin_plan()
        prompts: list[Sequence] = []
        decoding: list[Sequence] = []
        for sequence, blocks in extensions:
            builder.extend(sequence, blocks)
            (prompts if sequence.num_to_compute > 1 else decoding).append(sequence)
        builder.share_budget(len(decoding))
        for sequence in decoding:
            builder.compute(sequence, builder.budget)
        prefills = Prefills(self._prefill_limits, worker, builder)
        prefills.add(prompts)
        if not is_short_of_blocks:
            self._admit(worker, builder, prefills, num_absorbed)
        prefills.finish()
        return builder

    def _plan_isolated(self, worker: WorkerState, isolated: Sequence) -> PlanBuilder:
        """Computes one isolated sequence alone; others are preempted until it has room."""
        if isolated.allocation is None:
            while not worker.has_room_for(isolated):
                self.preempt(worker)
            builder = worker.begin_plan()
            self._queues.isolated.try_remove(isolated)
            worker.allocate(isolated)
            builder.admit(isolated)
        else:
            while (blocks := worker.try_extend(isolated)) is None:
                self.preempt(worker, spared=isolated)
            builder = worker.begin_plan()
            builder.extend(isolated, blocks)
        builder.compute(isolated, builder.budget)
        return builder

    def _reserve(self, worker: WorkerState) -> list[tuple[Sequence, list[int]]]:
        """Returns the sequences that this step computes, each with its new blocks; where blocks
        lack, the youngest are preempted for the others."""
        extensions = []
        for sequence in worker.runnable():
            while sequence.allocation is not None:
                blocks = worker.try_extend(sequence)
                if blocks is not None:
                    extensions.append((sequence, blocks))
                    break
                self.preempt(worker)
        return extensions

    def _make_room(self, worker: WorkerState) -> None:
        """Preempts sequences without credit until the first in the waiting queue has room."""
        first = self._first_for(worker, self._queues.waiting)
        if first is None:
            return
        while not worker.has_room_for(first) and worker.has_paused:
            self.preempt(worker)

    def _admit(
        self, worker: WorkerState, builder: PlanBuilder, prefills: Prefills, num_absorbed: int
    ) -> None:
        """Admits waiting sequences, in order, as far as slots, blocks and the budget go.

        Passed over are further choices of a prompt whose blocks this plan fills: in the next plan
        they find these in the prefix cache.
        """
        waiting = self._queues.waiting
        filling_blocks = [*worker.filling_blocks(builder.plan), *prefills.longs]
        prompts = {each.prompt_key for each in filling_blocks}
        while worker.admits and not prefills.is_full:
            first = waiting.first_where(
                lambda each: (
                    each.prompt_key not in prompts
                    and self._may_run_on(worker, each)
                    and prefills.may_admit(each)
                )
            )
            if first is None or not prefills.has_room_for(first) or not worker.has_room_for(first):
                return
            workers, can_start = self._workers.values(), partial(self._can_start, first)
            if not is_best_worker(worker, workers, first, len(waiting), num_absorbed, can_start):
                return
            waiting.try_remove(first)
            worker.allocate(first)
            prefills.admit(first)
            if worker.num_to_index(first) > 0 or first in prefills.longs:
                prompts.add(first.prompt_key)

    def _can_start(self, sequence: Sequence, worker: WorkerState) -> bool:
        return (
            self._may_run_on(worker, sequence)
            and worker.has_room_for(sequence)
            and self._prefill_limits.has_room_for(sequence, worker)
        )

    def preempt(self, worker: WorkerState, spared: Sequence | None = None) -> None:
        """Takes slot and blocks from a sequence without credit, else from the youngest."""
        others = [each for each in worker.running.values() if each is not spared]
        sequence = max(others, key=lambda each: (not each.has_credit, each.order))
        worker.remove(sequence)
        self._queues.put(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
