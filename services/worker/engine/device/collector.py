"""Brings what a step computed from the device to the slot table and to the scheduler."""

from dataclasses import dataclass, field

import numpy as np

from services.worker.engine.device.accept_outcomes import NO_ROWS, StepRows, unpack
from services.worker.engine.device.planned_rows import PlannedRows
from services.worker.engine.device.token_logprobs import PendingLogprobs
from services.worker.engine.protocol import StepOutput
from services.worker.machine.streams import DeviceEvent, Download
from services.worker.slots.table import SlotTable
from services.worker.speculation.mtp_coverage import MtpCoverage
from services.worker.speculation.ngram import NgramDrafter
from services.worker.startup.loaded_model import LoadedModel
from services.worker.step.logprobs import StepLogprobs
from services.worker.step.pooling import PooledPart, pooled_rows
from services.worker.step.prompt_logprobs import PromptPart, prompt_rows
from services.worker.step.repetition import end_repetitions
from services.worker.step.results import RowPart, draft_rows, record, with_parts
from services.worker.step.verify import AcceptOutcome
from shared.wire.messages import Capacity, StepPlan, StepResult
from shared.wire.token_arrays import TokenArrays


@dataclass
class LaunchedStep:
    """A step that is on the device, and its downloads."""

    plan: StepPlan
    planned: PlannedRows
    depth: int  # of its drafts
    begins: DeviceEvent
    decided: DeviceEvent | None = None
    ends: DeviceEvent | None = None  # with its drafts
    packed: Download | None = None
    logprobs: PendingLogprobs | None = None
    draft_logprobs: Download | None = None  # of the drafts that are verified
    drafts: Download | None = None  # that are made, where the host wants to know
    prompts: dict[int, PromptPart] = field(default_factory=dict)  # by slot
    pooled: dict[int, PooledPart] | None = None  # by slot; None: the model does not pool
    failed: list[RowPart] = field(default_factory=list)


class Collector:
    """Collects steps in order. It keeps the step before, since what the device did after that
    one's result belongs to the next one."""

    def __init__(self, table: SlotTable, loaded: LoadedModel, capacity: Capacity) -> None:
        self.mtp_coverage = MtpCoverage(capacity)
        self._table = table
        self._method = loaded.speculation.method
        self._ngram = NgramDrafter(*loaded.settings.speculative_config.lookup_lens)
        self._last: LaunchedStep | None = None
        self._has_more = False  # sequences were open when the last step was collected

    def forget(self) -> None:
        """Forgets the step before."""
        self._last = None

    def collect(self, launched: LaunchedStep) -> StepOutput:
        """Waits for the sampled tokens, records them in the table and returns the result."""
        table = self._table
        packed = NO_ROWS if launched.packed is None else launched.packed.wait()[0]
        rows, outcome = unpack(table, launched.planned, packed)
        outcome = end_repetitions(table, rows.sampling_slots, outcome)
        logprobs = (
            StepLogprobs({}) if launched.logprobs is None else launched.logprobs.resolve(outcome)
        )
        drafts = self._draft_rows(launched, rows, outcome)
        num_known = table.num_tokens[rows.slots]
        result_rows, emitted = record(table, rows, outcome, logprobs)
        prompts = self._prompt_rows(launched)
        if launched.depth:
            self._note_drafts(launched, rows, outcome, num_known)
        arrays = TokenArrays(emitted, *logprobs.arrays())
        parts = prompts + drafts + launched.failed
        result_rows, arrays = with_parts(table, result_rows, arrays, parts)
        step_s, idle_s = self._times(launched)
        self._last, self._has_more = launched, bool(table.is_open.any())
        return StepResult(launched.plan.step, result_rows, step_s, idle_s), arrays

    def note_chunk_pairs(self, planned: PlannedRows) -> None:
        """Notes the pairs of launched chunks, for sequences that find them in the prefix cache."""
        slots, starts = planned.chunk_slots, planned.chunk_starts
        known = self._table.num_tokens[slots]
        known[planned.sampling_chunks] += 1
        self.mtp_coverage.note(self._table, slots, starts + 1, starts + planned.chunk_nums, known)

    def _draft_rows(
        self, launched: LaunchedStep, rows: StepRows, outcome: AcceptOutcome
    ) -> list[RowPart]:
        if launched.draft_logprobs is None:
            return []
        slots = launched.planned.slots
        logprobs, ranks = launched.draft_logprobs.wait()
        self._table.draft_logprobs[slots], self._table.draft_ranks[slots] = logprobs, ranks
        return draft_rows(self._table, rows, outcome)

    def _prompt_rows(self, launched: LaunchedStep) -> list[RowPart]:
        if not len(launched.planned.chunk_slots):
            return []
        rows = StepRows.of_chunks(launched.planned)
        if launched.pooled is not None:
            return pooled_rows(self._table, rows, launched.pooled)
        return prompt_rows(self._table, rows, launched.prompts)

    def _note_drafts(
        self, launched: LaunchedStep, rows: StepRows, outcome: AcceptOutcome, num_known: np.ndarray
    ) -> None:
        """Notes the drafts that the device made, or looks up n-grams. ``num_known`` [R] are the
        lengths before the step."""
        table = self._table
        if self._method == "mtp":
            is_decoding = ~np.isin(rows.slots, launched.planned.chunk_slots)
            slots, first = rows.slots[is_decoding], num_known[is_decoding]
            last = first + rows.num_tokens[is_decoding] - 1
            self.mtp_coverage.note(table, slots, first, last, table.num_tokens[slots])
        if launched.drafts is not None:
            _note(table, launched.planned.slots, *launched.drafts.wait())
        if self._method == "ngram":
            goes_on = ~outcome.has_ended & (outcome.num_emitted > 0)
            self._ngram.look_up(table, rows.sampling_slots[goes_on], launched.depth)

    def _times(self, launched: LaunchedStep) -> tuple[float, float]:
        """Returns the seconds that the step took, with the drafts that it verified, and those for
        which the device had nothing to do before it, while sequences were open."""
        assert launched.decided is not None
        launched.decided.wait()
        step_s = launched.decided.since(launched.begins)
        last = self._last
        if last is None or last.decided is None or last.ends is None:
            return step_s, 0.0
        step_s += last.ends.since(last.decided)
        return step_s, launched.begins.since(last.ends) if self._has_more else 0.0


def _note(table: SlotTable, slots: np.ndarray, drafts: np.ndarray, nums: np.ndarray) -> None:
    """Writes ``drafts`` [R, max drafts] of ``slots`` [R], ``nums`` [R] of each, into the table."""
    for slot, row, num in zip(slots.tolist(), drafts, nums.tolist(), strict=True):
        if table.is_open[slot]:
            start = table.num_tokens[slot]
            table.ids[slot, start : start + num] = row[:num]
            table.num_drafts[slot] = num
