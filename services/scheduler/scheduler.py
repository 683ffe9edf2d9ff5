"""The pure core: which sequence runs when and where. No clock, no sockets, no asyncio, no torch.

There are no phases. A sequence has ids it knows and ids whose KV is computed; a step gives it
tokens to catch up, which covers prompts in chunks, decoding, and recovery after preemption or a
worker's death alike. Decoding sequences come first, then prompts, in order but for long ones
(``prefills.py``), up to the worker's token budget. When blocks run out one sequence gives its own
back and waits again with all it has emitted.

**Order.** A sequence that came at time t with priority p stands where one of priority 0 would that
came at t + p · priority_step_s. So nobody starves: whoever waits long enough is first, and passed
over only as long as others with long prompts are being computed, which end.

**Credit.** A sequence whose client does not read is not computed; if anybody else needs its slot or
its blocks it has to leave them, and it stands in no queue until it has credit again.

**Speculation.** A plan has drafts verified that the one before it had made, so a sequence gets one
id at least and a few at most. Blocks are reserved for all that may come; the result sets right what
is expected.

**Running ahead.** A plan may be made before the result of the last one is there: a sequence that
samples is expected to know one id more then at least, whichever it is. If it ends instead, the
worker passes over it. Nobody with credit is preempted, handed back or computed alone while plans
are in flight: these run first.

**Isolation.** When a worker dies, each sequence that a plan in flight computed may be the reason.
From then on it is computed alone, in turns with all others, until it has emitted a token. A worker
that has not finished its first steps may be the reason itself (``placement.may_run_on``).

**Prefixes.** Full blocks may be shared as soon as the plan that fills them is sent, or, where it
decodes, when its result is there. Who enters begins behind what its worker has of its ids.
"""

from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from services.scheduler.limits import LacksBlocks, check_length
from services.scheduler.placement import is_best_worker, may_run_on
from services.scheduler.plan_builder import PlanBuilder
from services.scheduler.prefills import PrefillLimits, Prefills
from services.scheduler.sequence import Emission, Ended, Sequence
from services.scheduler.waiting_queue import WaitingQueue
from services.scheduler.worker_state import WorkerState
from shared.errors import (
    RETRY_AFTER_S,
    WORKER_DIED,
    InternalError,
    Overloaded,
    RequestError,
    Unavailable,
)
from shared.messages import (
    Capacity,
    Generate,
    Grant,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepResult,
)
from shared.token_arrays import TokenArrays, bytes_of

MAX_WORKER_DEATHS = 2


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its buffer: the known ids of what it admits. ``newcomers`` run for the first
    time."""

    plan: StepPlan
    ids: np.ndarray
    newcomers: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sequence that was accepted and cannot go on."""

    sequence: Sequence
    error: RequestError


