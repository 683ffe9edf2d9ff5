"""The scheduler's view of one worker: its blocks, its slots, its plans in flight.

**Stages.** The stages of a pipeline compute one plan each at the same time. A plan must not compute
a sequence with a token pending in another of these plans. A decoding sequence is therefore in one
of ``num_stages`` consecutive plans, and each plan has its share of all decoding sequences. Prompts
are not shared out: their chunks may follow each other at once.
"""

from collections import deque
from collections.abc import Collection
from itertools import islice
from math import inf

from services.scheduler.adaptive_depth.draft_depth import AdaptiveDepth
from services.scheduler.allocation import Allocation
from services.scheduler.kv_blocks import KVBlocks
from services.scheduler.later_share.later_share import LaterShare
from services.scheduler.limits import fits
from services.scheduler.plan_builder import DraftDepth, PlanBuilder, StreamShare
from services.scheduler.priority_share import PriorityShare
from services.scheduler.promises.stream_share import PromisedShare
from services.scheduler.resource import Resource
from services.scheduler.sequence import Sequence
from shared.errors import CodecError
from shared.wire.messages import Capacity, PlanRow, StepPlan, StepResult

LOOK_S = 1.0
PROBATION_STEPS = 16  # a broken worker dies within them
LOADED_PART = 7 / 8
"""The part of a block that counts as cached if it has to be loaded. Chosen, not measured."""

DEPTHS: tuple[type[DraftDepth], ...] = (
    AdaptiveDepth,
    DraftDepth,
)
PRIORITY_SHARES: tuple[type[PriorityShare], ...] = (
    LaterShare,
    PriorityShare,
)
STREAM_SHARES: tuple[type[StreamShare], ...] = (
    PromisedShare,
    StreamShare,
)
"""The first one of each is used."""


