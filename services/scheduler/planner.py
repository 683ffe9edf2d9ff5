"""Plans a worker's next step. Pure.

There are no phases. A sequence has known ids and ids with computed KV; a step computes some of the
difference. Chunked prefill, decoding, and recovery after preemption or a worker's death are all
this one case. Decoding sequences come first, then prompts in order, long ones last
(``prefills.py``), up to the worker's token budget. If blocks run out, a sequence is preempted and
waits again with all its output.

**Credit.** Sequences without credit are not computed, and are preempted first if another needs
their slot or blocks.

**Owners.** Sequences of several API keys are admitted in turn (``FairOrder``).

**Priority.** If the first waiting sequence has no room on any worker, running sequences of a later
priority after it in the order are preempted for it (``preemption.py``). Next to an earlier sequence
in the batch, later ones run in a share of the time (``priority_share.py``) and keep their slots and
blocks meanwhile.

**Resources.** A sequence that lacks a resource other than slots and blocks is passed over; the
resource bounds its wait (``resource.py``).

**Promises.** Prompts join decoding sequences as far as the promised time per token allows
(``StreamShare``).

**Several steps.** A decode-only plan has several steps if a step is shorter than the planning. All
tokens of a plan arrive at once, and a new prompt waits for the plans in flight, so the steps of a
plan last at most ``PLAN_S`` together. A plan has one step if another sequence waits for its end;
lower-priority sequences shorten it only if their share has them join it. Credit, lengths and free
blocks of the sequences bound the number of steps.

**Speculation.** A step verifies the drafts made by the step before, so a sequence gets at least one
id per step and at most one more than it has drafts. Blocks are reserved for the maximum; the result
corrects the expectation.

**Running ahead.** A plan may be made before the result of the last one arrives. A sampled sequence
is then expected to have at least one more id per step, not yet known. If it ends instead, the
worker skips it. While plans are in flight, no sequence with credit is preempted or handed over, and
no isolated sequence is computed: all sequences of these plans must have run first.

**Isolation.** Isolated sequences are computed alone, in turn with all others.

**Prefixes.** An admitted sequence begins after the ids with KV in its worker's prefix cache.
"""

from collections.abc import Iterable, Iterator
from functools import partial

from services.scheduler.placement import Placement
from services.scheduler.plan_builder import PlanBuilder, Room
from services.scheduler.preemption import Preemption
from services.scheduler.prefills import PrefillLimits, Prefills
from services.scheduler.priority_share import PriorityGroups
from services.scheduler.queues import NUM_LOOKED_AT, Queues, WaitingQueue
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.worker_state import WorkerState
from shared.wire.messages import MAX_STEPS

PLAN_S = 0.01