class Scheduler:
    """Owns blocks, slots and queues; the verbs are add, grant, cancel, plan, absorb."""

    def __init__(
        self,
        max_waiting: int,
        priority_step_s: float,
        caches_prefixes: bool = True,
        pipeline_depth: int = 1,
        prefill_limits: PrefillLimits = PrefillLimits(),  # noqa: B008, it is frozen
    ) -> None:
        self.max_waiting = max_waiting
        self.workers: dict[str, WorkerState] = {}
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.waiting = WaitingQueue()
        self.isolated = WaitingQueue()  # those of them that wait
        self.paused = WaitingQueue()  # waiting, and would not be computed
        self.num_preemptions = 0
        self._ended: list[Ended] = []
        self.num_requeues = 0  # after the death of their worker
        self.num_prefix_queries = self.num_prefix_hits = 0  # tokens of those that entered first
        self._priority_step_s = priority_step_s
        self._caches_prefixes = caches_prefixes
        self._pipeline_depth = pipeline_depth
        self._prefill_limits = prefill_limits
        self._num_added = self._num_absorbed = 0
        self._unservable: dict[Sequence, float] = {}  # since when no worker could run them

    def add_worker(self, worker_id: str, capacity: Capacity) -> None:
        worker = WorkerState(worker_id, capacity, self._caches_prefixes)
        self.workers[worker_id] = worker
        for sequence in list(filter(worker.fits, self._unservable)):
            del self._unservable[sequence]

    def remove_worker(
        self, worker_id: str, now_s: float, is_planned: bool = False
    ) -> list[Refusal]:
        """Its sequences wait for another worker; returns those that may not. Nobody is blamed for a
        worker that left on purpose, which may be before a step of it has ended."""
        worker = self.workers.pop(worker_id)
        computed = worker.computed_slots()
        refusals = []
        for slot, sequence in list(worker.running.items()):
            sequence.allocation = None
            if slot in computed and not is_planned and _record_worker_death(sequence):
                text = f"{sequence.num_worker_deaths} workers died while they ran this request"
                refusals.append(self._refusal(sequence, InternalError(text, code=WORKER_DIED)))
            else:
                self._wait(sequence)
                self.num_requeues += 1
        self._note_unservable(now_s)
        self._hand_over()
        return refusals

    def release_worker(self, worker_id: str) -> None:
        """It leaves before its sequences have ended: they go to others, one at a time; the second
        call hands over all that are left."""
        worker = self.workers[worker_id]
        worker.releases_all = worker.is_leaving
        worker.is_leaving, worker.admits = True, False
        self._hand_over()

    def add(
        self, generate: Generate, prompt: np.ndarray, emitted: np.ndarray, route: int, now_s: float
    ) -> None:
        """Puts the sequences of a prompt in the waiting queue, or raises the RequestError that
        refuses them.

        ``prompt`` [prompt_len] int32, which they share; ``emitted`` [n] int32: what each had
        emitted before, one after the other.
        """
        self._check(generate, len(prompt))
        end = 0
        for new in generate.sequences:
            start, end = end, end + new.num_emitted
            sequence = Sequence(
                new.request,
                generate.attempt,
                new.choice,
                route,
                (now_s + generate.priority * self._priority_step_s, self._num_added),
                prompt,
                _params_of(generate, new),
                emitted[start:end].tolist(),
                now_s,
                generate.cache_salt,
                num_prompt_scored=new.num_prompt_scored,
            )
            self._num_added += 1
            self.sequences[sequence.key] = sequence
            self._wait(sequence)

    def grant(self, grant: Grant) -> None:
        """The client has taken more. Ignored for a sequence that is unknown."""
        sequence = self.sequences.get((grant.request, grant.attempt))
        if sequence is None:
            return
        sequence.grant(grant)
        if sequence.has_credit and self.paused.try_remove(sequence):
            self._wait(sequence)

    def cancel(self, key: tuple[str, int]) -> None:
        """Forgets the sequence; its slot and blocks are free when no plan in flight names them."""
        sequence = self.sequences.get(key)
        if sequence is None:
            return
        if sequence.allocation is None:
            self._dequeue(sequence)
        else:
            self.workers[sequence.allocation.worker_id].remove(sequence)
        self._end(sequence, "cancelled")
        self._hand_over()

    def cancel_route(self, route: int) -> None:
        for key in [key for key, sequence in self.sequences.items() if sequence.route == route]:
            self.cancel(key)

    def fail_unservable(self, since_s: float, error: RequestError) -> list[Refusal]:
        """Takes out of the queues whom no worker could run since then or longer."""
        unplaceable = self._unservable.items()
        abandoned = [each for each, lost_s in unplaceable if lost_s <= since_s]
        for sequence in abandoned:
            self._dequeue(sequence)
        refusals = [self._refusal(each, error) for each in abandoned]
        self._hand_over()
        return refusals

    def plan(self, worker_id: str, admits: bool = True) -> Planned | None:
        """The next step of a worker, or None while enough are in flight or there is nothing to do.

        With ``admits`` False it ends what it has and gets nothing new.
        """
        worker = self.workers[worker_id]
        worker.admits = admits and not worker.is_leaving
        if worker.in_flight and not self._may_run_ahead(worker):
            return None
        builder = self._next_plan(worker)
        if builder.is_empty:
            return None
        for sequence in worker.filling_blocks(builder.plan):
            worker.index_blocks(sequence)
        self._count_hits(builder.newcomers)
        worker.send(builder.plan, self._num_absorbed)
        return Planned(builder.plan, builder.ids, builder.newcomers)

    def absorb(self, worker_id: str, result: StepResult, arrays: TokenArrays) -> list[Emission]:
        """What the oldest plan in flight brought, in the order of the rows. Raises CodecError for
        the result of another one.

        ``arrays`` are the result's buffers. What ended is forgotten and its blocks are free.
        """
        worker = self.workers[worker_id]
        worker.finish(result, self._num_absorbed + 1)
        self._num_absorbed += 1
        emissions = _record(worker, result, arrays.ids.tolist())
        for emission in emissions:
            if emission.ends or emission.has_output:
                worker.index_blocks(emission.sequence, emission.ends)
            if emission.row.error is not None:
                worker.pool.uncache(emission.sequence.allocated.blocks)
            if emission.ends:
                self._forget(worker, emission.sequence, emission.end_reason)
        self._hand_over()
        return emissions

    def reset_prefix_cache(self) -> None:
        """Whatever comes computes its whole prompt. What runs keeps its blocks."""
        for worker in self.workers.values():
            worker.pool.reset_cache()

    @property
    def concerns_all(self) -> bool:
        """Whether what became of one worker is news for others: somebody would enter one that takes
        it, or is handed over."""
        is_leaving = any(worker.is_leaving for worker in self.workers.values())
        return is_leaving or len(self.waiting) + len(self.isolated) > 0

    def take_ended(self) -> list[Ended]:
        """All that have ended since the last time."""
        ended, self._ended = self._ended, []
        return ended

    # --- a plan -------------------------------------------------------------------------------

    def _may_run_ahead(self, worker: WorkerState) -> bool:
        """Whether a plan may follow those in flight. Where somebody has to be preempted, runs alone
        or is handed back, they have to run first."""
        return (
            len(worker.in_flight) < self._pipeline_depth
            and not worker.is_leaving
            and self._first_isolated(worker) is None
            and not worker.is_short_of_blocks
        )

    def _next_plan(self, worker: WorkerState) -> PlanBuilder:
        """Isolated sequences and all others take turns."""
        isolated = self._first_isolated(worker)
        if isolated is None or worker.ran_isolated:
            worker.ran_isolated = False
            builder = self._plan_batch(worker)
            if isolated is None or not builder.is_empty:
                return builder
        worker.ran_isolated = True
        return self._plan_isolated(worker, isolated)

    def _first_isolated(self, worker: WorkerState) -> Sequence | None:
        for sequence in worker.running.values():
            if sequence.is_isolated and sequence.has_credit:
                return sequence
        return self._first_for(worker, self.isolated)

    def _first_for(self, worker: WorkerState, queue: WaitingQueue) -> Sequence | None:
        workers = self.workers.values()
        if not worker.admits:
            return None
        return queue.first_where(lambda each: may_run_on(worker, workers, each))

    def _plan_batch(self, worker: WorkerState) -> PlanBuilder:
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
            self._admit_waiting(worker, builder, prefills)
        prefills.finish()
        return builder

    def _plan_isolated(self, worker: WorkerState, isolated: Sequence) -> PlanBuilder:
        """Computes one isolated sequence alone; others are preempted until it has room."""
        if isolated.allocation is None:
            while not worker.has_room_for(isolated):
                self._preempt(worker)
            builder = worker.begin_plan()
            self.isolated.try_remove(isolated)
            worker.allocate(isolated)
            builder.admit(isolated)
        else:
            while (blocks := worker.try_extend(isolated)) is None:
                self._preempt(worker, spared=isolated)
            builder = worker.begin_plan()
            builder.extend(isolated, blocks)
        builder.compute(isolated, builder.budget)
        return builder

    def _reserve(self, worker: WorkerState) -> list[tuple[Sequence, list[int]]]:
        """Whom this step computes, each with its new blocks; the youngest pay for the others."""
        extensions = []
        for sequence in worker.runnable():
            while sequence.allocation is not None:
                blocks = worker.try_extend(sequence)
                if blocks is not None:
                    extensions.append((sequence, blocks))
                    break
                self._preempt(worker)
        return extensions

    def _make_room(self, worker: WorkerState) -> None:
        """Whose client does not read makes way for the first in the waiting queue."""
        first = self._first_for(worker, self.waiting)
        if first is None:
            return
        while not worker.has_room_for(first) and worker.has_paused:
            self._preempt(worker)

    def _admit_waiting(self, worker: WorkerState, builder: PlanBuilder, prefills: Prefills) -> None:
        """Passes over the choices of a prompt whose blocks this plan fills: in the next one they
        find these in the index. Nobody waits longer for a choice, which may be gone by then."""
        filling_blocks = [*worker.filling_blocks(builder.plan), *prefills.longs]
        prompts = {each.prompt_key for each in filling_blocks}
        workers = self.workers.values()
        while worker.admits and not prefills.is_full:
            first = self.waiting.first_where(
                lambda each: (
                    each.prompt_key not in prompts
                    and may_run_on(worker, workers, each)
                    and prefills.may_enter(each)
                )
            )
            if first is None or not prefills.has_room_for(first) or not worker.has_room_for(first):
                return
            nums = len(self.waiting), self._num_absorbed
            can_start = partial(self._can_start, first)
            if not is_best_worker(worker, workers, first, *nums, can_start):
                return
            self.waiting.try_remove(first)
            worker.allocate(first)
            prefills.enter(first)
            if worker.num_to_index(first) > 0 or first in prefills.longs:
                prompts.add(first.prompt_key)

    def _can_start(self, sequence: Sequence, worker: WorkerState) -> bool:
        return (
            may_run_on(worker, self.workers.values(), sequence)
            and worker.has_room_for(sequence)
            and self._prefill_limits.has_room_for(sequence, worker)
        )

    def _preempt(self, worker: WorkerState, spared: Sequence | None = None) -> None:
        """Takes slot and blocks from whose client does not read, else from who came last."""
        others = [each for each in worker.running.values() if each is not spared]
        sequence = max(others, key=lambda each: (not each.has_credit, each.order))
        worker.remove(sequence)
        self._wait(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _count_hits(self, newcomers: list[Sequence]) -> None:
        """Those that resume are left out: that they were preempted is no success of the cache."""
        self.num_prefix_queries += sum(len(each.prompt) for each in newcomers)
        self.num_prefix_hits += sum(each.num_cached for each in newcomers)

    # --- in and out of queues ------------------------------------------------------------------

    def _wait(self, sequence: Sequence) -> None:
        if not sequence.has_credit:
            self.paused.add(sequence)
        elif sequence.is_isolated:
            self.isolated.add(sequence)
        else:
            self.waiting.add(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        for queue in (self.waiting, self.isolated, self.paused):
            if queue.try_remove(sequence):
                return

    def _hand_over(self) -> None:
        """What runs on workers that leave waits for others: one sequence at a time, for it stands
        still until it is computed there as far as it was, or all, if there is no time for that."""
        for worker in self.workers.values():
            while worker.may_hand_over and (
                worker.releases_all or not self._is_moving(worker.handed_over)
            ):
                sequence = worker.handed_over = worker.oldest
                worker.remove(sequence)
                self._wait(sequence)

    def _is_moving(self, sequence: Sequence | None) -> bool:
        """Whether it was handed over and stands still, and somebody is there to compute it."""
        return (
            sequence is not None
            and self.sequences.get(sequence.key) is sequence
            and sequence.has_credit
            and sequence.num_to_compute > 1
            and any(each.admits and each.fits(sequence) for each in self.workers.values())
        )

    def _forget(self, worker: WorkerState, sequence: Sequence, reason: str) -> None:
        worker.remove(sequence)
        self._end(sequence, reason)

    def _refusal(self, sequence: Sequence, error: RequestError) -> Refusal:
        self._end(sequence, error.code)
        return Refusal(sequence, error)

    def _end(self, sequence: Sequence, reason: str) -> None:
        del self.sequences[sequence.key]
        self._unservable.pop(sequence, None)
        self._ended.append(Ended(sequence, reason))

    def _note_unservable(self, now_s: float) -> None:
        """Those that are left may have less room than the worker they were accepted for."""
        for sequence in [*self.waiting, *self.isolated, *self.paused]:
            if not any(worker.fits(sequence) for worker in self.workers.values()):
                self._unservable.setdefault(sequence, now_s)

    def _check(self, generate: Generate, prompt_len: int) -> None:
        for each in generate.sequences:
            if (each.request, generate.attempt) in self.sequences:
                raise InternalError(f"there is a sequence {each.request} already")
        if not self.workers:
            raise Unavailable(
                "no worker is connected", code="no_worker", retry_after_s=RETRY_AFTER_S
            )
        num_free_slots = sum(worker.num_free_slots for worker in self.workers.values())
        num_waiting = len(self.waiting) + len(generate.sequences)
        if num_waiting > self.max_waiting + num_free_slots:
            raise Overloaded(
                f"{num_waiting} sequences would wait for {num_free_slots} free slots (each choice"
                f" of a request is one); the limit is max-waiting = {self.max_waiting}"
            )
        try:
            capacities = [worker.capacity for worker in self.workers.values()]
            check_length(capacities, prompt_len, generate.params.max_tokens)
        except LacksBlocks as error:
            if generate.attempt == 1:
                raise
            # It may have been accepted before, for a worker that has not come to us yet.
            raise Unavailable(
                error.message, code="no_worker", retry_after_s=RETRY_AFTER_S
            ) from error


def _params_of(generate: Generate, new: NewSequence) -> SamplingParams:
    if new.choice == 0 or generate.params.prompt_logprobs is None:
        return generate.params
    return msgspec.structs.replace(generate.params, prompt_logprobs=None)


def _record_worker_death(sequence: Sequence) -> bool:
    """A worker died while it computed this sequence: whether it may take no other with it.

    It may not if it has emitted nothing since the last time, when it was computed alone.
    """
    is_proven = sequence.is_isolated
    sequence.is_isolated = True
    sequence.num_worker_deaths += 1
    return is_proven or sequence.num_worker_deaths > MAX_WORKER_DEATHS


def _record(worker: WorkerState, result: StepResult, ids: list[int]) -> list[Emission]:
    """Adds the ids to their sequences; rows of other sequences than those that run are left out."""
    emissions = []
    start = 0
    for index, row in enumerate(result.rows):
        sequence = worker.running.get(row.slot)
        if sequence is not None and sequence.key == (row.request, row.attempt):
            position = sequence.num_prompt_scored if row.of_prompt else len(sequence.emitted)
            emissions.append(Emission(sequence, index, row, position))
            if row.of_prompt:
                sequence.add_prompt_logprobs(row)
            elif row.of_drafts:
                sequence.num_bytes += bytes_of(row)
            elif row.error is None:
                sequence.emit(row, ids[start : start + row.num_tokens])
        start += row.num_tokens
    return emissions
