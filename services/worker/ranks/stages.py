"""The engine of one stage of a pipeline on CPUs.

All stages get the same plans in the same order and keep the same slots. A stage computes its layers
on the hidden states from the stage before and sends its own states to the next. The last stage
samples, drafts and makes the result. Then it sends copies of the step's slots to all others.

**Waiting.** A stage begins a step once it knows the outcome of earlier steps for the slots in the
plan. Plans without a common sequence are therefore computed at the same time. A step after a prompt
chunk that samples nothing does not wait for the chunk.

**Agreement.** The rows of a step and their numbers of tokens follow from the slots in its plan.
These slots are equal on all stages when the step begins.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.logprobs.num_logprobs import NO_LOGPROBS
from services.worker.engine.host import HostEngine
from services.worker.engine.protocol import StepOutput
from services.worker.metrics import STAGE_BUSY_SECONDS, STAGE_STEPS, STAGE_STEPS_AHEAD
from services.worker.ranks.stage_line import StageLine
from services.worker.slots.table import SlotTable
from services.worker.step.batch import Batch
from services.worker.step.rows import Rows
from services.worker.weights.progress import Progress
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import StepPlan

NO_STATES = torch.zeros(0, 0)


class _Undecided(NamedTuple):
    """A step computed by this stage. Only the last stage knows the outcome for ``slots`` [n]
    int64."""

    number: int
    batch: Batch
    slots: np.ndarray
    output: Future[StepOutput]


class StageEngine(HostEngine):
    """The engine of one stage. ``output`` is set on the first and on the last stage only."""

    max_num_steps = 1  # the next step begins at the first stage

    def __init__(self, settings: WorkerConfig, progress: Progress) -> None:
        super().__init__(settings, progress)
        self._stage = self._parallel.stage
        self._line = StageLine(self._stage)
        self._states = NO_STATES
        self._touched = np.zeros(0, np.int64)
        self._num_steps = 0
        # By slot: number of the latest step that the last stage decides.
        self._waits_for = np.zeros(self.capacity.max_num_seqs, np.int64)
        self._undecided: deque[_Undecided] = deque()
        self._expected: SimpleQueue[_Undecided] = SimpleQueue()
        self._decided: SimpleQueue[np.ndarray | Exception] = SimpleQueue()
        if not self._stage.is_last:
            Thread(target=self._take_results, name="results", daemon=True).start()

    def reset(self) -> None:
        self._decide(self._num_steps)
        super().reset()

    @torch.inference_mode()
    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        self._decide(self._last_step_of(plan))
        if not self._stage.is_first:
            self._states = self._line.receive_states()
        started_s = time.perf_counter()
        if self._stage.is_last:
            output.add_done_callback(lambda done: self._line.send_result(done.result()))
            super().submit(plan, ids, output, pixels)
            self._line.send_copies(copy_slots(self._slots, self._touched))
        else:
            self._pass_on(plan, ids, output, pixels)
        STAGE_STEPS.inc()
        STAGE_BUSY_SECONDS.inc(time.perf_counter() - started_s)

    def _pass_on(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array],
    ) -> None:
        """Runs a step on any stage but the last."""
        STAGE_STEPS_AHEAD.inc(len(self._undecided) > self._decided.qsize())
        for part in self._plan_parts:
            part.apply(plan, pixels)
        self._apply(plan, ids)
        batch = self._prepare(plan)
        rows = batch.rows
        states = self._forward(batch) if len(rows.slots) else NO_STATES
        self._line.send_states(states)
        table = self._slots
        table.num_computed[rows.slots] += rows.num_tokens - rows.num_drafts - rows.num_recomputed
        table.lacks_state[rows.slots] = False
        self._num_steps += 1
        self._waits_for[self._touched] = self._num_steps
        computed = replace(batch, embeddings=None)  # frees them
        step = _Undecided(self._num_steps, computed, self._touched, output)
        self._undecided.append(step)
        self._expected.put(step)

    def _prepare(self, plan: StepPlan) -> Batch:
        batch = super()._prepare(plan)
        self._touched = _touched_slots(self._slots, batch.rows)
        return batch

    def _given(self, batch: Batch) -> Tensor:
        """Keeps no reference to the received states: layers change or replace them."""
        if self._stage.is_first:
            return super()._given(batch)
        states, self._states = self._states, NO_STATES
        more = batch.embeddings
        if more is None:
            return states
        return torch.cat([states[None], more.to(states.dtype).expand(-1, *states.shape)])

    def _last_step_of(self, plan: StepPlan) -> int:
        """Number of the last step that the slots of ``plan`` wait for."""
        slots = np.array(
            [
                *plan.release,
                *(row.slot for row in plan.admit),
                *(row.slot for row in plan.prefill),
                *(row.slot for row in plan.decode),
            ],
            np.int64,
        )
        return int(self._waits_for[slots].max(initial=0))

    def _decide(self, number: int) -> None:
        """Waits for the outcomes of all steps up to ``number`` and puts them into the slots."""
        while self._undecided and self._undecided[0].number <= number:
            found, step = self._decided.get(), self._undecided.popleft()
            if isinstance(found, Exception):
                raise found
            before = self._slots.num_tokens[step.slots]
            paste_slots(self._slots, step.slots, found)
            is_retried = self._slots.is_open[step.slots] & (
                self._slots.num_tokens[step.slots] == before
            )
            if self._model.clears_blocks:
                self._clear_drafts(step.batch, step.slots[is_retried])

    def _clear_drafts(self, batch: Batch, slots: np.ndarray) -> None:
        """Clears the KV of recomputed rows with drafts: it may have non-finite values."""
        has_drafts = batch.rows.num_drafts[batch.rows.sampling_rows] > 0
        is_bad = np.isin(batch.rows.sampling_slots, slots) & has_drafts
        if is_bad.any():
            self._kv_cache.clear_slots(batch.kv_slots_of(is_bad))

    def _take_results(self) -> None:
        """Receives the outcome of each step from the last stage; runs on its own thread."""
        width = copy_width(self._slots)
        while True:
            step = self._expected.get()
            try:
                if self._stage.is_first:
                    self._take_result(step.output)
                self._decided.put(self._line.receive_copies(len(step.slots), width))
            except Exception as error:  # raised on the step thread
                self._decided.put(error)
                if not step.output.done():
                    step.output.set_exception(error)
                return

    def _take_result(self, output: Future[StepOutput]) -> None:
        """Closes ended slots at once: the step thread may have no further step."""
        result, arrays = self._line.receive_result()
        ended = [row.slot for row in result.rows if row.finish or row.error is not None]
        self._slots.is_open[ended] = False
        output.set_result((result, arrays))


def _touched_slots(table: SlotTable, rows: Rows) -> np.ndarray:
    """The slots [n] int64 of ``rows`` that the last stage may emit for or close: rows that reach
    the last known id, for sampling or pooling, and prompts with logprobs."""
    slots = rows.slots
    is_read = rows.ends - rows.num_drafts == table.num_tokens[slots]
    is_scored = table.num_prompt_logprobs[slots] != NO_LOGPROBS
    touched: np.ndarray = slots[is_read | is_scored]
    return touched


NUM_COLUMNS = 4  # of a slot, before its ids: is_open, num_tokens, num_computed and num_drafts


def copy_width(table: SlotTable) -> int:
    """Number of elements in the copy of a slot."""
    return NUM_COLUMNS + len(_places(table))


def copy_slots(table: SlotTable, slots: np.ndarray) -> np.ndarray:
    """[n, copy_width] int64 of ``slots`` [n]: everything a step may change, its new ids, and the
    drafts after them."""
    nums = table.num_tokens[slots]
    columns = table.is_open[slots], nums, table.num_computed[slots], table.num_drafts[slots]
    ids = table.ids[slots[:, None], _clipped(table, nums)]
    return np.concatenate([np.stack(columns, 1).astype(np.int64), ids], 1)


def paste_slots(table: SlotTable, slots: np.ndarray, copies: np.ndarray) -> None:
    """Overwrites ``slots`` [n] with ``copies`` from a process one step ahead."""
    is_open, nums, num_computed, num_drafts = copies[:, :NUM_COLUMNS].T
    table.is_open[slots] = is_open
    table.num_tokens[slots] = nums
    table.num_computed[slots] = num_computed
    table.num_drafts[slots] = num_drafts
    table.ids[slots[:, None], _clipped(table, nums)] = copies[:, NUM_COLUMNS:]


def _places(table: SlotTable) -> np.ndarray:
    """Indices of the copied ids, relative to the number of known ids: a step adds one token and one
    per draft."""
    most = table.draft_logprobs.shape[1]
    return np.arange(-1 - most, most)


def _clipped(table: SlotTable, nums: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.clip(nums[:, None] + _places(table), 0, table.max_len)
    return found


build = StageEngine