class Planner:
    """Makes plans for workers, and moves sequences between them and ``queues``.

    Up to ``pipeline_depth`` plans of a worker are in flight. ``wait_reason`` is that of the first
    sequence left waiting by the last plan.
    """

    def __init__(
        self,
        queues: Queues,
        placement: Placement,
        pipeline_depth: int,
        prefill_limits: PrefillLimits,
    ) -> None:
        self.num_admitted = self.num_tries = 0
        self.wait_reason = WaitReason.PLANS_IN_FLIGHT
        self._queues = queues
        self._placement = placement
        self._pipeline_depth = pipeline_depth
        self._prefill_limits = prefill_limits
        self.preemption = Preemption(queues, placement, prefill_limits)

    def next_plan(self, worker: WorkerState, num_absorbed: int) -> PlanBuilder | None:
        """Returns None if the worker may not run ahead or has nothing to do.

        ``num_absorbed`` counts the results of all workers.
        """
        if worker.in_flight and not self._may_run_ahead(worker, num_absorbed):
            return None
        builder = self._plan_in_turn(worker, num_absorbed)
        return None if builder.is_empty else builder

    def _may_run_ahead(self, worker: WorkerState, num_absorbed: int) -> bool:
        return (
            not worker.is_leaving
            and self._first_isolated(worker) is None
            and not worker.is_short_of_blocks
            and self.preemption.inferior(worker, num_absorbed) is None
        )

    def is_in_need(self, worker: WorkerState) -> bool:
        """True if the worker should get another plan; only its own results change the answer.

        A pipeline of stages gets one more plan in flight per further stage. No plan follows a step
        with prompts if all sequences are of later priorities, so that a new request waits for one
        step only.
        """
        has_prefill = any(plan.prefill for plan in worker.in_flight)
        if has_prefill and _are_later(worker.running.values()):
            return False
        depth = self._pipeline_depth + worker.capacity.num_stages - 1
        return len(worker.in_flight) < depth

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
                return None if sequence.awaits_data else sequence
        return self._first_for(worker, self._queues.isolated)

    def _first_for(self, worker: WorkerState, queue: WaitingQueue) -> Sequence | None:
        if not worker.admits or self._placement.is_held_back(worker):
            return None
        return queue.first_where(partial(self._placement.may_run_on, worker))

    def _plan_batch(self, worker: WorkerState, num_absorbed: int) -> PlanBuilder:
        """Computes all sequences that are not isolated, and admits more unless blocks are short."""
        num_preemptions = self.preemption.num
        extensions = self._reserve(worker)
        is_short_of_blocks = self.preemption.num > num_preemptions
        if not is_short_of_blocks and (first := self._first_for(worker, self._queues.waiting)):
            self.preemption.make_room(worker, first, num_absorbed)
        builder = worker.begin_plan()
        running = []
        for sequence, blocks in extensions:
            if sequence.allocation is None:
                continue  # preempted
            builder.extend(sequence, blocks)
            running.append(sequence)
        groups = PriorityGroups(running, self._queues.waiting)
        share = worker.priority_share
        if share.expects_first and running and not groups.has_later and _are_later(running):
            builder.limit(len(running) + share.max_tokens)
        wait_reason = WaitReason.KV_BLOCKS if is_short_of_blocks else None
        self.wait_reason = self._compute(worker, builder, groups, num_absorbed, wait_reason)
        if groups.has_later:
            self._compute_later(worker, builder, groups, num_absorbed)
        return builder

    def _compute(
        self,
        worker: WorkerState,
        builder: PlanBuilder,
        groups: PriorityGroups,
        num_absorbed: int,
        wait_reason: WaitReason | None,
    ) -> WaitReason:
        """Computes the first sequences, or the later ones once ``groups`` is past, and admits more
        unless there is a ``wait_reason``. Returns the reason of the first sequence left waiting."""
        prompts: list[Sequence] = []
        decoding: list[Sequence] = []
        for sequence in groups.later if groups.is_past else groups.first:
            (prompts if sequence.num_to_compute > 1 else decoding).append(sequence)
        builder.share_budget(len(decoding))
        room = self._room_for_prompts(worker, groups, decoding, prompts)
        if room.num_steps:
            _lengthen(worker, builder, decoding, room.num_steps)
        elif not prompts and self._may_be_long(worker, groups, len(decoding)):
            _lengthen(worker, builder, decoding)
        for sequence in decoding:
            builder.compute(sequence, builder.budget)
        if room.num_steps:
            for sequence in prompts:
                sequence.num_held_back += builder.plan.num_steps
            return wait_reason or WaitReason.PROMISE
        num_spared = builder.limit(room.num_tokens + room.num_kept)
        num_kept = builder.limit(room.num_tokens)
        prefills = Prefills(self._prefill_limits, worker, builder)
        prefills.add(prompts)
        builder.budget += num_kept
        if wait_reason is None:
            wait_reason = self._admit(worker, builder, prefills, groups, num_absorbed)
        prefills.finish()
        builder.budget += num_spared
        return wait_reason

    def _room_for_prompts(
        self,
        worker: WorkerState,
        groups: PriorityGroups,
        decoding: list[Sequence],
        prompts: list[Sequence],
    ) -> Room:
        if groups.is_past or worker.capacity.num_stages > 1:
            return Room()  # theirs is a share; a token passes several steps
        num_next = self._num_next(worker, groups, prompts)
        num_wanted = num_next + sum(each.num_to_compute for each in prompts)
        num_keys = prompts[0].num_computed if prompts else 0
        return worker.stream_share.room(decoding, num_wanted, num_keys, num_next)

    def _num_next(
        self, worker: WorkerState, groups: PriorityGroups, prompts: list[Sequence]
    ) -> int:
        """Counts the tokens to compute of the next sequence in turn; 0 if it may not be admitted,
        or shares the blocks of one of ``prompts``."""
        first = next(self._in_turn(worker, groups), None) if worker.num_free_slots else None
        if first is None or first.prompt_key in {each.prompt_key for each in prompts}:
            return 0
        if not (self._placement.may_run_on(worker, first) and worker.has_room_for(first)):
            return 0
        num_tokens, most = first.num_to_compute, self._prefill_limits.threshold(worker)
        is_miss = worker.is_known_miss(first, num_tokens - most)
        return num_tokens if is_miss else num_tokens - worker.num_cached(first)

    def _in_turn(self, worker: WorkerState, groups: PriorityGroups) -> Iterator[Sequence]:
        """The waiting sequences that yield to none of ``groups``, as admission looks at them."""
        return self._queues.waiting.each_in_turn(
            lambda each: not groups.leads(each), worker.next_look, worker.running.values()
        )

    def _may_be_long(self, worker: WorkerState, groups: PriorityGroups, num_decoding: int) -> bool:
        """True if a plan of several steps delays no sequence but later ones that would not join it,
        for lack of room or by their share."""
        waiting = self._queues.waiting
        if groups.is_past or self._queues.isolated:
            return False
        if next(self._in_turn(worker, groups), None) is not None:
            return False  # a plan of several steps admits none
        first = waiting.first_where(lambda _: True)
        could_join = groups.has_later or (first is not None and worker.has_room_for(first))
        return not could_join or not worker.priority_share.may_join(num_decoding)

    def _compute_later(
        self, worker: WorkerState, builder: PlanBuilder, groups: PriorityGroups, num_absorbed: int
    ) -> None:
        """Computes the later sequences too if the plan has no first ones or their share allows
        it."""
        plan, share = builder.plan, worker.priority_share
        is_beside_first = bool(plan.prefill or plan.decode)
        if is_beside_first:
            if not share.join(plan, worker.stream_share.spare):
                for sequence in groups.later:
                    sequence.num_held_back += plan.num_steps
                return
            builder.limit(share.max_tokens)
        first_reason, groups.is_past = self.wait_reason, True
        no_room = first_reason in (WaitReason.SLOTS, WaitReason.KV_BLOCKS)
        wait_reason = self._compute(
            worker, builder, groups, num_absorbed, first_reason if no_room else None
        )
        if first_reason == WaitReason.LATER_PRIORITY:
            is_share = is_beside_first and wait_reason == WaitReason.STEP_BUDGET
            self.wait_reason = WaitReason.LATER_PRIORITY if is_share else wait_reason

    def _plan_isolated(self, worker: WorkerState, isolated: Sequence) -> PlanBuilder:
        """Computes one isolated sequence alone; others are preempted until it has room."""
        self.wait_reason = WaitReason.ISOLATED
        if isolated.allocation is None:
            while not worker.has_room_for(isolated):
                self.preemption.preempt(worker, WaitReason.ISOLATED)
            builder = worker.begin_plan()
            self._queues.isolated.try_remove(isolated)
            worker.allocate(isolated)
            builder.admit(isolated)
        else:
            while (blocks := worker.try_extend(isolated)) is None:
                self.preemption.preempt(worker, WaitReason.ISOLATED, spared=isolated)
            builder = worker.begin_plan()
            builder.extend(isolated, blocks)
        builder.compute(isolated, builder.budget)
        return builder

    def _reserve(self, worker: WorkerState) -> list[tuple[Sequence, list[list[int]]]]:
        """Returns the sequences to compute with their new blocks. If blocks are short, the youngest
        are preempted."""
        extensions = []
        for sequence in worker.runnable():
            while sequence.allocation is not None:
                blocks = worker.try_extend(sequence)
                if blocks is not None:
                    extensions.append((sequence, blocks))
                    break
                self.preemption.preempt(worker)
        return extensions

    def _admit(
        self,
        worker: WorkerState,
        builder: PlanBuilder,
        prefills: Prefills,
        groups: PriorityGroups,
        num_absorbed: int,
    ) -> WaitReason:
        """Admits waiting sequences in order, as far as slots, blocks and the budget go: first ones,
        or later ones once ``groups`` is past. Returns the reason of the first sequence left
        waiting.

        If this plan fills blocks of a prompt, or it awaits data, further choices of the prompt are
        skipped: a later plan finds the blocks in the prefix cache. After a plan that
        skipped every sequence it looked at, the next plan also looks at the ones after them.
        """
        waiting = self._queues.waiting
        if not waiting:
            return WaitReason.PLANS_IN_FLIGHT
        if self._placement.is_held_back(worker):
            return WaitReason.PROBATION
        filling_blocks = [*worker.filling_blocks(builder.plan), *prefills.longs]
        prompts = {each.prompt_key for each in filling_blocks}
        self.num_tries += 1
        admissible = waiting.each_in_turn(
            lambda each: not self._passes_over(worker, prefills, prompts, groups, each),
            worker.next_look,
            worker.running.values(),
        )
        next_look, worker.next_look = max(worker.next_look, NUM_LOOKED_AT) + NUM_LOOKED_AT, 0
        while worker.admits and not prefills.is_full:
            first = next(admissible, None)
            if first is None:
                worker.next_look = next_look if next_look < len(waiting) else 0
                passed_over = waiting.first_where(lambda each: each.wait_reason is not None)
                return (passed_over and passed_over.wait_reason) or WaitReason.PLANS_IN_FLIGHT
            if not prefills.has_room_for(first):
                return WaitReason.PARTIAL_PREFILLS
            if not worker.has_room_for(first):
                return WaitReason.KV_BLOCKS if worker.num_free_slots > 0 else WaitReason.SLOTS
            if not self._placement.is_best(worker, first, len(waiting), num_absorbed):
                return WaitReason.PLACEMENT
            waiting.admit(first)
            worker.allocate(first)
            prefills.admit(first)
            groups.admit(first)
            self.num_admitted += 1
            fills_blocks = worker.blocks.num_to_index(first) > 0 or first.awaits_data
            if fills_blocks or first in prefills.longs:
                prompts.add(first.prompt_key)
        return WaitReason.STEP_BUDGET if worker.admits else WaitReason.NO_WORKER

    def _passes_over(
        self,
        worker: WorkerState,
        prefills: Prefills,
        prompts: set[tuple[str, int]],
        groups: PriorityGroups,
        sequence: Sequence,
    ) -> bool:
        """True if others may be admitted before ``sequence``, which gets the reason."""
        is_later = groups.leads(sequence)
        if is_later != groups.is_past:
            if not is_later:
                return True  # its reason is noted
            groups.has_later = True
            wait_reason = WaitReason.LATER_PRIORITY
        elif prompts and sequence.prompt_key in prompts:
            wait_reason = WaitReason.PREFIX
        elif not self._placement.may_run_on(worker, sequence):
            unfit = worker.unfit(sequence)
            wait_reason = WaitReason.PROBATION if unfit is None else unfit.reason
        elif not prefills.may_admit(sequence):
            wait_reason = WaitReason.LONG_PREFILLS
        elif worker.resources and (lacking := worker.lacking(sequence)) is not None:
            lacking.pass_over(sequence)
            wait_reason = lacking.reason
        else:
            return False
        sequence.wait_reason = wait_reason
        sequence.num_passed_over += 1
        return True


