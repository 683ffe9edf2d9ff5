"""Records a step in the slot table and makes the rows of its StepResult."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels.accept.output import FULL, REPEATED, STOPPED
from kernels.sample import NOT_FINITE, NOTHING_LEFT
from services.worker.slots.guide import SlotGuide
from services.worker.slots.table import SlotTable
from services.worker.step.rows import Rows
from services.worker.step.verify import AcceptOutcome
from shared.errors import GRAMMAR_TOO_COMPLEX, NO_TOKEN_ALLOWED
from shared.wire.messages import NO_TOKENS, FinishReason, ResultRow, TokenRun
from shared.wire.token_arrays import Layout, TokenArrays, join

ERRORS = {
    NOT_FINITE: "the model computed logits that are not finite numbers (NaN or infinity)",
    NOTHING_LEFT: "the request forbids every token: its format, allowed_token_ids, bad_words,"
    " logit_bias and min_tokens leave none",
}
FINISHES: dict[int, FinishReason] = {STOPPED: "stop", FULL: "length", REPEATED: "repetition"}
StepRows = tuple[list[ResultRow], TokenArrays]

_NO_FLOATS = np.zeros(0, np.float32)
_NO_IDS = np.zeros(0, np.int32)


class TokenLogprobs(NamedTuple):
    """Logprobs of a token and of the likeliest tokens, the ids of these, and the token's rank."""

    values: np.ndarray  # [1 + k or 1 + V] float32
    top_ids: np.ndarray  # [k or 0] int32
    rank: int


class StepLogprobs:
    """The requested logprobs, by index of the token among the emitted tokens of a step."""

    def __init__(self, tokens: dict[int, TokenLogprobs]) -> None:
        self._tokens = tokens

    def widths(self, index: int) -> tuple[int, int]:
        """Returns ``num_values`` and ``num_top_ids`` of the run that begins at ``index``."""
        by_token = self._tokens.get(index)
        return (len(by_token.values), len(by_token.top_ids)) if by_token is not None else (0, 0)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns values, top ids and ranks of all tokens, concatenated in order."""
        by_token = [self._tokens[index] for index in sorted(self._tokens)]
        if not by_token:
            return _NO_FLOATS, _NO_IDS, _NO_IDS
        values = np.concatenate([each.values for each in by_token])
        top_ids = np.concatenate([each.top_ids for each in by_token])
        return values, top_ids, np.array([each.rank for each in by_token], np.int32)


NO_LOGPROBS = StepLogprobs({})


class RowPart(NamedTuple):
    """A result row and its part of the buffers."""

    row: ResultRow
    arrays: TokenArrays


def record(
    table: SlotTable, computed: Rows, outcome: AcceptOutcome, logprobs: StepLogprobs
) -> tuple[list[ResultRow], np.ndarray]:
    """Appends the emitted tokens to the slots, drops their drafts and closes ended slots.

    Returns one row per sampling slot, and the int32 ids of all emitted tokens.
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
    """Returns the row of a slot; its first token has index ``start`` in the emitted tokens."""
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
    """Returns the error text of ``code``, and the API's error code if the request is at fault."""
    if guide is not None and guide.error is not None:
        return guide.error, GRAMMAR_TOO_COMPLEX if guide.is_too_complex else ""
    return ERRORS[code], NO_TOKEN_ALLOWED if code == NOTHING_LEFT else ""


def join_steps(table: SlotTable, steps: Sequence[StepRows]) -> StepRows:
    """Merges the rows and buffers of ``steps``; rows of a slot are adjacent, in step order."""
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
