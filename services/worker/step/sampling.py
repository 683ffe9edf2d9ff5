"""Prepares the sampling of a step: rows drawn at random, and the changes of logits rules."""

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
from services.worker.metrics import GUIDE_MASK_SECONDS, GUIDE_MASKS
from services.worker.slots.guide import NotCompiled
from services.worker.slots.logits_rules import row_change
from services.worker.slots.table import SlotTable
from services.worker.step.sampler import Adjusted
from services.worker.step.step import Backend, Places, Step, StepPart

MAX_WAIT_S = 0.02  # of a step, for a grammar, if every row waits for one


class _Place(NamedTuple):
    """A row of the logits with logits rules."""

    row: int
    slot: int
    position: int  # of the token to sample
    num_known: int  # known ids of the slot; ids between these and the position are drafts


class Rules(StepPart[None]):
    """Applies logits rules. Rules depend on the ids before a token, so a step with rules waits for
    the results of all earlier steps."""

    def __init__(self, table: SlotTable, backend: Backend, eos_ids: np.ndarray) -> None:
        self._table = table
        self._backend = backend
        self._eos_ids = eos_ids

    def before_sampling(self, step: Step) -> None:
        if self._backend.has_rules[step.rows.sampling_slots].any():
            self._backend.catch_up()
            step.adjusted = self.adjust(step.logits, step.computation.places())

    def adjust(self, logits: Tensor, places: Places) -> Adjusted | None:
        """Returns ``logits`` [S, V] as changed by the rules of ``places``, with the rows that wait
        for a grammar, or None if there is no change and no waiting row."""
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
    """Returns the rows of ``slots``, ``positions`` [S] to draw at random. None: all are greedy."""
    if (table.sampling.temperature[slots] < MIN_TEMPERATURE).all():
        return None
    params = SlotParams(*(column[slots] for column in table.sampling))
    return prepare_random_rows(params, positions, device)


def await_grammars(table: SlotTable, slots: np.ndarray) -> None:
    """If all ``slots`` [S] wait for a grammar, waits up to ``MAX_WAIT_S`` for the first one: steps
    without output shall not follow each other at once."""
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
    """Returns the masks of guides by row, and the rows with a grammar not compiled yet."""
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
