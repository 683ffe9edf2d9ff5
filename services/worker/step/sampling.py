"""How the tokens of a step are sampled: what is drawn at random, and what logits rules change."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sample import (
    MIN_TEMPERATURE,
    Adjustments,
    RandomRows,
    prepare_adjustments,
    prepare_random_rows,
)
from kernels.sample.slot_params import SlotParams
from services.worker.guides.grammars import NotCompiled
from services.worker.metrics import GUIDE_MASK_SECONDS, GUIDE_MASKS
from services.worker.slots.logits_rules import row_change
from services.worker.slots.table import SlotTable
from services.worker.step.sampler import Adjusted, Sampler
from services.worker.step.step import Backend, Step, StepPart

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
        table, backend, slots = self._table, self._backend, step.rows.sampling_slots
        if not backend.has_rules[slots].any():
            return
        backend.catch_up()
        rows, slots, positions = step.computation.places()
        await_grammars(table, slots)
        changed = np.flatnonzero(backend.has_rules[slots])
        step.adjusted = adjust_logits(
            table,
            step.logits,
            rows=rows[changed],
            slots=slots[changed],
            positions=positions[changed],
            eos_ids=self._eos_ids,
            sampler=backend.sampler,
            upload=backend.upload,
        )


def adjust_logits(
    table: SlotTable,
    logits: Tensor,
    rows: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    eos_ids: np.ndarray,
    sampler: Sampler,
    upload: Callable[[np.ndarray], Tensor],
) -> Adjusted | None:
    """Returns a copy of ``logits`` [S, V] with the changes of the rules of ``slots`` [n] in
    ``rows`` [n], which are for ``positions`` [n], or None if there are none."""
    adjustments, waiting = prepare_logits_rules(table, rows, slots, positions, eos_ids, upload)
    if adjustments is None and not len(waiting):
        return None
    changed = logits if adjustments is None else sampler.adjust(logits, adjustments)
    return Adjusted(changed, waiting)


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


def prepare_logits_rules(
    table: SlotTable,
    rows: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    eos_ids: np.ndarray,
    upload: Callable[[np.ndarray], Tensor],
) -> tuple[Adjustments | None, np.ndarray]:
    """Returns what the logits rules of ``slots`` [n] change in ``rows`` [n] of the logits, which
    are for ``positions`` [n]; and those of the rows [W] int64 whose grammar is not compiled."""
    columns = rows, slots, positions, table.num_tokens[slots]
    places = list(map(_Place, *(each.tolist() for each in columns)))
    masks, waiting = _guide_masks(table, places)
    changes = []
    for place in places:
        row, slot, position, num_known = place
        rules = table.logits_rules[slot]
        if rules is not None and rules.has_points and row not in waiting:
            ids, prompt_len = table.ids[slot, :position], int(table.prompt_lens[slot])
            num_drafts, mask = position - num_known, masks.get(row)
            change = row_change(row, rules, ids, num_drafts, prompt_len, eos_ids, mask)
            changes.append(change)
    return prepare_adjustments(changes, masks, upload), np.array(waiting, np.int64)


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
