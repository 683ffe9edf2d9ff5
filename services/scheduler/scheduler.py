"""The pure core: decides which sequence runs when and where. No clock, no sockets, no asyncio, no
torch.

This module handles sequences and workers from arrival to end; ``planner.py`` plans the steps.

**Order.** A sequence of priority p that arrived at time t takes the place of one of priority 0 that
arrived at t + p · priority_step_s. No sequence starves: one that waits long enough is first, and is
overtaken only while other long prompts are computed, which end. Running sequences yield to ones of
an earlier priority in the same order (``priority_share.py``).

**Credit.** A sequence is not computed while its client does not read, and is preempted if another
one needs its slot or blocks. It waits apart until it has credit again.

**Isolation.** When a worker dies, each sequence computed by a plan in flight may be the cause. From
then on it is computed alone, also in another cell, until it has emitted a token. A worker in its
first steps may be the cause itself (``Placement.may_run_on``).

**Prefixes.** Full blocks may be shared as soon as the plan that prefills them is sent, or once the
result is there if it decodes.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import msgspec
import numpy as np

from services.scheduler.limits import LacksBlocks, check_length
from services.scheduler.placement import Placement
from services.scheduler.planner import Planner
from services.scheduler.preemption import Handover
from services.scheduler.prefills import PrefillLimits
from services.scheduler.queues import Queues
from services.scheduler.resource import Resource
from services.scheduler.results import Emission, apply_result
from services.scheduler.sequence import Arrival, Ended, Sequence, WaitReason
from services.scheduler.worker_state import WorkerState
from shared.errors import (
    NO_WORKER,
    RETRY_AFTER_S,
    WORKER_DIED,
    InternalError,
    Overloaded,
    RequestError,
    Unavailable,
)
from shared.wire.messages import (
    Capacity,
    Generate,
    Grant,
    NewSequence,
    SamplingParams,
    StepPlan,
    StepResult,
)
from shared.wire.token_arrays import TokenArrays

MAX_LEFT = 4096
"""Ended sequences remembered for another attempt."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its buffers, the known ids and ``pixels`` of admitted sequences. ``newcomers`` run
    for the first time."""

    plan: StepPlan
    ids: np.ndarray
    newcomers: list[Sequence] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An accepted sequence that cannot go on."""

    sequence: Sequence
    error: RequestError


