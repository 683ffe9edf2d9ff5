"""How the tokens of a step are sampled: what is drawn at random, and what logits rules change."""

import time
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sample import (
    MIN_TEMPERATURE,
    RandomRows,
    prepare_adjustments,
    prepare_random_rows,
)
from kernels.sample.slot_params import SlotParams
from services.worker.guides.grammars import NotCompiled
from services.worker.metrics import GUIDE_MASK_SECONDS, GUIDE_MASKS
from services.worker.slots.logits_rules import row_change
from services.worker.slots.table import SlotTable
from services.worker.step.sampler import Adjusted
from services.worker.step.step import Backend, Places, Step, StepPart

MAX_WAIT_S = 0.02  # of a step that could but wait for grammars


class _Place(NamedTuple):
    """A row of logits whose slot has logits rules."""

    row: int
    slot: int
    position: int  # of the token that it is for
    num_known: int  # ids of the slot; those from there to the position are drafts


class Rules(StepPart[None]):
    """Applies logits rules. These depend on the ids before a token, so a step with any catches up
    with all before it."""

    def __init__(self, table: SlotTable, backend: Backend, eos_ids: np.ndarray) -> None:
        self._table = table
        self._backend = backend
        self._eos_ids = eos_ids

    def before_sampling(self, step: Step) -> None:
        if self._backend.has_rules[step.rows.sampling_slots].any():
            self._backend.catch_up()
            step.adjusted = self.adjust(step.logits, step.computation.places())

    def adjust(self, logits: Tensor, places: Places) -> Adjusted | None:
        """Returns a copy of ``logits`` [S, V] with what the rules of ``places`` change, if they
        change any."""
        table, has_rules = self._table, self._backend.has_rules[places.slots]
        if not has_rules.any():
            return None
        await_grammars(table, places.slots)
        rows, slots, positions = (column[has_rules] for column in places)
        columns = rows, slots, positions, table.num_tokens[slots]
        found = list(map(_Place, *(each.tolist() for each in columns)))
        masks, waiting = _guide_masks(table, found)
        changes = []
        for row, slot, position, num_known in found:
            rules = table.logits_rules[slot]
            if rules is not None and rules.has_points and row not in waiting:
                ids, prompt_len = table.ids[slot, :position], int(table.prompt_lens[slot])
                num_drafts, mask = position - num_known, masks.get(row)
                changes.append(
                    row_change(row, rules, ids, num_drafts, prompt_len, self._eos_ids, mask)
                )
        adjustments = prepare_adjustments(changes, masks, self._backend.upload)
        if adjustments is not None:
            logits = self._backend.sampler.adjust(logits, adjustments)
        elif not waiting:
            return None
        return Adjusted(logits, np.array(waiting, np.int64))


def random_rows_of(
    table: SlotTable, slots: np.ndarray, positions: np.ndarray, device: torch.device
) -> RandomRows | None:
    """Returns those of ``slots`` [S] that are drawn at random for ``positions`` [S], if any are."""
    if (table.sampling.temperature[slots] < MIN_TEMPERATURE).all():
        return None
    params = SlotParams(*(column[slots] for column in table.sampling))
    return prepare_random_rows(params, positions, device)


def await_grammars(table: SlotTable, slots: np.ndarray) -> None:
    """Where none of ``slots`` [S] can go on since their grammars are not compiled, waits a little
    for the first of these, so that steps that bring nothing do not follow one another at once."""
    if not table.has_logits_rules[slots].all():
        return
    futures = []
    for slot in np.unique(slots).tolist():
        guide = table.guide_of(slot)
        if guide is None or guide.awaited is None:
            return
        futures.append(guide.awaited)
    wait(futures, MAX_WAIT_S, FIRST_COMPLETED)


def _guide_masks(table: SlotTable, places: list[_Place]) -> tuple[dict[int, np.ndarray], list[int]]:
    """Returns the masks of guides by row, and the rows that wait for their grammar."""
    masks: dict[int, np.ndarray] = {}
    waiting: list[int] = []
    started_s = time.perf_counter()
    for row, slot, position, num_known in places:
        if (guide := table.guide_of(slot)) is None:
            continue
        try:
            mask = guide.mask(table.ids[slot, num_known:position].tolist())
        except NotCompiled:
            waiting.append(row)
            continue
        if mask is not None:
            masks[row] = mask
    if masks:
        GUIDE_MASKS.inc(len(masks))
        GUIDE_MASK_SECONDS.inc(time.perf_counter() - started_s)
    return masks, waiting
