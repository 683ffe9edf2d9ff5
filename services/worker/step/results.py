"""Records a step in the slot table, as the result that goes to the scheduler."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kernels.accept.output import FULL, REPEATED, STOPPED
from kernels.sample import NOT_FINITE, NOTHING_LEFT
from services.worker.guides.slot_guide import SlotGuide
from services.worker.slots.table import SlotTable
from services.worker.step.logprobs import StepLogprobs
from services.worker.step.verify import AcceptOutcome
from shared.errors import GRAMMAR_TOO_COMPLEX, NO_TOKEN_ALLOWED
from shared.wire.messages import NO_TOKENS, FinishReason, ResultRow, RunKind, TokenRun
from shared.wire.token_arrays import Layout, TokenArrays, join

ERRORS = {
    NOT_FINITE: "the model computed logits that are not finite numbers (NaN or infinity)",
    NOTHING_LEFT: "the request forbids every token: its format, allowed_token_ids, bad_words,"
    " logit_bias and min_tokens leave none",
}
FINISHES: dict[int, FinishReason] = {STOPPED: "stop", FULL: "length", REPEATED: "repetition"}
StepRows = tuple[list[ResultRow], TokenArrays]


class ComputedRows(Protocol):
    """R rows of a step, of which Q sample; see ``Batch``."""

    @property
    def slots(self) -> np.ndarray: ...
    @property
    def num_tokens(self) -> np.ndarray: ...
    @property
    def token_ends(self) -> np.ndarray: ...
    @property
    def num_drafts(self) -> np.ndarray: ...
    @property
    def num_recomputed(self) -> np.ndarray: ...
    @property
    def sampling_rows(self) -> np.ndarray: ...
    @property
    def sampling_slots(self) -> np.ndarray: ...


class RowPart(NamedTuple):
    """A row and its part of the buffers."""

    row: ResultRow
    arrays: TokenArrays


def record(
    table: SlotTable, computed: ComputedRows, outcome: AcceptOutcome, logprobs: StepLogprobs
) -> tuple[list[ResultRow], np.ndarray]:
    """Adds what is emitted to the slots, which lose their drafts, and closes those that ended.
    ``logprobs`` is of the emitted tokens in order.

    Returns one row per sampling slot, and the int32 ids of all of them.
    """
    slots, num_drafts = computed.sampling_slots, computed.num_drafts[computed.sampling_rows]
    num_computed = computed.num_tokens - computed.num_drafts - computed.num_recomputed
    num_computed[computed.sampling_rows] += np.where(outcome.codes < 0, 0, outcome.num_emitted - 1)
    table.num_computed[computed.slots] += num_computed
    table.lacks_state[computed.slots] = False
    table.append(slots, outcome.tokens, outcome.num_emitted)
    table.is_open[slots[outcome.has_ended]] = False
    starts = np.cumsum(outcome.num_emitted) - outcome.num_emitted
    columns = slots, starts, num_drafts, outcome.num_emitted, outcome.num_accepted, outcome.codes
    values = zip(*(each.tolist() for each in columns), strict=True)
    rows = [result_row(table, logprobs, *each) for each in values]
    return rows, outcome.emitted.astype(np.int32)


def result_row(
    table: SlotTable,
    logprobs: StepLogprobs,
    slot: int,
    start: int,
    num_drafts: int,
    num_emitted: int,
    num_accepted: int,
    code: int,
) -> ResultRow:
    """Returns the row of a slot whose first token is number ``start`` of all emitted ones."""
    request, attempt = table.requests[slot]
    if code < 0:
        why, of_client = _why(table.guide_of(slot), code)
        return ResultRow(slot, request, attempt, NO_TOKENS, error=why, code=of_client)
    num_values, num_top_ids = logprobs.widths(start)
    run = TokenRun(
        num_emitted, num_values, num_top_ids, num_drafts=num_drafts, num_accepted=num_accepted
    )
    return ResultRow(slot, request, attempt, run, FINISHES.get(code))


def _why(guide: SlotGuide | None, code: int) -> tuple[str, str]:
    """What to say of ``code``, and a name for what is the client's to mend."""
    if guide is not None and guide.error is not None:
        return guide.error, GRAMMAR_TOO_COMPLEX if guide.is_too_complex else ""
    return ERRORS[code], NO_TOKEN_ALLOWED if code == NOTHING_LEFT else ""


def draft_rows(table: SlotTable, computed: ComputedRows, outcome: AcceptOutcome) -> list[RowPart]:
    """Returns the verified drafts of slots whose request asked for them; the step is not recorded
    yet."""
    slots = computed.sampling_slots
    num_drafts = computed.num_drafts[computed.sampling_rows]
    parts = []
    for row in np.flatnonzero(table.wants_draft_logprobs[slots] & (num_drafts > 0)).tolist():
        slot, num = int(slots[row]), int(num_drafts[row])
        arrays = TokenArrays(
            outcome.drafts[row, :num].astype(np.int32),
            table.draft_logprobs[slot, :num].copy(),
            ranks=table.draft_ranks[slot, :num].copy(),
        )
        request, attempt = table.requests[slot]
        num_accepted = int(outcome.num_accepted[row])
        run = TokenRun(num, num_values=1, kind=RunKind.DRAFTS, num_accepted=num_accepted)
        parts.append(RowPart(ResultRow(slot, request, attempt, run), arrays))
    return parts


def join_steps(table: SlotTable, steps: Sequence[StepRows]) -> StepRows:
    """Returns the rows and buffers of all ``steps``: those of a slot side by side, in the order of
    the steps."""
    if len(steps) == 1:
        return steps[0]
    parts = [part for step in steps for part in _parts_of(*step)]
    return _in_order(table, parts)


def with_parts(
    table: SlotTable, rows: list[ResultRow], arrays: TokenArrays, parts: list[RowPart]
) -> StepRows:
    """Puts each part before its slot's output row. A part with an error replaces all rows of its
    slot."""
    if not parts:
        return rows, arrays
    failed = {each.row.slot: each for each in parts if each.row.error is not None}
    all_parts = [*parts, *_parts_of(rows, arrays)]
    return _in_order(table, [each for each in all_parts if failed.get(each.row.slot, each) is each])


def _parts_of(rows: list[ResultRow], arrays: TokenArrays) -> list[RowPart]:
    layout = Layout(rows, arrays)
    return [RowPart(row, layout.part(index, index + 1)) for index, row in enumerate(rows)]


def _in_order(table: SlotTable, parts: list[RowPart]) -> StepRows:
    parts = sorted(parts, key=lambda each: (table.routes[each.row.slot], each.row.slot))
    return [each.row for each in parts], join([each.arrays for each in parts])
