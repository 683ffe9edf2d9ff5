"""Ends outputs that repeat a pattern, for requests with a ``repetition`` rule."""

from dataclasses import replace

import numpy as np

from kernels.accept.output import REPEATED, RUNS
from services.worker.slots.table import SlotTable
from services.worker.step.step import PendingResult, Step, StepPart
from services.worker.step.verify import AcceptOutcome
from shared.wire.messages import Repetition


class Repetitions(StepPart[bool]):
    """See ``end_repetitions``."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table

    def after_sampling(self, step: Step) -> bool | None:
        return bool(self._table.ends_repetition[step.rows.sampling_slots].any()) or None

    def after_acceptance(self, result: PendingResult, note: bool) -> None:
        slots = result.rows.sampling_slots
        result.outcome = end_repetitions(self._table, slots, result.outcome)


def end_repetitions(table: SlotTable, slots: np.ndarray, outcome: AcceptOutcome) -> AcceptOutcome:
    """Drops the tokens of ``slots`` [Q] after the first token that completes a repetition. A stop
    or a full slot at that token stays the finish reason. The step must not be recorded yet."""
    rows = np.flatnonzero(table.ends_repetition[slots] & (outcome.num_emitted > 0)).tolist()
    ends = {row: end for row in rows if (end := _first_end(table, slots[row], outcome, row))}
    if not ends:
        return outcome
    num_emitted, codes = outcome.num_emitted.copy(), outcome.codes.copy()
    for row, end in ends.items():
        num_emitted[row], codes[row] = end, REPEATED
    columns = np.arange(outcome.tokens.shape[1])
    was_emitted = columns < outcome.num_emitted[:, None]
    is_kept = (columns < num_emitted[:, None])[was_emitted]
    return replace(
        outcome,
        num_emitted=num_emitted,
        num_accepted=np.minimum(outcome.num_accepted, num_emitted),
        codes=codes,
        emitted=outcome.emitted[is_kept],
        rows=outcome.rows[is_kept],
    )


def _first_end(table: SlotTable, slot: int, outcome: AcceptOutcome, row: int) -> int | None:
    """Returns the number of tokens the row emits if one of them completes a repetition."""
    params = table.params[slot]
    assert params.repetition is not None
    known = table.ids[slot, table.prompt_lens[slot] : table.num_tokens[slot]]
    num = int(outcome.num_emitted[row])
    num_running = num if outcome.codes[row] == RUNS else num - 1
    first = max(1, params.min_tokens - len(known))
    known = known[-params.repetition.max_pattern_size * params.repetition.min_count :]
    text = np.concatenate([known, outcome.tokens[row, :num]])
    for end in range(first, num_running + 1):
        if repeats(text[: len(known) + end], params.repetition):
            return end
    return None


def repeats(ids: np.ndarray, rule: Repetition) -> bool:
    """True if ``ids`` [n] end with ``min_count`` consecutive copies of a pattern."""
    longest = min(rule.max_pattern_size, len(ids) // rule.min_count)
    if longest < rule.min_pattern_size:
        return False
    before = ids[-1 - longest : -1][::-1]
    for size in (np.flatnonzero(before == ids[-1]) + 1).tolist():
        tail = ids[len(ids) - size * rule.min_count :]
        if size >= rule.min_pattern_size and (tail[size:] == tail[:-size]).all():
            return True
    return False
