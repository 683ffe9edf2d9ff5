"""Collects the rows of one StepPlan; the depth of its drafts, and the room for prompts."""

from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from services.scheduler.sequence import Sequence
from shared.wire.faults import list_bytes
from shared.wire.kv_groups import COPY_INTERVAL
from shared.wire.messages import (
    MAX_BATCHED_TOKENS,
    MAX_STEPS,
    Admit,
    Capacity,
    Decode,
    Extend,
    Item,
    PlanRow,
    Prefill,
    StepPlan,
    StepResult,
)

# A plan is a header of at most 4 MiB, mostly lists of blocks and ids.
MAX_ADMIT_BYTES = 2 << 20
MAX_ARRAY_BYTES = 16 << 20  # of ids, of which each choice of a prompt has a copy, and pixels
MAX_ITEM_BYTES = 64  # in the header


class DraftDepth:
    """The fixed depth ``now`` of the next plan, which has at most ``max_num_steps`` steps."""

    def __init__(self, capacity: Capacity) -> None:
        self.now = capacity.num_speculative_tokens
        self.max_num_steps = MAX_STEPS

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from ``result``, the result of ``plan``."""


@dataclass(frozen=True, slots=True)
class Room:
    """Prompts may have ``num_tokens`` of the next step, the ones to be admitted ``num_kept`` more.
    Without either the streams first decode alone for ``num_steps``."""

    num_tokens: int = MAX_BATCHED_TOKENS
    num_kept: int = 0
    num_steps: int = 0


class StreamShare:
    """The share of prompts in steps with decoding sequences (streams) of one worker: all. The least
    ``rate`` of a stream is relative to its rate without prompts."""

    last_ratio = 0.0  # of the last plan's time to its prediction; 0: it had none
    spare = 1.0  # of the time, after that which the streams of the last room are promised

    def __init__(self, rate: float, capacity: Capacity) -> None: ...

    def alone_s(self, num_tokens: float, num_keys: int) -> float:
        """Returns the time in which an idle worker computes ``num_tokens`` of prompts, of
        ``num_keys`` each; 0 if unknown."""
        return 0.0

    def decode_s(self, num_rows: int) -> float:
        """The time of a step of about ``num_rows`` decoding rows; 0 if unknown."""
        return 0.0

    def room(self, streams: list[Sequence], num_wanted: int, num_keys: int, num_next: int) -> Room:
        """Returns the room beside ``streams`` for prompts that want ``num_wanted`` tokens, the
        first of them after ``num_keys`` computed ones; ``num_next`` of them for the next prompt to
        be admitted, 0 without one. Must be called for each plan."""
        return Room()

    def note_admission(self, sequence: Sequence) -> None:
        """``sequence`` gets a slot."""

    def send(self, plan: StepPlan, num_pairs: int) -> None:
        """Accounts for ``plan``, whose prompts see ``num_pairs`` of token and key."""

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from ``result``, the result of ``plan``."""