class Scheduler:
    """Owns workers, sequences and queues; the verbs are add, grant, cancel, plan, absorb."""

    def __init__(
        self,
        max_waiting: int,
        priority_step_s: float,
        caches_prefixes: bool = True,
        pipeline_depth: int = 1,
        prefill_limits: PrefillLimits = PrefillLimits(),  # noqa: B008, it is frozen
        priority_share: float = 0.2,
        stream_rate: float = 0.5,
    ) -> None:
        self.max_waiting = max_waiting
        self.workers: dict[str, WorkerState] = {}
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.queues = Queues()
        self._holders: dict[bytes, str] = {}  # block hash to worker
        self.placement = Placement(self.workers, self._holders, prefill_limits)
        self.planner = Planner(self.queues, self.placement, pipeline_depth, prefill_limits)
        self.num_requeues = 0  # after the death of their worker
        # In tokens of newcomers' prompts; cut: known to groups without a window alone.
        self.num_prefix_queries = self.num_prefix_hits = self.num_prefix_cut = 0
        self.capacities: list[Capacity] = []  # of all workers, without repetition
        self.checks: list[Callable[[Sequence], None]] = []  # of optional parts; each may refuse
        self._handover = Handover(self.workers, self.sequences, self.queues)
        self._in_need: dict[str, None] = {}
        self._priority_step_s = priority_step_s
        self.prefill_limits = prefill_limits
        self._priority_share = priority_share
        self._stream_rate = stream_rate
        self._caches_prefixes = caches_prefixes
        self._num_added = self._num_absorbed = 0
        self._unservable: dict[Sequence, float] = {}  # since this time no worker can run them
        self._ended: list[Ended] = []
        self._left_hits: OrderedDict[str, dict[str, int]] = OrderedDict()  # by request

    # --- workers --------------------------------------------------------------------------------

    def add_worker(
        self,
        worker_id: str,
        capacity: Capacity,
        num_finished: int = 0,
        resources: Collection[Resource] = (),
    ) -> None:
        """Adds a worker that has finished ``num_finished`` steps elsewhere. Its sequences share
        ``resources``."""
        worker = WorkerState(
            worker_id=worker_id,
            capacity=capacity,
            caches_prefixes=self._caches_prefixes,
            holders=self._holders,
            priority_share=self._priority_share,
            stream_rate=self._stream_rate,
            num_finished=num_finished,
            resources=resources,
        )
        self.workers[worker_id] = worker
        if worker.is_proven:
            self.placement.note_proven(worker)
        self._in_need[worker_id] = None
        self._note_capacities()
        for sequence in list(filter(worker.fits, self._unservable)):
            del self._unservable[sequence]

    def remove_worker(
        self, worker_id: str, now_s: float, is_explained: bool = False
    ) -> list[Refusal]:
        """Requeues the worker's sequences; returns refusals for the ones that must not run again.

        If its loss ``is_explained`` otherwise, no sequence counts as the cause, even in an
        unfinished step.
        """
        worker = self.workers.pop(worker_id)
        self._in_need.pop(worker_id, None)
        worker.index.clear()
        self.placement.forget(worker_id)
        self._handover.end(worker_id)
        self._note_capacities()
        computed = worker.computed_slots()
        refusals = []
        for slot, sequence in list(worker.running.items()):
            sequence.allocation = None
            if slot in computed and not is_explained and not sequence.note_worker_death(worker_id):
                text = f"{sequence.num_worker_deaths} workers died while they ran this request"
                refusals.append(self._refusal(sequence, InternalError(text, code=WORKER_DIED)))
            else:
                self.queues.put_back(sequence, WaitReason.WORKER_LOST)
                self.num_requeues += 1
        self.note_fits(now_s)
        self._handover.run()
        return refusals

    def note_fits(self, now_s: float) -> None:
        """Must be called when other sequences fit the workers than before."""
        for sequence in self.queues:
            if any(worker.fits(sequence) for worker in self.workers.values()):
                self._unservable.pop(sequence, None)
            else:
                self._unservable.setdefault(sequence, now_s)

    def forgive(self, worker: str) -> None:
        """A lost worker (an instance) only stood still: no sequence it computed then counts as the
        cause."""
        for sequence in self.sequences.values():
            was_isolated = self.queues.isolated.try_remove(sequence)
            sequence.forgive(worker)
            if was_isolated:
                self.queues.put(sequence)

    def note_state(self, worker_id: str, is_ready: bool) -> None:
        """A worker that is not ready (leaving or hanging) gets no new sequences."""
        worker = self.workers[worker_id]
        worker.admits = is_ready and not worker.is_leaving

    def release_worker(self, worker_id: str) -> None:
        """Hands the sequences of a leaving worker over one at a time; a second call hands over all
        that are left."""
        self._handover.begin(self.workers[worker_id])

    def reset_prefix_cache(self) -> None:
        """New sequences compute their whole prompt. Running ones keep their blocks."""
        for worker in self.workers.values():
            worker.pool.reset_cache()

    def pass_time(self, seconds: float) -> None:
        """For cached prefixes that are kept for a time."""
        for worker in self.workers.values():
            worker.pool.eviction.pass_time(seconds)

    # --- sequences ------------------------------------------------------------------------------

    def add(self, arrival: Arrival) -> None:
        """Puts the sequences of a prompt in the waiting queue, or raises the RequestError that
        refuses them."""
        generate, options = arrival.generate, arrival.options
        self._check(generate, len(arrival.prompt))
        due_s = arrival.now_s + options.priority * self._priority_step_s
        end = 0
        sequences: list[Sequence] = []
        for new in generate.sequences:
            start, end = end, end + new.num_emitted
            sequence = Sequence(
                request=new.request,
                attempt=generate.attempt,
                choice=new.choice,
                route=arrival.route,
                order=(due_s, self._num_added + len(sequences)),
                prompt=arrival.prompt,
                params=_params_of(generate, new),
                emitted=arrival.emitted[start:end].tolist(),
                arrived_s=arrival.now_s,
                options=options,
                option_row=arrival.option_row,
                num_prompt_scored=new.num_prompt_scored,
                spans=arrival.spans,
                hits=self._left_hits.pop(new.request, {}),
            )
            sequences.append(sequence)
        if not any(worker.fits(sequences[0]) for worker in self.workers.values()):
            text = "no worker has both the room and the resources that the request needs"
            raise Unavailable(text, code=NO_WORKER, retry_after_s=RETRY_AFTER_S)
        for check in self.checks:
            check(sequences[0])
        self._num_added += len(sequences)
        for sequence in sequences:
            self.sequences[sequence.key] = sequence
            self.queues.put(sequence)

    def grant(self, grant: Grant) -> None:
        """Raises the credit of a sequence. Ignored for an unknown one."""
        sequence = self.sequences.get((grant.request, grant.attempt))
        if sequence is not None:
            sequence.grant(grant)
            self.queues.resume(sequence)

    def cancel(self, key: tuple[str, int], reason: str = "cancelled") -> None:
        """Forgets the sequence. Its slot and blocks are free once no plan in flight names them."""
        sequence = self.sequences.get(key)
        if sequence is None:
            return
        if sequence.allocation is None:
            self.queues.remove(sequence)
        else:
            self.workers[sequence.allocation.worker_id].remove(sequence)
        self._end(sequence, reason)
        self._handover.run()

    def cancel_route(self, route: int) -> None:
        for key in [key for key, sequence in self.sequences.items() if sequence.route == route]:
            self.cancel(key)

    def fail_unservable(
        self, since_s: float, error_of: Callable[[Sequence], RequestError]
    ) -> list[Refusal]:
        """Ends the sequences that no worker could run since ``since_s`` or earlier."""
        unservable = self._unservable.items()
        abandoned = [each for each, lost_s in unservable if lost_s <= since_s]
        for sequence in abandoned:
            self.queues.remove(sequence)
        refusals = [self._refusal(each, error_of(each)) for each in abandoned]
        self._handover.run()
        return refusals

    def take_ended(self) -> list[Ended]:
        """Returns the sequences that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def unrunnable(self) -> list[Sequence]:
        """Sequences that no connected worker can run."""
        if any(worker.admits for worker in self.workers.values()):
            return list(self._unservable)
        return list(self.queues)

    @property
    def wait_reason(self) -> WaitReason:
        """The reason of the first waiting sequence at the last plan."""
        return self.planner.wait_reason if self.workers else WaitReason.NO_WORKER

    # --- steps ----------------------------------------------------------------------------------

    def plan(self, worker_id: str) -> Planned | None:
        """The next plan of a worker, or None if it needs none or has nothing to do."""
        worker = self.workers[worker_id]
        if not self.planner.is_in_need(worker):
            self._in_need.pop(worker_id, None)
            return None
        builder = self.planner.next_plan(worker, self._num_absorbed)
        if builder is None:
            return None
        for row in builder.plan.prefill:
            worker.blocks.index_blocks(worker.running[row.slot])
        self._count_hits(builder.newcomers)
        worker.send(builder.plan, self._num_absorbed)
        return Planned(builder.plan, builder.ids, builder.newcomers, builder.pixels)

    def absorb(self, worker_id: str, result: StepResult, arrays: TokenArrays) -> list[Emission]:
        """Records the result of the oldest plan in flight, and returns an emission per row, in
        order.

        ``arrays`` are the result's buffers. Ended sequences are forgotten and their blocks freed.
        Raises CodecError for the result of another plan.
        """
        worker = self.workers[worker_id]
        worker.finish(result, self._num_absorbed + 1)
        self._num_absorbed += 1
        self._in_need[worker_id] = None
        if worker.is_proven:
            self.placement.note_proven(worker)
        emissions = apply_result(worker, result, arrays.ids.tolist())
        last = {each.sequence: each for each in emissions}  # the last step's
        for emission in last.values():
            ends = emission.ends
            if ends or emission.has_output:
                worker.blocks.index_blocks(emission.sequence, ends)
            if ends:
                if isinstance(emission.error, InternalError):
                    for resource in worker.resources:
                        resource.distrust(emission.sequence)
                    worker.blocks.uncache(emission.sequence)
                worker.remove(emission.sequence, has_ended=True)
                self._end(emission.sequence, emission.end_reason)
        for resource in worker.resources:
            resource.settle(result.step)
        self._handover.run()
        return emissions

    @property
    def may_change_other_plans(self) -> bool:
        """True if the result of one worker may change the next plans of others: a sequence waits or
        is handed over."""
        return self._handover.is_under_way or self.queues.num_runnable > 0

    @property
    def workers_in_need(self) -> list[str]:
        """Workers that may get another plan. The others have the most plans in flight, and only
        their own results can change that."""
        return list(self._in_need)

    # --- private --------------------------------------------------------------------------------

    def _count_hits(self, newcomers: list[Sequence]) -> None:
        """Preempted sequences that resume are left out: they are no success of the cache."""
        self.num_prefix_queries += sum(len(each.prompt) for each in newcomers)
        self.num_prefix_hits += sum(each.num_cached for each in newcomers)
        for each in newcomers:
            if each.allocated.junction:
                size = self.workers[each.allocated.worker_id].capacity.block_size
                self.num_prefix_cut += each.allocated.junction * size - each.num_cached

    def _refusal(self, sequence: Sequence, error: RequestError) -> Refusal:
        self._end(sequence, error.code)
        return Refusal(sequence, error)

    def _end(self, sequence: Sequence, reason: str) -> None:
        del self.sequences[sequence.key]
        self._unservable.pop(sequence, None)
        self._ended.append(Ended(sequence, reason))
        if sequence.hits:
            self._left_hits[sequence.request] = sequence.hits
            if len(self._left_hits) > MAX_LEFT:
                self._left_hits.popitem(last=False)

    def _note_capacities(self) -> None:
        self.capacities = list(dict.fromkeys(each.capacity for each in self.workers.values()))

    def _check(self, generate: Generate, prompt_len: int) -> None:
        for each in generate.sequences:
            if (each.request, generate.attempt) in self.sequences:
                raise InternalError(f"there is a sequence {each.request} already")
        if not self.workers:
            raise Unavailable("no worker is connected", code=NO_WORKER, retry_after_s=RETRY_AFTER_S)
        self._check_waiting(len(self.queues.waiting) + len(generate.sequences))
        try:
            check_length(self.capacities, prompt_len, generate.params.max_tokens)
        except LacksBlocks as error:
            if generate.attempt == 1:
                raise
            # It may have been accepted before, for a worker that is not connected yet.
            raise Unavailable(error.message, code=NO_WORKER, retry_after_s=RETRY_AFTER_S) from error

    def _check_waiting(self, num_waiting: int) -> None:
        if num_waiting <= self.max_waiting:
            return
        num_free_slots = sum(worker.num_free_slots for worker in self.workers.values())
        if num_waiting > self.max_waiting + num_free_slots:
            raise Overloaded(
                f"{num_waiting} sequences would wait for {num_free_slots} free slots (each choice"
                f" of a request is one); the limit is max-waiting = {self.max_waiting}"
            )


def _params_of(generate: Generate, new: NewSequence) -> SamplingParams:
    if new.choice == 0 or generate.params.prompt_logprobs is None:
        return generate.params
    return msgspec.structs.replace(generate.params, prompt_logprobs=None)