def _are_later(sequences: Iterable[Sequence]) -> bool:
    """True if all are of a later priority than 0, the default of clients."""
    return all(each.options.priority > 0 for each in sequences)


def _lengthen(
    worker: WorkerState, builder: PlanBuilder, decoding: list[Sequence], most: int = MAX_STEPS
) -> None:
    """Gives an empty plan several steps, at most ``most``, and ``decoding``, the only sequences it
    computes, the blocks for them."""
    num_wanted = min(most, _num_wanted(worker, builder, decoding))
    num_steps = _num_with_blocks(worker, decoding, num_wanted)
    if num_steps == 1:
        return
    builder.ask_for(num_steps)
    for sequence in decoding:
        blocks = worker.try_extend(sequence, num_steps)
        assert blocks is not None
        builder.extend(sequence, blocks)


def _num_wanted(worker: WorkerState, builder: PlanBuilder, decoding: list[Sequence]) -> int:
    """Each step verifies the drafts of the step before, so both depths must be equal."""
    longest = min(worker.capacity.max_num_steps, worker.draft_depth.max_num_steps)
    is_steady = builder.verify_depth == builder.plan.draft_depth
    if longest == 1 or not decoding or not worker.is_proven or not is_steady:
        return 1
    if not all(each.allocated.may_have_drafts for each in decoding):
        return 1
    depth, vocab_size = builder.verify_depth, worker.capacity.vocab_size
    limits = [each.max_steps(depth, vocab_size) for each in decoding]
    limits += [worker.num_steps_left(each) for each in decoding]
    if longest * worker.step_s > PLAN_S:
        limits.append(int(PLAN_S / worker.step_s))
    return max(1, min(longest, *limits))


def _num_with_blocks(worker: WorkerState, decoding: list[Sequence], num_wanted: int) -> int:
    """Lowers ``num_wanted`` to the number of steps with enough free blocks."""
    for num_steps in range(num_wanted, 1, -1):
        num_lacking = sum(worker.num_blocks_lacking(each, num_steps) for each in decoding)
        if num_lacking <= worker.pool.num_free:
            return num_steps
    return 1