def room_for_drafts(budget: int, num_decoding: int) -> int:
    """Returns the most drafts that each of ``num_decoding`` sequences may verify. Half of the
    budget left after their own tokens is kept for prompts."""
    return max(0, (budget - num_decoding) // (2 * num_decoding))


class PlanBuilder:
    """Collects the rows of a plan and counts the rest of the token budget.

    Each decoding sequence verifies up to ``verify_depth`` drafts in each step. Prompts with a state
    are cut at copies of it. The budget leaves ``spare`` tokens to items that must be whole.
    """

    def __init__(
        self,
        step: int,
        capacity: Capacity,
        spare: int,
        release: list[int],
        rows: list[PlanRow],
        verify_depth: int,
        draft_depth: int,
    ) -> None:
        self.budget, self._spare = capacity.max_num_batched_tokens - spare, spare
        self.verify_depth = verify_depth
        self._null_block, self._vocab_size = capacity.num_blocks, capacity.vocab_size
        self._chunk_multiple = 1 if capacity.num_states is None else COPY_INTERVAL
        self.plan = StepPlan(
            step=step,
            release=release,
            admit=[],
            extend=[],
            prefill=[],
            decode=[],
            draft_depth=draft_depth,
            rows=rows,
        )
        self.newcomers: list[Sequence] = []
        self._known: list[np.ndarray] = []
        self._pixels: dict[bytes, np.ndarray] = {}  # by digest
        self._num_admit_bytes = self._num_array_bytes = 0

    @property
    def is_empty(self) -> bool:
        plan = self.plan
        return not (
            plan.release or plan.rows or plan.admit or plan.extend or plan.prefill or plan.decode
        )

    @property
    def is_full(self) -> bool:
        num_bytes, num_array_bytes = self._num_admit_bytes, self._num_array_bytes
        is_large = num_bytes > MAX_ADMIT_BYTES or num_array_bytes > MAX_ARRAY_BYTES
        return self.budget == 0 or is_large

    @property
    def ids(self) -> np.ndarray:
        """Known ids of the admitted sequences, concatenated: [sum of num_ids] int32."""
        return np.concatenate(self._known) if self._known else np.zeros(0, np.int32)

    @property
    def pixels(self) -> list[np.ndarray]:
        """Of each different digest in the items of the admitted sequences."""
        return [*self._pixels.values()]

    def share_budget(self, num_decoding: int) -> None:
        """Lowers the drafts of each of ``num_decoding`` sequences to fit the budget."""
        if num_decoding:
            self.verify_depth = min(self.verify_depth, room_for_drafts(self.budget, num_decoding))

    def ask_for(self, num_steps: int) -> None:
        """Makes the empty plan a plan of several steps."""
        self.plan = replace(self.plan, num_steps=num_steps)

    def limit(self, num_tokens: int) -> int:
        """Lowers the budget to ``num_tokens``. Returns the difference."""
        before = self.budget
        self.budget = min(before, num_tokens)
        return before - self.budget

    def admit(self, sequence: Sequence) -> None:
        allocation = sequence.allocated
        sequence.note_hit(allocation.worker_id, allocation.num_computed)
        if not sequence.has_run:
            sequence.has_run = True
            self.newcomers.append(sequence)
        ids = sequence.known_ids()
        self._known.append(ids)
        self._num_array_bytes += ids.nbytes
        # Copies, for the tables may grow before the plan is encoded.
        blocks, *more_blocks = (each.padded(self._null_block) for each in allocation.tables)
        num_blocks = sum(each.num_blocks for each in allocation.tables)
        self._num_admit_bytes += 5 * num_blocks + list_bytes(sequence.params)
        self._num_admit_bytes += len(memoryview(sequence.option_row))
        items = self._add_items(sequence) if sequence.spans else []
        self.plan.admit.append(
            Admit(
                slot=allocation.slot,
                request=sequence.request,
                attempt=sequence.attempt,
                route=sequence.route,
                choice=sequence.choice,
                prompt_len=len(sequence.prompt),
                num_ids=len(ids),
                num_cached=allocation.num_computed,
                params=sequence.params,
                blocks=blocks,
                num_prompt_scored=sequence.num_prompt_scored,
                options=sequence.option_row,
                more_blocks=more_blocks,
                from_state=allocation.from_state,
                to_state=allocation.to_state,
                items=items,
            )
        )

    def _add_items(self, sequence: Sequence) -> list[Item]:
        """All, for positions, and the pixels of items with tokens to compute."""
        num_cached = sequence.allocated.num_computed
        self._num_admit_bytes += MAX_ITEM_BYTES * len(sequence.spans)
        for item, pixels in sequence.spans:
            if item.end > num_cached and item.digest not in self._pixels:
                self._pixels[item.digest] = pixels
                self._num_array_bytes += pixels.nbytes
        return [each.item for each in sequence.spans]

    def extend(self, sequence: Sequence, blocks: list[list[int]]) -> None:
        """``blocks`` of each group of layers, or none at all."""
        if blocks:
            first, *others = blocks
            self.plan.extend.append(Extend(sequence.allocated.slot, first, others))

    def max_tokens(self, sequence: Sequence) -> int:
        """Returns the number of tokens to compute of ``sequence``, as far as its credit allows."""
        return sequence.max_chunk(sequence.num_to_compute, self._vocab_size)

    def _up_to_multiple(self, num_computed: int, num_tokens: int) -> int:
        """Lowers ``num_tokens`` of a prompt to end at a multiple of the chunks, if any is left."""
        past = (num_computed + num_tokens) % self._chunk_multiple
        return num_tokens - past if past < num_tokens else num_tokens

    def compute(self, sequence: Sequence, max_tokens: int) -> None:
        """Plans the tokens ``sequence`` lacks, up to ``max_tokens`` and the budget."""
        num_to_compute, plan, allocation = sequence.num_to_compute, self.plan, sequence.allocation
        assert allocation is not None
        num_tokens = min(
            max_tokens,
            self.budget,
            sequence.max_chunk(num_to_compute, self._vocab_size),
            allocation.num_ready - allocation.num_computed,
        )
        if num_tokens < num_to_compute:
            num_tokens = self._up_to_multiple(allocation.num_computed, num_tokens)
        if allocation.cuts and num_to_compute > 1 and num_tokens > 0:
            num_tokens = allocation.up_to_cut(num_tokens, self.budget + self._spare)
        if num_tokens <= 0 or allocation.is_held:
            return
        verify_depth = 0
        if num_to_compute == 1:
            if allocation.may_have_drafts:
                verify_depth = min(self.verify_depth, self.budget - 1)
            plan.decode.append(Decode(allocation.slot, verify_depth))
        else:
            plan.prefill.append(Prefill(allocation.slot, num_tokens))
        allocation.num_computed += num_tokens
        if num_tokens == num_to_compute:
            allocation.expect(plan.num_steps, plan.num_steps * (1 + verify_depth))
        allocation.last_step = plan.step
        rest = self.budget - num_tokens - verify_depth
        self.budget, self._spare = max(0, rest), self._spare + min(0, rest)