class WorkerState:
    """Allocates blocks and slots of one worker. A freed slot is released by its next plan.

    ``in_flight`` holds the plans without results, oldest first. The oldest has been first since
    ``in_flight_since`` results of all workers. An allocation is ``leaving`` from the removal of its
    sequence until the last plan that names it has run. ``admits``: the worker takes new sequences.
    ``is_leaving``: its sequences go to other workers, one after the other, or all at once if it
    ``releases_all``; ``handed_over`` is the last one. ``ran_isolated``: its last plan computed one
    isolated sequence and nothing else. Its next plan looks at the head of the waiting queue and at
    the sequences from place ``next_look`` on. ``step_s`` is the time of a step in the last plan
    with rows and without later sequences. Its sequences share ``resources``, and ``may_await``
    images or blocks.
    """

    def __init__(
        self,
        worker_id: str,
        capacity: Capacity,
        caches_prefixes: bool,
        holders: dict[bytes, str],
        priority_share: float,
        stream_rate: float,
        num_finished: int = 0,
        resources: Collection[Resource] = (),
    ) -> None:
        self.worker_id = worker_id
        self.capacity = capacity
        self.resources = [*resources]
        self.may_await = bool(capacity.all_media)
        self.blocks = KVBlocks(worker_id, capacity, caches_prefixes, holders)
        self.index, self.pool = self.blocks.index, self.blocks.pool
        self.running: dict[int, Sequence] = {}
        self.in_flight: deque[StepPlan] = deque()
        self.in_flight_since = 0
        self.leaving: list[Allocation] = []
        self.admits = True
        self.is_leaving = self.releases_all = False
        self.handed_over: Sequence | None = None
        self.next_look = 0
        self.ran_isolated = False
        self.step_s = inf
        self.draft_depth = DEPTHS[0](capacity)
        self.priority_share = PRIORITY_SHARES[0](priority_share, capacity.max_num_batched_tokens)
        self.stream_share = STREAM_SHARES[0](stream_rate, capacity)
        self._verify_depth = 0  # most drafts of a sequence after the last plan
        self._free_slots = list(range(capacity.max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._num_steps = 0
        self._num_finished = num_finished  # steps, including ones in other cells

    @property
    def is_proven(self) -> bool:
        """True once it has finished ``PROBATION_STEPS`` steps."""
        return self._num_finished >= PROBATION_STEPS

    @property
    def num_free_slots(self) -> int:
        return self.capacity.max_num_seqs - len(self.running) - len(self.leaving)

    @property
    def paused(self) -> list[Sequence]:
        """Its sequences without credit."""
        return [each for each in self.running.values() if not each.has_credit]

    @property
    def may_hand_over(self) -> bool:
        return self.is_leaving and bool(self.running) and not self.in_flight

    @property
    def oldest(self) -> Sequence:
        """The first of its running sequences by order."""
        return min(self.running.values(), key=_order)

    def begin_plan(self) -> PlanBuilder:
        self._free_slots.extend(self._released)
        release, self._released = self._released, []
        rows: list[PlanRow] = [each for each in self.blocks.rows if each.slot not in release]
        self.blocks.rows = []
        self._num_steps += 1
        for resource in self.resources:
            rows += resource.rows(self._num_steps)
        return PlanBuilder(
            step=self._num_steps,
            capacity=self.capacity,
            spare=max((each.spare for each in self.resources), default=0),
            release=release,
            rows=rows,
            verify_depth=self._verify_depth,
            draft_depth=self.draft_depth.now,
        )

    def send(self, plan: StepPlan, num_absorbed: int) -> None:
        """Notes that ``plan`` is in flight. ``num_absorbed`` counts the results of all workers."""
        if not self.in_flight:
            self.in_flight_since = num_absorbed
        self.in_flight.append(plan)
        self._verify_depth = plan.draft_depth
        ends = [self.running[row.slot].num_computed for row in plan.prefill]
        pairs = (
            row.num_tokens * (end - row.num_tokens // 2)
            for row, end in zip(plan.prefill, ends, strict=True)
        )
        self.stream_share.send(plan, sum(pairs))

    def finish(self, result: StepResult, num_absorbed: int) -> None:
        """Takes the oldest plan out of flight. Raises CodecError if ``result`` is of another plan,
        since the results of plans before it are then lost."""
        step = result.step
        if not self.in_flight or step != self.in_flight[0].step:
            expected = f"that of step {self.in_flight[0].step}" if self.in_flight else "none"
            raise CodecError(f"the result of step {step} came where {expected} was due")
        for resource in self.resources:
            resource.finish(step)
        plan = self.in_flight.popleft()
        if result.rows and not self.priority_share.has_joined(plan):
            self.step_s = result.step_s / result.num_steps
        if plan.prefill or plan.decode:
            self._num_finished += result.num_steps
        self.draft_depth.note(plan, result)
        self.priority_share.note(plan, result)
        self.stream_share.note(plan, result)
        self.in_flight_since = num_absorbed
        done = [each for each in self.leaving if each.last_step <= step]
        self.leaving = [each for each in self.leaving if each.last_step > step]
        for each in done:
            self._free(each)

    def computed_slots(self) -> set[int]:
        """Returns the slots that the worker computes: with plans in flight, or an image."""
        chunks = {row.slot for plan in self.in_flight for row in plan.prefill}
        encoding = (each for each in self.awaiting if each.spans or not each.allocated.is_held)
        encoded = {each.allocated.slot for each in encoding}
        return encoded | chunks | {row.slot for plan in self.in_flight for row in plan.decode}

    @property
    def awaiting(self) -> list[Sequence]:
        """Its sequences that await an image or blocks."""
        if not self.may_await:
            return []
        return [each for each in self.running.values() if each.awaits_data]

    def runnable(self) -> list[Sequence]:
        """Returns the sequences that may be computed together, oldest first."""
        found = sorted(filter(self._may_run, self.running.values()), key=_order)
        if self.capacity.num_stages == 1:
            return found
        return self._share_of(found)

    @property
    def is_short_of_blocks(self) -> bool:
        """True if there are too few blocks to compute all runnable sequences."""
        # A plan reserves for all ids it may sample and for the drafts of the next one.
        size, num_drafts = self.capacity.block_size, self.capacity.num_speculative_tokens
        most = len(self.running) * (2 + (1 + 3 * num_drafts) // size)
        if self.pool.num_free >= most and not self.blocks.has_windows:
            return False
        wanted = map(self.num_blocks_lacking, filter(self._may_run, self.running.values()))
        return sum(wanted) > self.pool.num_free

    def fits(self, sequence: Sequence) -> bool:
        """True if the worker could run ``sequence`` to its end, alone."""
        if self.resources and self.unfit(sequence) is not None:
            return False
        kinds = self.capacity.all_media
        if any(span.item.kind not in kinds for span in sequence.spans):
            return False
        return fits(self.capacity, len(sequence.prompt), sequence.params.max_tokens)

    def unfit(self, sequence: Sequence) -> Resource | None:
        """Returns a resource that never suffices for ``sequence`` here."""
        return next((each for each in self.resources if not each.fits(sequence)), None)

    def lacking(self, sequence: Sequence) -> Resource | None:
        """Returns a resource that ``sequence`` has to wait for."""
        for each in self.resources:
            if not each.has_room_for(sequence) or each.is_kept_from(sequence):
                return each
        return None

    def has_room_for(self, sequence: Sequence) -> bool:
        """True if there are a slot, blocks and resources for ``sequence`` now."""
        if self.num_free_slots == 0:
            return False
        if self.resources and not all(each.has_room_for(sequence) for each in self.resources):
            return False
        return self.blocks.has_room_for(sequence, self._num_places(sequence), self.end_of(sequence))

    def has_room_without(self, others: Collection[Sequence], sequence: Sequence) -> bool:
        """True if there would be blocks and resources for ``sequence`` without ``others``."""
        if not all(each.has_room_for(sequence, others) for each in self.resources):
            return False
        num_places, end = self._num_places(sequence), self.end_of(sequence)
        return self.blocks.has_room_without(others, sequence, num_places, end)

    def num_blocks_lacking(self, sequence: Sequence, num_steps: int = 1) -> int:
        """Counts the blocks that a running sequence lacks for ``num_steps``."""
        num_places = self._num_places(sequence, num_steps)
        if num_places <= sequence.allocated.num_places:
            return 0
        return self.blocks.num_lacking(sequence, num_places, self.end_of(sequence))

    def is_known_miss(self, sequence: Sequence, num_tokens: int) -> bool:
        """True if the block that ``has_cached`` last missed is missing, also in stores."""
        number = sequence.missing_blocks.get(self.worker_id, 0)
        if number * self.capacity.block_size >= num_tokens:
            return False
        is_loadable = any(each.num_loadable(sequence, number) for each in self.resources)
        return not is_loadable and self.blocks.is_missing(sequence, number)

    def has_cached(self, sequence: Sequence, num_tokens: int) -> bool:
        """True if the prefix cache has the KV of its first ``num_tokens`` ids."""
        if num_tokens <= 0 or self.is_known_miss(sequence, num_tokens):
            return num_tokens <= 0
        num_blocks = sum(self._find_blocks(sequence))
        sequence.missing_blocks[self.worker_id] = num_blocks
        return num_blocks * self.capacity.block_size >= num_tokens

    def num_cached(self, sequence: Sequence) -> int:
        """Counts the ids of ``sequence`` with KV in the prefix cache; ids to load count in part."""
        num_blocks, num_loadable = self._find_blocks(sequence)
        return int((num_blocks + LOADED_PART * num_loadable) * self.capacity.block_size)

    def _find_blocks(self, sequence: Sequence) -> tuple[int, int]:
        """Counts the blocks in the prefix cache, and the blocks behind them to load."""
        num = self.blocks.find_hit(sequence).num_blocks
        return num, sum(each.num_loadable(sequence, num) for each in self.resources)

    def filling_blocks(self, plan: StepPlan) -> list[Sequence]:
        """Returns the sequences with a chunk in ``plan`` that fills a block of the prefix cache, or
        that await data and will fill one."""
        chunks = [self.running[row.slot] for row in plan.prefill]
        return [*self.awaiting, *(each for each in chunks if self.blocks.num_to_index(each) > 0)]

    def try_extend(self, sequence: Sequence, num_steps: int = 1) -> list[list[int]] | None:
        """Gives a running sequence the blocks it lacks for ``num_steps``. Returns them for each
        group of layers, nothing if it lacks none, or None if too few are free."""
        num_places = self._num_places(sequence, num_steps)
        if num_places <= sequence.allocated.num_places:
            return []
        return self.blocks.try_extend(sequence, num_places, self.end_of(sequence))

    def allocate(self, sequence: Sequence) -> None:
        """Gives ``sequence`` a slot and blocks, cached ones first. There must be room for it."""
        slot = self._free_slots.pop()
        self.blocks.allocate(sequence, self.worker_id, slot)
        extended = self.try_extend(sequence)
        assert extended is not None
        for each in self.resources:
            each.take(sequence)
        for each in self.resources:
            each.begin(sequence)
        sequence.last_worker_id = self.worker_id
        self.stream_share.note_admission(sequence)
        self.running[slot] = sequence

    def remove(self, sequence: Sequence, has_ended: bool = False) -> None:
        """Frees slot and blocks once no plan in flight names them. The results of those plans are
        dropped; recomputation has the same outcome. A sequence ``has_ended`` on the worker too."""
        self.blocks.leave(sequence, has_ended)
        allocation, sequence.allocation = sequence.allocated, None
        del self.running[allocation.slot]
        if self.in_flight and allocation.last_step >= self.in_flight[0].step:
            self.leaving.append(allocation)
        else:
            self._free(allocation)

    def _free(self, allocation: Allocation) -> None:
        self._released.append(allocation.slot)
        self.blocks.free(allocation)
        for each in self.resources:
            each.free(allocation.slot)

    def _num_places(self, sequence: Sequence, num_steps: int = 1) -> int:
        """Counts the ids whose KV needs a place: ids sampled by plans in flight and by all but the
        last step of the next plan, and the drafts this step verifies and makes."""
        num_ahead = self._verify_depth + self.draft_depth.now
        return sequence.num_expected + (num_steps - 1) * (1 + self._verify_depth) + num_ahead

    def end_of(self, sequence: Sequence) -> int:
        """Returns the number of ids of ``sequence`` when it is full."""
        limit, max_tokens = self.capacity.max_model_len, sequence.params.max_tokens
        return limit if max_tokens is None else min(limit, len(sequence.prompt) + max_tokens)

    def num_steps_left(self, sequence: Sequence) -> int:
        """Counts the steps until a running sequence is full, beyond the plans in flight, at one
        token per step."""
        return self.end_of(sequence) - sequence.num_known - sequence.allocated.num_due

    def _may_run(self, sequence: Sequence) -> bool:
        """True if ``sequence`` may be computed with others: it has credit, is not isolated, awaits
        no data, is not certain to get its last token from plans in flight, and has no token
        pending in other stages."""
        if sequence.is_isolated or not sequence.has_credit:
            return False
        if sequence.allocated.is_held or (sequence.spans and sequence.awaits_data):
            return False
        num_due = sequence.allocated.num_due
        if not num_due:
            return True
        if self._is_in_other_stages(sequence.allocated):
            return False
        is_full = sequence.num_known + num_due >= self.capacity.max_model_len
        return sequence.may_emit_more and not is_full

    def _is_in_other_stages(self, allocation: Allocation) -> bool:
        """True if a token of the sequence is pending in one of the last plans in flight, which
        other stages would compute at the same time as the next plan."""
        if self.capacity.num_stages == 1:
            return False
        beside = list(islice(reversed(self.in_flight), self.capacity.num_stages - 1))
        return bool(beside) and allocation.last_step >= beside[-1].step

    def _share_of(self, runnable: list[Sequence]) -> list[Sequence]:
        """Returns the sequences of ``runnable`` for the next of several stages, in their order. The
        share of the decoding ones among all running is taken by earlier priority, then by the
        longest time since their last plan."""
        running = self.running.values()
        num_decoding = sum(_decodes(each) and each.has_credit for each in running)
        decoding = sorted(
            filter(_decodes, runnable),
            key=lambda each: (each.options.priority, each.allocated.last_step),
        )
        late = set(decoding[-(-num_decoding // self.capacity.num_stages) :])
        return [each for each in runnable if each not in late]


class Watchdog:
    """Detects workers with overdue results. It counts its own looks, one every ``LOOK_S``, instead
    of the time: while the scheduler itself stood still, unread results may have arrived."""

    def __init__(self, workers: dict[str, WorkerState]) -> None:
        self._workers = workers
        self._found: dict[str, tuple[int, int]] = {}  # oldest step, looks at it

    def look(self) -> list[str]:
        """Returns the workers that owe the result of their oldest plan for twice their
        ``stall_s``."""
        oldest = {
            worker_id: worker.in_flight[0].step
            for worker_id, worker in self._workers.items()
            if worker.in_flight
        }
        self._found = {key: self._count(key, step) for key, step in oldest.items()}
        return [
            key
            for key, (_, num_looks) in self._found.items()
            if num_looks * LOOK_S >= 2 * self._workers[key].capacity.stall_s
        ]

    def _count(self, worker_id: str, step: int) -> tuple[int, int]:
        before, num_looks = self._found.get(worker_id, (0, 0))
        return step, num_looks + 1 if step == before else 0


def _decodes(sequence: Sequence) -> bool:
    return sequence.allocated.may_have_drafts


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
